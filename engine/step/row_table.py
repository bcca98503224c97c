"""Keeps the sequences that get a token in every step, as columns from which a step's arrays are made.

The decode scheduler owns the table, on the step loop. A sequence has a row from the moment when all its tokens but the
last have their KV until it ends, pauses or loses its pages. Python touches a row only when its sequence joins, leaves
or gets a page; everything else is one vector operation over all rows. Rows are dense: when a row leaves, the last row
takes its place, so a row number is valid only within one step.

Rows run ahead of their sequences: `launch` advances them when a step is given to the device, and the sequences follow
when its tokens are known (`record`).

Imports numpy but no torch. A numpy call on few numbers takes about a microsecond, so the number of calls matters.

Shapes: `R` rows, `W` pages of a row.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection
from collections.abc import Sequence as Seq

import numpy as np

from engine.step.plan import ROW_PARAMS, DecodeRows, EndConditions, RowMembers, row_params
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.types import PageId

_KNOWN = 0  # in `_awaited_step`: the token is on the host; steps are numbered from 1
# Attributes of the table with one entry per row, which move and grow together.
_COLUMNS = ("_params", "_position", "_token", "_awaited_step", "_awaited_place", "_room", "_pages_RW", "_edit")


class RowTable:
    def __init__(self, page_size: int, ends: EndConditions | None = None) -> None:
        self._page_size = page_size
        self._ends = ends or EndConditions()
        self._items: list[ScheduledSequence] = []  # by row
        self._texts: list[list[int]] = []  # by row
        self._rows: dict[Sequence, int] = {}
        self._members: RowMembers | None = None  # cached for launches; dropped when a row joins or leaves
        self._any_awaited = False  # whether an in-flight step may sample some row's token
        self._width = 0  # at least the number of pages of the longest row
        # See `_COLUMNS`; each has room to grow.
        self._params = np.zeros(16, ROW_PARAMS)
        self._position = np.zeros(16, np.int64)  # of the token that is computed next
        self._token = np.zeros(16, np.int64)  # that token, unless it is awaited
        self._awaited_step = np.zeros(16, np.int64)  # the step that samples that token, or `_KNOWN`
        self._awaited_place = np.zeros(16, np.int64)  # its place in that step's plan
        self._room = np.zeros(16, np.int64)  # tokens that the row's pages hold
        self._pages_RW = np.zeros((16, 16), np.int32)
        self._edit = np.zeros(16, np.int64)  # number of the latest change to the row's pages
        # Begins at random, because what is on a device may come from another table.
        self._edits = itertools.count(1 + secrets.randbits(62))

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._rows

    @property
    def sequences(self) -> list[Sequence]:
        return [item.sequence for item in self._items]

    def num_left(self, sequence: Sequence) -> int:
        """Returns how many tokens a sequence may still get, with or without a row."""
        end = min(sequence.num_prompt_tokens + sequence.sampling.max_tokens, self._ends.context_length)
        return end - len(sequence.token_ids)

    # Joining and leaving.

    def add(self, sequence: Sequence) -> None:
        """Gives a row to a sequence that has the KV of all its tokens but the last in its pages."""
        sequence.start_decoding()
        self._add(sequence)

    def add_awaiting(self, sequence: Sequence, step: int, place: int) -> None:
        """Gives a row to a sequence whose last known token the in-flight `step` computes, at `place` of its plan.

        That step also samples the token that the row computes next.
        """
        row = len(self._items)
        self._add(sequence)
        self._position[row] = len(sequence.token_ids)
        self._awaited_step[row], self._awaited_place[row] = step, place
        self._any_awaited = True

    def _add(self, sequence: Sequence) -> None:
        row, pages = len(self._items), sequence.pages
        self._make_room(row + 1, len(pages))
        self._rows[sequence] = row
        self._items.append(ScheduledSequence(sequence, 1))
        self._texts.append(sequence.token_ids)
        self._members = None
        self._params[row] = row_params(sequence, self._ends)
        self._position[row] = sequence.num_computed_tokens
        self._token[row] = sequence.token_ids[-1]
        self._awaited_step[row] = _KNOWN
        self._room[row] = sequence.num_usable_pages * self._page_size
        self._pages_RW[row, : len(pages)] = pages
        self._pages_RW[row, len(pages) :] = 0
        self._edit[row] = next(self._edits)

    def remove(self, sequence: Sequence) -> None:
        """Removes the sequence's row, if it has one."""
        row = self._rows.pop(sequence, None)
        if row is None:
            return
        self._members = None
        last, text = self._items.pop(), self._texts.pop()
        if last.sequence is sequence:
            return
        self._items[row], self._texts[row] = last, text
        self._rows[last.sequence] = row
        end = len(self._items)
        for name in _COLUMNS:
            column = getattr(self, name)
            column[row] = column[end]

    def add_pages(self, sequences: Seq[Sequence], pages: Seq[PageId]) -> None:
        """Appends one page to each of the sequences' rows."""
        for sequence, page in zip(sequences, pages, strict=True):
            row = self._rows[sequence]
            room = int(self._room[row])
            place = room // self._page_size
            if place >= self._width:
                self._make_room(row + 1, place + 1)
            self._pages_RW[row, place] = page
            self._edit[row] = next(self._edits)
            self._room[row] = room + self._page_size

    def drop_pages(self, sequence: Sequence, first: int, stop: int) -> None:
        """Clears the entries of pages that the sequence has dropped, if it has a row."""
        row = self._rows.get(sequence)
        if row is not None:
            self._pages_RW[row, first:stop] = 0
            self._edit[row] = next(self._edits)

    def _make_room(self, num_rows: int, num_pages: int) -> None:
        self._width = max(self._width, num_pages)
        width = self._pages_RW.shape[1]
        if num_pages > width:
            self._pages_RW = np.pad(self._pages_RW, ((0, 0), (0, max(width, num_pages - width))))
        if num_rows > len(self._params):
            for name in _COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))

    # The step.

    def without_room(self) -> list[Sequence]:
        """Returns the sequences whose next token has no page yet."""
        count = len(self._items)
        is_full = self._position[:count] >= self._room[:count]
        if self._any_awaited:
            is_full &= self._continuing()
        return [self._items[row].sequence for row in is_full.nonzero()[0].tolist()]

    def needs_text(self) -> bool:
        """Returns whether sampling some row's next token requires that the host knows every token before it."""
        needs_text = self._current_members().needs_text
        return needs_text is not None and bool((needs_text & self._continuing()).any())

    def _continuing(self) -> np.ndarray:
        """Returns a mask of the rows to compute next: all but those certain to end with the in-flight step."""
        count = len(self._items)
        is_known = self._awaited_step[:count] == _KNOWN
        return is_known | (self._position[:count] <= self._current_members().last_R)

    def _current_members(self) -> RowMembers:
        if self._members is None:
            count = len(self._items)
            self._members = RowMembers(self._items.copy(), self._texts.copy(), _copy_of(self._params[:count]))
            self._width = -(-int(self._room[:count].max(initial=0)) // self._page_size)
        return self._members

    def launch(self, step: int) -> DecodeRows:
        """Returns the rows of a step that is about to be computed, and advances them to their next token."""
        members, count = self._current_members(), len(self._items)
        rows: slice | np.ndarray = slice(0, count)
        awaited_rows = awaited_places = None
        if self._any_awaited:
            is_continuing = self._continuing()
            if not is_continuing.all():
                rows = _closed_up(is_continuing)
                members = members.select(rows)
            if self._awaited_step[rows].any():
                awaited_rows = self._awaited_step[rows].nonzero()[0]
                awaited_places = self._awaited_place[rows][awaited_rows]
        positions_R, token_ids_R = self._position[rows].copy(), self._token[rows].copy()
        page_R, offset_R = np.divmod(positions_R, self._page_size)
        pages_RW = self._pages_RW[rows, : self._width].copy()
        self._position[rows] += 1
        self._awaited_step[rows] = step
        self._awaited_place[rows] = members.places_R
        self._any_awaited |= count > 0
        return DecodeRows(
            members, step, positions_R, token_ids_R, awaited_rows, awaited_places, page_R, offset_R, pages_RW,
            self._edit[rows].copy(),
        )  # fmt: skip

    def record(
        self,
        launched: DecodeRows,
        tokens_R: Seq[int] | np.ndarray,
        chunk_tokens: Seq[int | None],
        discarded: Collection[Sequence],
    ) -> list[Sequence]:
        """Appends the tokens of the oldest launched step to their sequences, except to those in `discarded`.

        `chunk_tokens` are the tokens sampled after the rows of the same plan, already appended by the caller. Returns
        the sequences that have filled a page.
        """
        token_ids_R, items = np.asarray(tokens_R, np.int64), launched.items
        texts = launched.members.texts
        if discarded:
            texts = [[] if item.sequence in discarded else text for item, text in zip(items, texts, strict=True)]
        for text, token_id in zip(texts, token_ids_R.tolist(), strict=True):
            text.append(token_id)
        self._resolve_awaited(launched, token_ids_R, chunk_tokens)
        filled = (launched.offset_R == self._page_size - 1).nonzero()[0].tolist()
        return [items[place].sequence for place in filled if items[place].sequence not in discarded]

    def _resolve_awaited(self, launched: DecodeRows, token_ids_R: np.ndarray, chunk_tokens: Seq[int | None]) -> None:
        """Writes the step's tokens into the rows that await them and that no later step has launched."""
        count = len(self._items)
        waiting = (self._awaited_step[:count] == launched.step).nonzero()[0]
        places, by_place = self._awaited_place[waiting], token_ids_R
        if chunk_tokens:
            by_place = np.concatenate((token_ids_R, [token_id or 0 for token_id in chunk_tokens]))
        self._token[waiting] = by_place[places]
        self._awaited_step[waiting] = _KNOWN
        self._any_awaited = len(waiting) < count and bool(self._awaited_step[:count].any())

    def num_missing_pages(self, num_steps: int) -> np.ndarray:
        """Returns how many pages each row lacks to take that many more steps."""
        count = len(self._items)
        missing = self._position[:count] + (num_steps - 1 + self._page_size) - self._room[:count]
        pages: np.ndarray = np.maximum(missing // self._page_size, 0)
        return pages

    def num_steps_to_fill(self) -> int:
        """Returns after how many steps the first row fills a page; there must be a row."""
        return self._page_size - int((self._position[: len(self._items)] % self._page_size).max())

    def at(self, row: int) -> Sequence:
        return self._items[row].sequence

    def advance(self, num_steps: int) -> list[Sequence]:
        """Moves every row forward by several tokens at once, which its sequence already has. No step may be in flight.

        Returns the sequences that have filled a page, in the order in which steps would have filled them.
        """
        count, size = len(self._items), self._page_size
        to_fill = size - self._position[:count] % size
        self._position[:count] += num_steps
        filled = (to_fill <= num_steps).nonzero()[0]
        return [self._items[row].sequence for row in filled[np.argsort(to_fill[filled], kind="stable")].tolist()]

    def rewind(self) -> None:
        """Sets every row back to its sequence's position after launched steps were cancelled or have failed."""
        for row, item in enumerate(self._items):
            sequence = item.sequence
            self._position[row], self._token[row] = sequence.num_computed_tokens, sequence.token_ids[-1]
        self._awaited_step[:] = _KNOWN
        self._any_awaited = False

    def check_integrity(self) -> None:
        """Raises AssertionError unless rows and sequences agree. Requires that no step is in flight."""
        assert not self._any_awaited
        assert self._rows == {item.sequence: row for row, item in enumerate(self._items)}
        for row, item in enumerate(self._items):
            sequence = item.sequence
            assert self._awaited_step[row] == _KNOWN, f"{sequence.request_id} awaits a step that is over"
            assert self._texts[row] is sequence.token_ids, sequence.request_id
            assert sequence.is_decoding, sequence.request_id
            assert self._position[row] == sequence.num_computed_tokens, sequence.request_id
            assert self._token[row] == sequence.token_ids[-1], sequence.request_id
            assert self._room[row] == sequence.num_usable_pages * self._page_size, sequence.request_id
            assert self._pages_RW[row, : len(sequence.pages)].tolist() == sequence.pages, sequence.request_id


def _closed_up(is_continuing: np.ndarray) -> np.ndarray:
    """Returns the rows that continue; the last ones take the places of those that do not, as in `RowTable.remove`, so
    that most keep the place that they have on the device."""
    count = int(is_continuing.sum())
    rows = np.arange(count)
    rows[~is_continuing[:count]] = count + is_continuing[count:].nonzero()[0][::-1]
    return rows


def _copy_of(records: np.ndarray) -> np.ndarray:
    """Returns a read-only copy; `ndarray.copy` goes through records field by field, which takes ten times as long."""
    return np.frombuffer(records.tobytes(), records.dtype)
