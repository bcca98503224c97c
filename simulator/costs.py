"""What work costs in seconds: prefill steps, decode steps, bytes on a link. Plain numbers: a run says what it assumes.

The defaults stand for an 8B model in bf16 on one 80 GB GPU: weights of 16 GB at 2.4 TB/s make a decode step of 7 ms, KV
of 128 KiB a token is read at the same rate, a prompt token costs 16 GFLOP at 250 TFLOP/s, and attention of a token over
its context 0.5 MFLOP a token of it. They are reckoned, not measured; what a comparison of policies needs is their
proportion.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """A step's time: a + b * tokens + c * tokens * context."""

    step_s: float = 0.008
    token_s: float = 65e-6
    context_s: float = 2e-9  # of one token for each token before it

    def chunk_s(self, num_tokens: int, num_before: int) -> float:
        """Without the step's own time."""
        return num_tokens * (self.token_s + self.context_s * (num_before + num_tokens / 2))

    def prompt_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """A whole prompt alone on the worker, nothing of it cached."""
        return -(-num_tokens // chunk_tokens) * self.step_s + self.chunk_s(num_tokens, 0)

    def work_s(self, work: Iterable[ScheduledSequence]) -> float:
        return self.step_s + sum(self.chunk_s(item.num_tokens, item.sequence.num_computed_tokens) for item in work)


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """A step's time: a + b * batch + c * tokens of KV, and what chunks of prompts in it cost."""

    step_s: float = 0.007
    sequence_s: float = 30e-6
    kv_token_s: float = 55e-9
    chunk: PrefillCosts = PrefillCosts()

    def work_s(self, work: Iterable[ScheduledSequence], stride: int = 1) -> float:
        """Of `stride` steps at once: sequences that decode have as many tokens to compute, chunks of prompts more."""
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
    """KV between two workers. Control messages pay the latency alone."""

    bytes_per_s: float = 12.5e9  # 100 Gbit/s
    latency_s: float = 0.0002
    jitter_s: float = 0.0001
    token_bytes: int = 131_072
