"""The fields of the Responses API that nothing here obeys: which are harmless, and which are refused. Pure.

docs/responses.md lists the same names; a test holds both against the types of OpenAI's own client.
"""

from __future__ import annotations

from collections.abc import Mapping

Neutral = Mapping[str, tuple[object, ...]]

# Hints and notes of the client. Without them the answer is the same.
HARMLESS = frozenset(
    {
        "client_metadata",
        "max_tool_calls",  # of built-in tools, of which there are none
        "prompt_cache_options",
        "safety_identifier",
    }
)
# Fields that would change the answer, each with the values that ask for nothing. Null always does.
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
# Summaries are never written, whatever is asked: the reasoning itself is in the answer.
HARMLESS_IN_REASONING = frozenset({"summary", "generate_summary"})
REFUSED_IN_REASONING: Neutral = {"context": ("auto",), "mode": ("standard",)}
REFUSED_IN_TOOLS: Neutral = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
# Notes that an item carries from the response that it was part of.
HARMLESS_IN_ITEMS = frozenset({"id", "status", "phase", "created_by"})
REFUSED_IN_CALLS: Neutral = {"async": (False,), "caller": ({"type": "direct"},), "namespace": ()}
HARMLESS_IN_PARTS = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})
