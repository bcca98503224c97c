"""The sequences that get a token in every step, as columns: what a step's tensors are cut from without asking each one.

Owned by the decode scheduler, on the step loop. A sequence has a row from the moment that all its tokens but the last
have their KV until it ends, pauses or loses its pages. A row is touched when its sequence joins, leaves or gets a page;
everything else is one vector operation for all rows. Rows stand close together: the last one fills the place of one
that leaves, so a row's number means something within one step alone.

Pure: numpy and no torch. Rows run ahead of their sequences: `launch` moves them on when a step is given to the device,
their sequences follow when its tokens are known (`settle`).

Shapes: `R` rows, `W` pages of a row.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from engine.sequence import ScheduledSequence, Sequence
from penstock.types import PageId, SamplingParams

_NEVER = np.iinfo(np.int64).max

# What sampling a row needs of its parameters; `engine.sampler` reads these.
SAMPLING_FIELDS = [
    ("is_greedy", np.bool_),
    ("temperature", np.float64),
    ("top_k", np.int64),
    ("top_p", np.float64),
    ("min_p", np.float64),
    ("seed", np.uint64),
]
_ROW = np.dtype(
    [
        ("position", np.int64),  # of the token that is computed next
        ("token", np.int64),  # that token, unless it is awaited
        ("awaited", np.bool_),  # a step under way draws it ...
        ("step", np.int64),  # ... this one ...
        ("place", np.int64),  # ... for the sequence that stands there in its plan
        ("room", np.int64),  # tokens that the row's pages hold
        ("end", np.int64),  # tokens at which the sequence ends in any case
        ("special_until", np.int64),  # tokens below which a draw needs more than `SAMPLING_FIELDS`
        ("eos_ends", np.bool_),
        ("has_stops", np.bool_),  # token ids of its own that end it
        *SAMPLING_FIELDS,
    ]
)


def sampling_of(sampling: SamplingParams) -> tuple[bool, float, int, float, float, int]:
    """Values of the `SAMPLING_FIELDS`."""
    is_greedy = sampling.greedy or sampling.top_k == 1
    return is_greedy, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends sequences besides their own parameters."""

    eos_token_ids: Collection[int] = ()
    context_length: int = int(_NEVER)


def _record_of(sequence: Sequence, ends: Ends, page_size: int) -> tuple[object, ...]:
    """One row, in the order of `_ROW`: to write it whole costs as much as one field alone."""
    sampling = sequence.sampling
    is_special = sampling.has_penalties or sampling.logit_bias or sampling.logprobs is not None
    return (
        sequence.num_computed_tokens,
        sequence.token_ids[-1],
        False,
        0,
        0,
        len(sequence.pages) * page_size,
        min(sequence.num_prompt_tokens + sampling.max_tokens, ends.context_length),
        _NEVER if is_special else sequence.num_prompt_tokens + sampling.min_tokens,
        not sampling.ignore_eos,
        bool(sampling.stop_token_ids),
        *sampling_of(sampling),
    )


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """The rows of one step as they stood when it was scheduled; nothing changes it afterwards."""

    items: list[ScheduledSequence]  # one token each
    records: np.ndarray  # R of `_ROW`
    pages_RW: np.ndarray  # int32, wide enough for the longest of them; 0 past a row's last page
    step: int

    def __len__(self) -> int:
        return len(self.items)

    @property
    def num_contexts(self) -> float:
        """See `ScheduledSequence.num_contexts`; of all together."""
        return float(self.records["position"].sum()) + len(self.items) / 2

    @property
    def is_special(self) -> bool:
        """Whether a row's draw needs its tokens, or more than a token is wanted of it."""
        return bool((self.records["position"] + 1 < self.records["special_until"]).any())

    def over(self, token_ids: np.ndarray, eos_token_ids: Collection[int]) -> list[int]:
        """Places of sequences that may have ended, where these are the tokens drawn: `finish_reason` knows."""
        records = self.records
        may = (records["position"] + 2 >= records["end"]) | records["has_stops"]
        for token_id in eos_token_ids:
            may |= (token_ids == token_id) & records["eos_ends"]
        return np.flatnonzero(may).tolist()

    def filled(self, page_size: int) -> list[int]:
        """Places of those whose token has filled a page."""
        return np.flatnonzero((self.records["position"] + 1) % page_size == 0).tolist()


class RowTable:
    """Owns the rows. See `engine.step_plan.Rows`."""

    def __init__(self, page_size: int, ends: Ends | None = None) -> None:
        self._page_size = page_size
        self.ends = ends or Ends()
        self.items: list[ScheduledSequence] = []  # by row
        self._rows: dict[Sequence, int] = {}
        self._records = np.zeros(16, _ROW)
        self._pages_RW = np.zeros((16, 16), np.int32)

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._rows

    # Joins and leaves.

    def add(self, sequence: Sequence) -> None:
        """All its tokens but the last have their KV in its pages."""
        assert sequence.num_uncomputed_tokens == 1
        self._add(sequence)

    def _add(self, sequence: Sequence) -> None:
        row = len(self.items)
        if row == len(self._records):
            self._records = np.concatenate((self._records, np.zeros_like(self._records)))
            self._pages_RW = np.concatenate((self._pages_RW, np.zeros_like(self._pages_RW)))
        self._rows[sequence] = row
        self.items.append(ScheduledSequence(sequence, 1))
        self._records[row] = _record_of(sequence, self.ends, self._page_size)
        if len(sequence.pages) > self._pages_RW.shape[1]:
            self._widen(len(sequence.pages))
        self._pages_RW[row, : len(sequence.pages)] = sequence.pages
        self._pages_RW[row, len(sequence.pages) :] = 0

    def add_awaiting(self, sequence: Sequence, step: int, place: int) -> None:
        """One whose last known token that step computes, at that place of its plan, and which draws the next there."""
        row = len(self.items)
        self._add(sequence)
        record = self._records[row]
        record["position"], record["awaited"] = len(sequence.token_ids), True
        record["step"], record["place"] = step, place

    def remove(self, sequence: Sequence) -> None:
        """Does nothing where it has no row."""
        row = self._rows.pop(sequence, None)
        if row is None:
            return
        last = self.items.pop()
        if last.sequence is sequence:
            return
        self.items[row] = last
        self._rows[last.sequence] = row
        end = len(self.items)
        self._records[row] = self._records[end]
        self._pages_RW[row] = self._pages_RW[end]

    def add_pages(self, sequences: Seq[Sequence], pages: Seq[PageId]) -> None:
        """One page for each of them, after those that its row knows."""
        rows = np.array([self._rows[sequence] for sequence in sequences])
        room = self._live["room"]
        places = room[rows] // self._page_size
        if int(places.max()) >= self._pages_RW.shape[1]:
            self._widen(int(places.max()) + 1)
        self._pages_RW[rows, places] = pages
        room[rows] += self._page_size

    def _widen(self, num_pages: int) -> None:
        width = self._pages_RW.shape[1]
        self._pages_RW = np.pad(self._pages_RW, ((0, 0), (0, max(width, num_pages - width))))

    # The step.

    def short(self) -> list[Sequence]:
        """Those whose next token has no page yet."""
        live = self._live
        return [self.items[row].sequence for row in np.flatnonzero((live["position"] >= live["room"]) & self._going())]

    def is_special(self) -> bool:
        """See `DecodeRows.is_special`."""
        live = self._live
        return bool(((live["position"] + 1 < live["special_until"]) & self._going()).any())

    def _going(self) -> np.ndarray:
        """Who is computed next: a row whose end is certain to come with the step under way is not."""
        live = self._live
        return ~live["awaited"] | (live["position"] + 1 < live["end"])

    def launch(self, step: int) -> DecodeRows:
        """The rows of a step that is computed from now on; they stand at their next token then."""
        live = self._live
        going = np.flatnonzero(self._going())
        if len(going) == len(live):
            items, records, pages_RW = self.items.copy(), live.copy(), self._pages_RW
        else:
            items = [self.items[row] for row in going]
            records, pages_RW = live[going], self._pages_RW[going]
        width = int(records["position"].max(initial=0)) // self._page_size + 1
        live["place"][going] = np.arange(len(going))
        live["step"][going], live["awaited"][going] = step, True
        live["position"][going] += 1
        return DecodeRows(items, records, pages_RW[: len(items), :width].copy(), step)

    def settle(self, step: int, drawn: Seq[int | None]) -> None:
        """The tokens of a step are known on the host: rows that no later step has taken on begin with them. There is no
        None among them."""
        live = self._live
        waiting = np.flatnonzero(live["awaited"] & (live["step"] == step))
        token_ids = np.array(drawn, np.int64)
        live["token"][waiting] = token_ids[live["place"][waiting]]
        live["awaited"][waiting] = False

    def rewind(self) -> None:
        """Steps that were launched have come to nothing: every row stands where its sequence does."""
        for row, item in enumerate(self.items):
            record, sequence = self._records[row], item.sequence
            record["position"], record["token"] = sequence.num_computed_tokens, sequence.token_ids[-1]
            record["awaited"] = False

    @property
    def _live(self) -> np.ndarray:
        return self._records[: len(self.items)]

    def check_integrity(self) -> None:
        """Raises AssertionError unless rows and sequences agree. With no step under way."""
        assert self._rows == {item.sequence: row for row, item in enumerate(self.items)}
        for row, item in enumerate(self.items):
            record, sequence = self._records[row], item.sequence
            assert not record["awaited"], f"{sequence.request_id} waits for a step that is over"
            assert record["position"] == sequence.num_computed_tokens, sequence.request_id
            assert record["token"] == sequence.token_ids[-1], sequence.request_id
            assert record["room"] == len(sequence.pages) * self._page_size, sequence.request_id
            assert self._pages_RW[row, : len(sequence.pages)].tolist() == sequence.pages, sequence.request_id
