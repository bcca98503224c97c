"""A request of a trace or workload, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.errors import PenstockError
from penstock.types import Lane, WorkerId

_FIRST_OUTPUT_TOKEN = 1 << 31  # output tokens differ from prompt tokens
_SPREAD = 1_000_003


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `block_ids` name the prompt's blocks of `block_tokens` tokens; equal ids mean equal content, and the
    last block may be incomplete."""

    number: int
    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]
    block_tokens: int
    lane: Lane = Lane.STANDARD
    tenant: str = ""

    def token_ids(self) -> list[int]:
        """Returns prompt tokens that are equal exactly where blocks are."""
        tokens: list[int] = []
        for block in self.block_ids:
            tokens += [block] * self.block_tokens
        del tokens[self.num_input_tokens :]
        return tokens

    def output_token(self, position: int) -> int:
        """Returns the token at a position; like a seeded sample, it depends on request and position alone."""
        return _FIRST_OUTPUT_TOKEN + (self.number * _SPREAD + position) % _FIRST_OUTPUT_TOKEN


@dataclass(slots=True)
class Outcome:
    """What a client observes of one request, and where its prompt was computed."""

    request: TraceRequest
    first_token_s: float | None = None
    end_s: float | None = None
    num_tokens: int = 0
    granted_tokens: int | None = None  # maximum output, reduced under overload
    error: PenstockError | None = None
    num_ends: int = 0
    abandoned: bool = False  # the client left
    num_wrong_tokens: int = 0
    num_redispatches: int = 0
    cached_tokens: int = 0  # prompt tokens that its worker had cached
    computed_by: WorkerId | None = None
    decoded_by: list[WorkerId] = field(default_factory=list)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for a single token."""
        if self.first_token_s is None or self.end_s is None or self.num_tokens < 2:
            return 0.0
        return (self.end_s - self.first_token_s) / (self.num_tokens - 1)

    @property
    def is_complete(self) -> bool:
        return self.num_ends == 1 and self.error is None and not self.abandoned
