"""Lists the unsupported fields of Anthropic's bodies: harmless ones, which are ignored, and refused ones. Pure.

docs/anthropic.md lists the same names; a test compares both with the types of Anthropic's own client.
"""

from __future__ import annotations

from collections.abc import Mapping

Neutral = Mapping[str, tuple[object, ...]]

# Hints and annotations of the client, which do not change the answer.
HARMLESS = frozenset(
    {
        "cache_control",  # every full page of a prompt is cached, with or without a marker
        "diagnostics",  # asks why a prompt missed the cache
    }
)
# Fields that would change the answer, each with the values that change nothing and are allowed. So is null.
REFUSED: Neutral = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "context_management": (
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},  # clears nothing
    ),
    "fallback_credit_token": (),
    "fallbacks": ([], "default"),
    "inference_geo": ("global",),
    "mcp_servers": ([],),
    "output_format": (),
    "speed": ("standard",),
    "thread": (),
}
HARMLESS_IN_BLOCKS = frozenset({"cache_control"})
REFUSED_IN_TEXT: Neutral = {"citations": ([],)}
REFUSED_IN_TOOL_USE: Neutral = {"caller": ({"type": "direct"},), "toolset_name": ()}
REFUSED_IN_TOOL_RESULTS: Neutral = {"toolset_name": ()}
HARMLESS_IN_TOOLS = frozenset({"cache_control", "eager_input_streaming"})  # arguments are always streamed at once
REFUSED_IN_TOOLS: Neutral = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
HARMLESS_IN_METADATA: frozenset[str] = frozenset()
HARMLESS_IN_THINKING = frozenset({"budget_tokens"})  # a target that no chat template supports; the docs say so
REFUSED_IN_OUTPUT_CONFIG: Neutral = {"task_budget": ()}
