"""A request as traces and workloads give it, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.errors import PenstockError
from penstock.types import Lane, WorkerId

_FIRST_DRAWN = 1 << 31  # tokens that are drawn differ from those of prompts
_SPREAD = 1_000_003


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`block_ids` name the prompt's blocks of `block_tokens` tokens, the last one cut; equal ids are equal content."""

    number: int
    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]
    block_tokens: int
    lane: Lane = Lane.STANDARD
    tenant: str = ""

    def token_ids(self) -> list[int]:
        """Tokens that are equal exactly where blocks are; what they are does not matter."""
        tokens: list[int] = []
        for block in self.block_ids:
            tokens += [block] * self.block_tokens
        del tokens[self.num_input_tokens :]
        return tokens

    def drawn_token(self, position: int) -> int:
        """The output depends on the request and the position alone, as seeded draws do."""
        return _FIRST_DRAWN + (self.number * _SPREAD + position) % _FIRST_DRAWN


@dataclass(slots=True)
class Outcome:
    """What the client of one request sees, and where its prompt was computed."""

    request: TraceRequest
    first_token_s: float | None = None
    end_s: float | None = None
    num_tokens: int = 0
    granted_tokens: int | None = None  # of output; fewer than asked for under overload
    error: PenstockError | None = None
    num_ends: int = 0
    abandoned: bool = False  # by its client
    num_wrong_tokens: int = 0
    num_redispatches: int = 0
    cached_tokens: int = 0  # of the prompt, which whoever computed it had already
    computed_by: WorkerId | None = None
    decoded_by: list[WorkerId] = field(default_factory=list)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; 0 for a single one."""
        if self.first_token_s is None or self.end_s is None or self.num_tokens < 2:
            return 0.0
        return (self.end_s - self.first_token_s) / (self.num_tokens - 1)

    @property
    def is_complete(self) -> bool:
        return self.num_ends == 1 and self.error is None and not self.abandoned
