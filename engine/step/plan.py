"""Plans one step: the next token of every row, then chunks of prompts and sequences with proposed tokens.

A scheduler makes the plan, `engine.step.batch` turns it into arrays, and the scheduler reads it again to record the
step. A row's parameters stay the same, so all steps share one `RowMembers` until a sequence joins or leaves. Its
position changes every step: `engine.step.row_table` makes a copy for each, `DecodeRows`.

Imports numpy but no torch. Shapes: `R` rows, `W` pages of a row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import overload

import numpy as np

from engine.step.sequence import ScheduledSequence, Sequence
from penstock.types import SamplingParams

_NEVER = np.iinfo(np.int64).max

# One record per row: its request's parameters.
ROW_PARAMS = np.dtype(
    [
        ("end", np.int64),  # length at which the sequence ends in any case, in tokens
        ("special_below", np.int64),  # below this length, sampling needs more than these columns
        ("needs_text", np.bool_),  # `Sequence.sampling_needs_text`
        ("eos_ends", np.bool_),
        ("has_stops", np.bool_),  # any of its tokens may end it, or force others to follow at once
        ("adapter", np.int64),  # slot, 0 for none
        # Read by `engine.sampling`.
        ("is_greedy", np.bool_),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
    ]
)


@dataclass(frozen=True, slots=True)
class EndConditions:
    """The conditions that end sequences besides their own parameters."""

    eos_token_ids: Collection[int] = ()
    context_length: int = int(_NEVER)


def sampling_records(samplings: Iterable[SamplingParams]) -> np.ndarray:
    """Returns `ROW_PARAMS` records in which only the sampling fields mean anything."""
    return np.array([(0, 0, False, False, False, 0, *_sampling_fields(sampling)) for sampling in samplings], ROW_PARAMS)


def row_params(sequence: Sequence, ends: EndConditions) -> tuple[object, ...]:
    """Returns the fields of `ROW_PARAMS` in order; writing a whole record costs as much as writing a single field."""
    sampling, special_below = sequence.sampling, 0
    if sampling.edits_every_token or sampling.logprobs is not None:
        special_below = int(_NEVER)
    elif sampling.min_tokens:
        special_below = sequence.num_prompt_tokens + sampling.min_tokens
    return (
        min(sequence.num_prompt_tokens + sampling.max_tokens, ends.context_length),
        special_below,
        sequence.sampling_needs_text,
        not sampling.ignore_eos,
        bool(sampling.stop_token_ids) or sampling.grammar is not None,
        sequence.adapter_slot,
        *_sampling_fields(sampling),
    )


def _sampling_fields(sampling: SamplingParams) -> tuple[bool, float, int, float, float, int]:
    is_greedy = sampling.greedy or sampling.top_k == 1
    return is_greedy, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed


class RowMembers:
    """The sequences that have a row, and their parameters. Immutable, and shared by steps until a row is added or
    removed.
    """

    __slots__ = (
        "adapters",
        "eos_ends",
        "has_stops",
        "items",
        "last_R",
        "needs_text",
        "params",
        "places_R",
        "special_below",
        "texts",
    )

    def __init__(self, items: list[ScheduledSequence], texts: list[list[int]], params: np.ndarray) -> None:
        self.items = items  # one token each
        self.texts = texts  # `token_ids` of their sequences, which grow
        self.params = params  # [R] of `ROW_PARAMS`
        self.places_R = np.arange(len(items))
        self.last_R = params["end"] - 2  # position whose sampled token is certain to be the last
        # None if no row sets the field, so that steps skip the comparison.
        self.eos_ends = _if_any(params["eos_ends"])
        self.has_stops = _if_any(params["has_stops"])
        self.needs_text = _if_any(params["needs_text"])
        self.adapters = _if_any(params["adapter"])
        self.special_below = _if_any(params["special_below"])

    def __len__(self) -> int:
        return len(self.items)

    def select(self, rows: np.ndarray) -> RowMembers:
        """Returns the members of only these rows."""
        chosen = rows.tolist()
        return RowMembers(
            [self.items[row] for row in chosen], [self.texts[row] for row in chosen], self.params.take(rows)
        )


def _if_any(column: np.ndarray) -> np.ndarray | None:
    return column.copy() if column.any() else None


@dataclass(slots=True, eq=False)
class DecodeRows:
    """The rows of one step as they stood when it was scheduled. Immutable."""

    members: RowMembers
    step: int
    positions_R: np.ndarray  # of the token that is computed
    token_ids_R: np.ndarray  # that token, unless it is awaited
    awaited_rows: np.ndarray | None  # rows whose token the previous step samples; None if all are known
    awaited_places: np.ndarray | None  # the place of each awaited row in that step's plan
    page_R: np.ndarray  # index of the row's page that takes the KV
    offset_R: np.ndarray  # the place in that page
    pages_RW: np.ndarray  # int32, wide enough for the longest row; 0 past a row's last page
    edits_R: np.ndarray  # int64, a number for each row: rows of equal numbers have equal pages

    def __len__(self) -> int:
        return len(self.members.items)

    @property
    def items(self) -> list[ScheduledSequence]:
        return self.members.items

    @property
    def num_contexts(self) -> float:
        """See `ScheduledSequence.num_contexts`; the sum over all rows."""
        return float(self.positions_R.sum()) + len(self) / 2

    def special(self) -> dict[int, Sequence]:
        """Returns, by row, the sequences whose next token needs more than `ROW_PARAMS` to be sampled: edits, a grammar
        or log-probabilities."""
        below = self.members.special_below
        if below is None:
            return {}
        return {row: self.items[row].sequence for row in (self.positions_R + 1 < below).nonzero()[0].tolist()}

    def may_end(self, token_ids_R: np.ndarray, eos_token_ids: Collection[int]) -> np.ndarray:
        """Returns a mask of the rows that may end with these sampled tokens; `finish_reason` decides."""
        members = self.members
        may_R: np.ndarray = self.positions_R >= members.last_R
        if members.has_stops is not None:
            may_R |= members.has_stops
        if members.eos_ends is not None:
            for token_id in eos_token_ids:
                may_R |= (token_ids_R == token_id) & members.eos_ends
        return may_R


class StepPlan(Seq[ScheduledSequence]):
    """The work of one step: the rows' next tokens, then chunks of prompts and any other sequence without a row."""

    def __init__(
        self, rows: DecodeRows, chunks: list[ScheduledSequence], taps: bool = True, *, is_apart: bool = False
    ) -> None:
        """Without `taps` the step hands out no hidden states, even if layers are tapped. `is_apart` marks a step of the
        prompt stream, which computes prompts beside the decode steps.
        """
        self.rows = rows
        self.chunks = chunks
        self.taps = taps
        self.is_apart = is_apart
        self._items = rows.items + chunks if chunks else rows.items
        self.num_tokens = len(rows) + sum(chunk.num_positions for chunk in chunks)
        self.num_contexts = rows.num_contexts + sum(chunk.num_contexts for chunk in chunks)

    @property
    def step(self) -> int:
        return self.rows.step

    @property
    def speculates(self) -> bool:
        """Returns whether it verifies proposed tokens, so that the number of its tokens is unknown until it is over."""
        return any(chunk.proposed for chunk in self.chunks)

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> ScheduledSequence: ...

    @overload
    def __getitem__(self, index: slice) -> list[ScheduledSequence]: ...

    def __getitem__(self, index: int | slice) -> ScheduledSequence | list[ScheduledSequence]:
        return self._items[index]

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return iter(self._items)
