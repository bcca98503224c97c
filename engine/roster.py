"""Who has a row in a step and what they ask for, and the rows of one step as they stood when it was scheduled.

What a row asks for is the same in every step: a `Roster` is made when somebody has joined or left, and shared by all
steps until then. Where rows stand, which changes in every step, is `engine.row_table`'s; `DecodeRows` is a copy of it.

Pure: numpy and no torch. Shapes: `R` rows, `W` pages of a row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from engine.sequence import ScheduledSequence, Sequence
from penstock.types import SamplingParams

_NEVER = np.iinfo(np.int64).max

ASKS = np.dtype(
    [
        ("listener", np.int64),  # `Sequence.listener`
        ("end", np.int64),  # tokens at which the sequence ends in any case
        ("special_until", np.int64),  # tokens below which a draw needs more than these columns
        ("eos_ends", np.bool_),
        ("has_stops", np.bool_),  # token ids of its own that end it
        # What sampling needs; `engine.sampler` reads these.
        ("is_greedy", np.bool_),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
    ]
)


def records_of(samplings: Iterable[SamplingParams]) -> np.ndarray:
    """Of `ASKS`, where nothing but sampling is asked for."""
    return np.array([(0, 0, 0, False, False, *_sampling_of(sampling)) for sampling in samplings], ASKS)


def _sampling_of(sampling: SamplingParams) -> tuple[bool, float, int, float, float, int]:
    is_greedy = sampling.greedy or sampling.top_k == 1
    return is_greedy, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends sequences besides their own parameters."""

    eos_token_ids: Collection[int] = ()
    context_length: int = int(_NEVER)


def asks_of(sequence: Sequence, ends: Ends) -> tuple[object, ...]:
    """In the order of `ASKS`: to write a record whole costs as much as one field alone."""
    sampling, special_until = sequence.sampling, 0
    if sampling.has_penalties or sampling.logit_bias or sampling.logprobs is not None:
        special_until = int(_NEVER)
    elif sampling.min_tokens:
        special_until = sequence.num_prompt_tokens + sampling.min_tokens
    return (
        sequence.listener,
        min(sequence.num_prompt_tokens + sampling.max_tokens, ends.context_length),
        special_until,
        not sampling.ignore_eos,
        bool(sampling.stop_token_ids),
        *_sampling_of(sampling),
    )


class Roster:
    """Who has a row and what they ask for. Steps share it as long as nobody joins or leaves; nothing changes it."""

    __slots__ = (
        "asks",
        "eos_ends",
        "has_stops",
        "items",
        "last_R",
        "listeners_R",
        "places_R",
        "special_until",
        "texts",
    )

    def __init__(self, items: list[ScheduledSequence], texts: list[list[int]], asks: np.ndarray) -> None:
        self.items = items  # one token each
        self.texts = texts  # their sequences' tokens, which grow
        self.asks = asks  # R of `ASKS`
        self.places_R = np.arange(len(items))
        self.listeners_R = asks["listener"].copy()
        self.last_R = asks["end"] - 2  # positions: the token drawn there is the last one
        # None where nobody asks for it.
        self.eos_ends = _unless_none(asks["eos_ends"])
        self.has_stops = _unless_none(asks["has_stops"])
        self.special_until = _unless_none(asks["special_until"])

    def __len__(self) -> int:
        return len(self.items)

    def of(self, rows: np.ndarray) -> Roster:
        going = rows.tolist()
        return Roster([self.items[row] for row in going], [self.texts[row] for row in going], self.asks.take(rows))


def _unless_none(column: np.ndarray) -> np.ndarray | None:
    return column.copy() if column.any() else None


@dataclass(slots=True, eq=False)
class DecodeRows:
    """The rows of one step as they stood when it was scheduled; nothing changes it afterwards."""

    roster: Roster
    step: int
    positions_R: np.ndarray  # of the token that is computed
    token_ids_R: np.ndarray  # that token, unless it is awaited
    awaited: np.ndarray | None  # places of those whose token is drawn by the step before ...
    awaited_places: np.ndarray | None  # ... as this one of its tokens
    page_R: np.ndarray  # which of the row's pages it is written to ...
    offset_R: np.ndarray  # ... and where there
    pages_RW: np.ndarray  # int32, wide enough for the longest of them; 0 past a row's last page

    def __len__(self) -> int:
        return len(self.roster.items)

    @property
    def items(self) -> list[ScheduledSequence]:
        return self.roster.items

    @property
    def num_contexts(self) -> float:
        """See `ScheduledSequence.num_contexts`; of all together."""
        return float(self.positions_R.sum()) + len(self) / 2

    @property
    def is_special(self) -> bool:
        """Whether a row's draw needs its tokens, or more than a token is wanted of it."""
        until = self.roster.special_until
        return until is not None and bool((self.positions_R + 1 < until).any())

    def may_end(self, token_ids_R: np.ndarray, eos_token_ids: Collection[int]) -> np.ndarray:
        """Whose sequence may have ended, where these are the tokens drawn, as bools: `finish_reason` knows."""
        roster = self.roster
        may_R: np.ndarray = self.positions_R >= roster.last_R
        if roster.has_stops is not None:
            may_R |= roster.has_stops
        if roster.eos_ends is not None:
            for token_id in eos_token_ids:
                may_R |= (token_ids_R == token_id) & roster.eos_ends
        return may_R
