"""Costs of work in seconds: prefill steps, decode steps, bytes on a link.

The defaults stand for an 8B model in bf16 on one 80 GB GPU: weights of 16 GB at 2.4 TB/s make a decode step of 7 ms, KV
of 128 KiB a token is read at the same rate, a prompt token costs 16 GFLOP at 250 TFLOP/s, and attention of a token over
its context 0.5 MFLOP a token of it. They are derived, not measured; a comparison of policies needs only
their proportions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.step.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """A step's time: a + b * tokens + c * tokens * context."""

    step_s: float = 0.008
    token_s: float = 65e-6
    context_s: float = 2e-9  # of one token for each token before it

    def chunk_s(self, num_tokens: int, num_before: int) -> float:
        """Returns the time of a chunk without the step's fixed part."""
        return num_tokens * (self.token_s + self.context_s * (num_before + num_tokens / 2))

    def prompt_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """Returns the time of a whole uncached prompt alone on the worker."""
        return -(-num_tokens // chunk_tokens) * self.step_s + self.chunk_s(num_tokens, 0)

    def work_s(self, work: Iterable[ScheduledSequence]) -> float:
        """Returns the time of a step."""
        return self.step_s + sum(self.chunk_s(item.num_tokens, item.sequence.num_computed_tokens) for item in work)


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """A step's time: a + b * batch + c * tokens of KV, plus the cost of prompt chunks in it."""

    step_s: float = 0.007
    sequence_s: float = 30e-6
    kv_token_s: float = 55e-9
    chunk: PrefillCosts = PrefillCosts()

    def work_s(self, work: Iterable[ScheduledSequence], stride: int = 1) -> float:
        """Returns the time of `stride` steps at once; an item with more than `stride` tokens is a prompt chunk."""
        step_s, chunks_s = self.step_s, 0.0
        for item in work:
            before = item.sequence.num_computed_tokens
            if item.num_tokens <= stride:
                step_s += self.sequence_s + self.kv_token_s * before
            else:
                chunks_s += self.chunk.chunk_s(item.num_tokens, before)
        return stride * step_s + chunks_s


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """A link for KV between two workers. Control messages pay the latency only."""

    bytes_per_s: float = 12.5e9  # 100 Gbit/s
    latency_s: float = 0.0002
    jitter_s: float = 0.0001
    token_bytes: int = 131_072
