"""Computes the costs of work in seconds: prefill steps, decode steps, bytes on a link.

A step takes a fixed time, during which its weights are read, and computing hides behind that reading until a step has
more tokens than the ridge of the roofline (Williams et al., CACM 2009). Beyond it each token adds its own time.

The defaults are those of an 8B model in bf16 on one 80 GB GPU: weights of 16 GB at 2.4 TB/s make a decode step of 7 ms,
KV of 128 KiB a token is read at the same rate, a prompt token costs 16 GFLOP at 250 TFLOP/s, and attention costs a
token 0.5 MFLOP for each token of its context. They are derived, not measured; a comparison of policies needs only their
proportions.
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
    context_s: float = 2e-9  # time of one token for each token before it
    hidden_s: float = 0.0  # part of `step_s` behind which computing tokens is free

    def chunk_s(self, num_tokens: int, num_before: int) -> float:
        """Returns the time of a chunk without the step's fixed part."""
        return num_tokens * (self.token_s + self.context_s * (num_before + num_tokens / 2))

    def prompt_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """Returns the time of a whole uncached prompt on an otherwise idle worker."""
        full, rest = divmod(num_tokens, chunk_tokens)
        hidden_s = full * min(self.hidden_s, chunk_tokens * self.token_s) + min(self.hidden_s, rest * self.token_s)
        return -(-num_tokens // chunk_tokens) * self.step_s + self.chunk_s(num_tokens, 0) - hidden_s

    def work_s(self, work: Iterable[ScheduledSequence]) -> float:
        """Returns the time of a step."""
        chunks_s, num_tokens = 0.0, 0
        for item in work:
            chunks_s += self.chunk_s(item.num_tokens, item.sequence.num_computed_tokens)
            num_tokens += item.num_tokens
        return self.step_s + chunks_s - min(self.hidden_s, num_tokens * self.token_s)


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """A step's time: a + b * batch + c * tokens of KV, plus the cost of prompt chunks in it.

    With experts, `expert_s` is the time to read all of them, of which a token uses `expert_share`; a step reads the
    experts that any of its tokens uses.
    """

    step_s: float = 0.007
    sequence_s: float = 30e-6
    kv_token_s: float = 55e-9
    chunk: PrefillCosts = PrefillCosts()
    token_s: float = 0.0  # time to compute one token
    hidden_s: float = 0.0  # part of `step_s` behind which computing tokens is free
    expert_s: float = 0.0
    expert_share: float = 0.0
    mixed_s: float = 0.0  # extra time of any step with prompt chunks

    def batch_s(self, num_tokens: int, num_chunk_tokens: int = 0) -> float:
        """Returns the time of a step of one token for each sequence, without its contexts and its chunks' attention."""
        experts_s = self.expert_s * (1.0 - (1.0 - self.expert_share) ** (num_tokens + num_chunk_tokens))
        computing_s = num_tokens * self.token_s + num_chunk_tokens * self.chunk.token_s
        hidden_s = self.hidden_s + experts_s
        return self.step_s + experts_s + num_tokens * self.sequence_s + max(0.0, computing_s - hidden_s)

    def work_s(self, work: Iterable[ScheduledSequence]) -> float:
        """Returns the time of a step; an item with more than one token is a prompt chunk."""
        num_tokens = num_chunk_tokens = contexts = 0
        attention_s = 0.0
        for item in work:
            before = item.sequence.num_computed_tokens
            if item.num_tokens == 1:
                num_tokens += 1
                contexts += before
            else:
                num_chunk_tokens += item.num_tokens
                attention_s += self.chunk.context_s * item.num_tokens * (before + item.num_tokens / 2)
        if not num_chunk_tokens:
            return self.decode_s(num_tokens, contexts)
        chunks_s = self.batch_s(num_tokens, num_chunk_tokens) - self.batch_s(num_tokens) + attention_s
        return self.decode_s(num_tokens, contexts) + self.mixed_s + chunks_s

    def decode_s(self, num_tokens: int, contexts: int) -> float:
        """Returns the time of a step that gives each of `num_tokens` sequences its next token.

        `contexts` is the number of tokens before those, over all sequences.
        """
        return self.batch_s(num_tokens) + self.kv_token_s * contexts

    def decode_each_s(self, num_tokens: int, contexts: int, num_steps: int) -> list[float]:
        """Returns the time of each of several such steps in a row, in which every context grows by a token a step."""
        batch_s, kv_token_s = self.batch_s(num_tokens), self.kv_token_s
        end = contexts + num_steps * num_tokens
        return [batch_s + kv_token_s * each for each in range(contexts, end, num_tokens)]


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """A link for KV between two workers. Control messages pay the latency only."""

    bytes_per_s: float = 12.5e9  # 100 Gbit/s
    latency_s: float = 0.0002
    jitter_s: float = 0.0001
    token_bytes: int = 131_072
