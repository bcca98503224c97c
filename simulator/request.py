"""Defines a request of a trace or workload, its tokens, which are never held as a list, and its outcome."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast, overload

from penstock.errors import PenstockError
from penstock.types import Lane, WorkerId

_FIRST_OUTPUT_TOKEN = 1 << 31  # output tokens differ from prompt tokens
_SPREAD = 1_000_003


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request. `block_ids` name the prompt's blocks of `block_tokens` tokens; equal ids mean equal content, and the
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
        return RequestTokens(self)[:]

    def output_token(self, position: int) -> int:
        """Returns the token at a position; like a seeded sample, it depends only on request and position."""
        return _FIRST_OUTPUT_TOKEN + (self.number * _SPREAD + position) % _FIRST_OUTPUT_TOKEN


class RequestTokens:
    """Stands in for the list of a request's prompt and output tokens: it knows the length and computes tokens on
    demand.

    A sequence uses it as its `token_ids`. Appending only counts; the token follows from its position.
    """

    __slots__ = ("length", "request")

    def __init__(self, request: TraceRequest, num_output: int = 0) -> None:
        self.request = request
        self.length = request.num_input_tokens + num_output

    def as_list(self) -> list[int]:
        """Returns itself, typed as a list for schedulers: they append, take lengths, the last token and slices."""
        return cast(list[int], self)

    def copy(self) -> RequestTokens:
        return RequestTokens(self.request, self.length - self.request.num_input_tokens)

    def first(self, count: int) -> RequestTokens:
        """Returns only the first tokens."""
        head = self.copy()
        head.length = count
        return head

    def append(self, token_id: int) -> None:
        self.length += 1

    def extend_by(self, count: int) -> None:
        self.length += count

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self.length)
            assert step == 1, "no caller takes every other token"
            return self._tokens(start, stop)
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return self._tokens(index % self.length, index % self.length + 1)[0]

    def _tokens(self, start: int, stop: int) -> list[int]:
        request, tokens = self.request, []
        num_input, size = request.num_input_tokens, request.block_tokens
        position, end = start, min(stop, num_input)
        while position < end:
            block_end = min((position // size + 1) * size, end)
            tokens += [request.block_ids[position // size]] * (block_end - position)
            position = block_end
        first = max(start, num_input)
        if first >= stop:
            return tokens
        begin, end = request.output_token(first), request.output_token(stop - 1)
        if end - begin == stop - 1 - first:  # consecutive, as nearly always
            return tokens + list(range(begin, end + 1))
        return tokens + [request.output_token(each) for each in range(first, stop)]


@dataclass(slots=True)
class Outcome:
    """A client's view of one request, and where its prompt was computed."""

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
    num_resumed: int = 0  # times that another router continued it after one was lost
    cached_tokens: int = 0  # prompt tokens that its worker had cached
    computed_by: WorkerId | None = None
    decoded_by: list[WorkerId] = field(default_factory=list)
    gaps_s: list[float] | None = None  # times between messages with tokens, if wanted; each has one if `max_run` is 1
    last_token_s: float = 0.0

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
