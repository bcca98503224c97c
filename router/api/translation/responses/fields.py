"""Lists the unsupported fields of the Responses API: harmless ones, which are ignored, and refused ones. Pure.

docs/responses.md lists the same names; a test compares both with the types of OpenAI's own client.
"""

from __future__ import annotations

from collections.abc import Mapping

Neutral = Mapping[str, tuple[object, ...]]

# Hints and annotations of the client, which do not change the answer.
HARMLESS = frozenset(
    {
        "client_metadata",
        "max_tool_calls",  # limits calls of built-in tools, which do not exist here
        "prompt_cache_options",
        "safety_identifier",
    }
)
# Fields that would change the answer, each with the values that change nothing and are allowed. So is null.
REFUSED: Neutral = {
    "access_programs": (),
    "background_options": ({}, {"completion_window": "soonest"}),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
HARMLESS_IN_STREAM_OPTIONS = frozenset({"include_obfuscation"})
REFUSED_IN_TEXT_CONFIG: Neutral = {"verbosity": ("medium",)}
# Reasoning is never summarized: the answer contains the reasoning itself.
HARMLESS_IN_REASONING = frozenset({"summary", "generate_summary"})
REFUSED_IN_REASONING: Neutral = {"context": ("auto",), "mode": ("standard",)}
REFUSED_IN_TOOLS: Neutral = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
# Fields that an item keeps from the response that it was part of.
HARMLESS_IN_ITEMS = frozenset({"id", "status", "phase", "created_by"})
REFUSED_IN_CALLS: Neutral = {"async": (False,), "caller": ({"type": "direct"},), "namespace": ()}
HARMLESS_IN_PARTS = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})
