"""The rows of a decode scheduler without numpy: what `engine.row_table` keeps in columns is asked of each sequence."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.sequence import ScheduledSequence, Sequence
from engine.step_plan import RowTokens
from penstock.types import PageId


@dataclass(frozen=True, slots=True)
class PlainLaunched:
    items: list[ScheduledSequence]
    step: int
    num_contexts: float


class PlainRows:
    """See `engine.step_plan.Rows`. For one step at a time."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._items: dict[Sequence, ScheduledSequence] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._items

    def add(self, sequence: Sequence) -> None:
        self._items[sequence] = ScheduledSequence(sequence, 1)

    def add_awaiting(self, sequence: Sequence, step: int, place: int) -> None:
        raise AssertionError("no step is scheduled ahead here")

    def remove(self, sequence: Sequence) -> None:
        self._items.pop(sequence, None)

    def add_pages(self, sequences: Seq[Sequence], pages: Seq[PageId]) -> None:
        """They are the sequence's own."""

    def short(self) -> list[Sequence]:
        size = self._page_size
        return [one for one in self._items if one.num_computed_tokens >= len(one.pages) * size]

    def is_special(self) -> bool:
        return True  # never ahead

    def launch(self, step: int) -> PlainLaunched:
        items = list(self._items.values())
        return PlainLaunched(items, step, sum(item.num_contexts for item in items))

    def record(
        self, launched: PlainLaunched, drawn: RowTokens, others: Seq[int | None], void: Collection[Sequence]
    ) -> list[Sequence]:
        filled: list[Sequence] = []
        for item, token_id in zip(launched.items, drawn, strict=True):
            sequence = item.sequence
            if sequence not in void:
                sequence.num_computed_tokens += 1
                sequence.token_ids.append(token_id)
                if sequence.num_computed_tokens % self._page_size == 0:
                    filled.append(sequence)
        return filled

    def rewind(self) -> None:
        """They stand where they did."""

    def check_integrity(self) -> None:
        assert all(one.num_uncomputed_tokens == 1 for one in self._items)
