"""The sequences that get a token in every step, as columns: what a step's tensors are cut from without asking each one.

Owned by the decode scheduler, on the step loop. A sequence has a row from the moment that all its tokens but the last
have their KV until it ends, pauses or loses its pages. A row is touched when its sequence joins, leaves or gets a page;
everything else is one vector operation for all rows. Rows stand close together: the last one fills the place of one
that leaves, so a row's number means something within one step alone.

Rows run ahead of their sequences: `launch` moves them on when a step is given to the device, their sequences follow
when its tokens are known (`record`).

Pure: numpy and no torch. A numpy call on few numbers takes about a microsecond, so what counts is how many there are.

Shapes: `R` rows, `W` pages of a row.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

import numpy as np

from engine.roster import ASKS, DecodeRows, Ends, Roster, asks_of
from engine.sequence import ScheduledSequence, Sequence
from engine.step_plan import RowTokens
from penstock.types import PageId


class RowTable:
    """Owns the rows. See `engine.step_plan.Rows`."""

    def __init__(self, page_size: int, ends: Ends | None = None) -> None:
        self._page_size = page_size
        self.ends = ends or Ends()
        self._items: list[ScheduledSequence] = []  # by row
        self._texts: list[list[int]] = []  # by row
        self._rows: dict[Sequence, int] = {}
        self._roster: Roster | None = None  # None: somebody has joined or left since the last one
        self._some_await = False  # whether a step under way may draw somebody's token
        self._width = 0  # pages that the longest row needs, at least
        # All of these by row, with room to grow.
        self._asks = np.zeros(16, ASKS)
        self._position = np.zeros(16, np.int64)  # of the token that is computed next
        self._token = np.zeros(16, np.int64)  # that token, unless it is awaited
        self._awaits = np.zeros(16, np.int64)  # the step that draws it, 0 where it is known ...
        self._place = np.zeros(16, np.int64)  # ... as this one of its tokens
        self._room = np.zeros(16, np.int64)  # tokens that the row's pages hold
        self._pages_RW = np.zeros((16, 16), np.int32)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._rows

    # Joins and leaves.

    def add(self, sequence: Sequence) -> None:
        """All its tokens but the last have their KV in its pages, and will have as long as nobody says otherwise."""
        assert sequence.num_uncomputed_tokens == 1
        sequence.num_computed = None
        self._add(sequence)

    def add_awaiting(self, sequence: Sequence, step: int, place: int) -> None:
        """One whose last known token that step computes, at that place of its plan, and which draws the next there."""
        row = len(self._items)
        self._add(sequence)
        self._position[row] = len(sequence.token_ids)
        self._awaits[row], self._place[row] = step, place
        self._some_await = True

    def _add(self, sequence: Sequence) -> None:
        row, pages = len(self._items), sequence.pages
        self._make_room(row + 1, len(pages))
        self._rows[sequence] = row
        self._items.append(ScheduledSequence(sequence, 1))
        self._texts.append(sequence.token_ids)
        self._roster = None
        self._asks[row] = asks_of(sequence, self.ends)
        self._position[row] = sequence.num_computed_tokens
        self._token[row] = sequence.token_ids[-1]
        self._awaits[row] = 0
        self._room[row] = len(pages) * self._page_size
        self._pages_RW[row, : len(pages)] = pages
        self._pages_RW[row, len(pages) :] = 0

    def remove(self, sequence: Sequence) -> None:
        """Does nothing where it has no row."""
        row = self._rows.pop(sequence, None)
        if row is None:
            return
        self._roster = None
        last, text = self._items.pop(), self._texts.pop()
        if last.sequence is sequence:
            return
        self._items[row], self._texts[row] = last, text
        self._rows[last.sequence] = row
        end = len(self._items)
        for column in self._columns:
            column[row] = column[end]

    def add_pages(self, sequences: Seq[Sequence], pages: Seq[PageId]) -> None:
        """One page for each of them, after those that its row knows."""
        for sequence, page in zip(sequences, pages, strict=True):
            row = self._rows[sequence]
            room = int(self._room[row])
            place = room // self._page_size
            if place >= self._width:
                self._make_room(row + 1, place + 1)
            self._pages_RW[row, place] = page
            self._room[row] = room + self._page_size

    @property
    def _columns(self) -> tuple[np.ndarray, ...]:
        return self._asks, self._position, self._token, self._awaits, self._place, self._room, self._pages_RW

    def _make_room(self, num_rows: int, num_pages: int) -> None:
        self._width = max(self._width, num_pages)
        width = self._pages_RW.shape[1]
        if num_pages > width:
            self._pages_RW = np.pad(self._pages_RW, ((0, 0), (0, max(width, num_pages - width))))
        if num_rows > len(self._asks):
            (self._asks, self._position, self._token, self._awaits, self._place, self._room, self._pages_RW) = (
                np.concatenate((column, np.zeros_like(column))) for column in self._columns
            )

    # The step.

    def short(self) -> list[Sequence]:
        """Those whose next token has no page yet."""
        count = len(self._items)
        is_short = self._position[:count] >= self._room[:count]
        if self._some_await:
            is_short &= self._going()
        return [self._items[row].sequence for row in is_short.nonzero()[0].tolist()]

    def is_special(self) -> bool:
        """Whether somebody's next draw needs more than the columns."""
        until = self._current_roster().special_until
        count = len(self._items)
        return until is not None and bool(((self._position[:count] + 1 < until) & self._going()).any())

    def _going(self) -> np.ndarray:
        """Who is computed next: a row whose end is certain to come with the step under way is not."""
        count = len(self._items)
        return (self._awaits[:count] == 0) | (self._position[:count] <= self._current_roster().last_R)

    def _current_roster(self) -> Roster:
        if self._roster is None:
            count = len(self._items)
            self._roster = Roster(self._items.copy(), self._texts.copy(), _copy_of(self._asks[:count]))
            self._width = -(-int(self._room[:count].max(initial=0)) // self._page_size)
        return self._roster

    def launch(self, step: int) -> DecodeRows:
        """The rows of a step that is computed from now on; they stand at their next token then."""
        roster, count = self._current_roster(), len(self._items)
        rows: slice | np.ndarray = slice(0, count)
        awaited = awaited_places = None
        if self._some_await:
            going = self._going().nonzero()[0]
            if len(going) < count:
                rows, roster = going, roster.of(going)
            if self._awaits[rows].any():
                awaited = self._awaits[rows].nonzero()[0]
                awaited_places = self._place[rows][awaited]
        positions_R, token_ids_R = self._position[rows].copy(), self._token[rows].copy()
        page_R, offset_R = np.divmod(positions_R, self._page_size)
        pages_RW = self._pages_RW[rows, : self._width].copy()
        self._position[rows] += 1
        self._awaits[rows] = step
        self._place[rows] = roster.places_R
        self._some_await |= count > 0
        return DecodeRows(roster, step, positions_R, token_ids_R, awaited, awaited_places, page_R, offset_R, pages_RW)

    def record(
        self, launched: DecodeRows, drawn: RowTokens, others: Seq[int | None], void: Collection[Sequence]
    ) -> list[Sequence]:
        """See `engine.step_plan.Rows`. Rows that no later step has taken on begin with what was drawn for them."""
        token_ids_R, items = np.asarray(drawn, np.int64), launched.items
        texts = launched.roster.texts
        if void:
            texts = [[] if item.sequence in void else text for item, text in zip(items, texts, strict=True)]
        for text, token_id in zip(texts, token_ids_R.tolist(), strict=True):
            text.append(token_id)
        self._settle(launched, token_ids_R, others)
        filled = (launched.offset_R == self._page_size - 1).nonzero()[0].tolist()
        return [items[place].sequence for place in filled if items[place].sequence not in void]

    def _settle(self, launched: DecodeRows, token_ids_R: np.ndarray, others: Seq[int | None]) -> None:
        count = len(self._items)
        waiting = (self._awaits[:count] == launched.step).nonzero()[0]
        places, by_place = self._place[waiting], token_ids_R
        if others:
            by_place = np.concatenate((token_ids_R, [token_id or 0 for token_id in others]))
        self._token[waiting] = by_place[places]
        self._awaits[waiting] = 0
        self._some_await = len(waiting) < count and bool(self._awaits[:count].any())

    def rewind(self) -> None:
        """Steps that were launched have come to nothing: every row stands where its sequence does."""
        for row, item in enumerate(self._items):
            sequence = item.sequence
            self._position[row], self._token[row] = sequence.num_computed_tokens, sequence.token_ids[-1]
        self._awaits[:] = 0
        self._some_await = False

    def check_integrity(self) -> None:
        """Raises AssertionError unless rows and sequences agree. With no step under way."""
        assert not self._some_await
        assert self._rows == {item.sequence: row for row, item in enumerate(self._items)}
        for row, item in enumerate(self._items):
            sequence = item.sequence
            assert not self._awaits[row], f"{sequence.request_id} waits for a step that is over"
            assert self._texts[row] is sequence.token_ids, sequence.request_id
            assert sequence.num_computed is None, sequence.request_id
            assert self._position[row] == sequence.num_computed_tokens, sequence.request_id
            assert self._token[row] == sequence.token_ids[-1], sequence.request_id
            assert self._room[row] == len(sequence.pages) * self._page_size, sequence.request_id
            assert self._pages_RW[row, : len(sequence.pages)].tolist() == sequence.pages, sequence.request_id


def _copy_of(records: np.ndarray) -> np.ndarray:
    """Read-only. `copy` goes through records field by field, which takes ten times as long."""
    return np.frombuffer(records.tobytes(), records.dtype)
