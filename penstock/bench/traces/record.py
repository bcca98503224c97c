"""Defines the records of a trace: lengths, arrival, and the blocks of tokens that prompts share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from penstock.types import Lane

FIRST_UNSHARED = 1 << 30  # ids of unshared blocks start here; ids in files are smaller
BlockRuns = tuple[tuple[int, int], ...]  # (first id, count): the ids first, first + 1, ..., first + count - 1


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """A request. Its prompt consists of blocks of `block_tokens` tokens; the last may be incomplete.

    Two prompts share the tokens of their equal leading block ids. `block_runs` always covers the whole prompt: the part
    that a trace does not describe consists of unshared blocks.
    """

    arrival_s: float  # time since the first request
    num_input_tokens: int
    num_output_tokens: int
    block_runs: BlockRuns
    block_tokens: int
    session: str = ""  # a request waits for the previous answer of its session and agent
    agent: str = ""
    tenant: str = ""
    lane: Lane | None = None

    def __post_init__(self) -> None:
        assert self.num_blocks == math.ceil(self.num_input_tokens / self.block_tokens), "blocks do not cover the prompt"

    @property
    def num_blocks(self) -> int:
        return sum(count for _, count in self.block_runs)

    @property
    def num_tokens(self) -> int:
        """The length of prompt and answer together, which is the context that the request needs."""
        return self.num_input_tokens + self.num_output_tokens

    def block_ids(self) -> Iterator[int]:
        """Yields the id of every block of the prompt in order."""
        return chain.from_iterable(range(first, first + count) for first, count in self.block_runs)


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file by arrival; the first arrives at 0."""

    name: str
    records: tuple[TraceRecord, ...]
    has_blocks: bool  # False: the trace does not describe shared prefixes
    tick_s: float = 0.0  # the clock tick over which requests were spread; 0: times are as recorded

    @property
    def duration_s(self) -> float:
        """The time from the first arrival to the last."""
        return self.records[-1].arrival_s if self.records else 0.0

    @property
    def has_sessions(self) -> bool:
        return any(record.session for record in self.records)


def to_runs(block_ids: Iterable[int]) -> BlockRuns:
    """Returns ids as runs of successive ones."""
    runs: list[tuple[int, int]] = []
    for block in block_ids:
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)


def cover(runs: Iterable[tuple[int, int]], num_blocks: int, next_unshared: int) -> BlockRuns:
    """Cuts the runs to `num_blocks` blocks, or pads them with unshared blocks with ids from `next_unshared` on."""
    covered: list[tuple[int, int]] = []
    left = num_blocks
    for first, count in runs:
        if left <= 0:
            break
        covered.append((first, min(count, left)))
        left -= covered[-1][1]
    if left > 0:
        covered.append((next_unshared, left))
    return tuple(covered)
