"""Makes the workloads: short prompts, long prompts, both together, and recorded traffic if it is available."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from benchmarks.serving.rounds import uniform_source
from penstock.bench.traces.read import FOLDER_VARIABLE
from penstock.bench.workloads.plan import Source
from penstock.bench.workloads.recorded import trace_source

TRACE = "mooncake_conversation_first3000.jsonl.gz"
_TRACE_INPUTS, _TRACE_OUTPUTS, _TRACE_CONTEXT = 1 / 32, 1 / 16, 2048  # 16 tokens a block
_SHARE_OF_LONG = 0.2


def short_prompts(count: int, seed: int) -> Source:
    """Returns chats: the decode work outweighs the prompts."""
    return replace(uniform_source(count, (32, 192), (32, 96), seed), name="short: 32-192 tokens in, 32-96 out")


def long_prompts(count: int, seed: int) -> Source:
    """Returns summaries: the prompts outweigh the decode work."""
    return replace(uniform_source(count, (512, 1536), (8, 32), seed), name="long: 512-1536 tokens in, 8-32 out")


def mixed_prompts(count: int, seed: int) -> Source:
    """Returns chats with a long prompt now and then, which would stall concurrent streams."""
    rng = random.Random(seed)
    short, long = short_prompts(count, seed), long_prompts(count, seed + 1)
    pairs = zip(short.drafts, long.drafts, strict=True)
    drafts = [other if rng.random() < _SHARE_OF_LONG else one for one, other in pairs]
    return Source(f"mixed: short, {_SHARE_OF_LONG:.0%} of them long", tuple(drafts))


def recorded_chat(count: int, seed: int) -> Source:
    """Returns Mooncake's conversations, scaled to a small model's context, with their shared prefixes."""
    found = trace_source(
        TRACE,
        seed=seed,
        limit=count,
        input_factor=_TRACE_INPUTS,
        output_factor=_TRACE_OUTPUTS,
        max_context=_TRACE_CONTEXT,
    )
    return replace(found, name="recorded: Mooncake conversations, 1/32 of the prompts, 1/16 of the answers")


def workloads() -> Mapping[str, Callable[[int, int], Source]]:
    """Returns the workloads by name; each makes `count` requests by a seed."""
    found: dict[str, Callable[[int, int], Source]] = {
        "short": short_prompts,
        "long": long_prompts,
        "mixed": mixed_prompts,
    }
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and os.path.exists(os.path.join(folder, TRACE)):
        found["recorded"] = recorded_chat
    return found
