"""What a scheduler asks to be computed in one step, and what it asks of the columns that it keeps for sequences.

No numpy here: `engine.row_table` has the columns of workers, the simulator plain ones of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar, overload

from engine.sequence import ScheduledSequence, Sequence
from penstock.types import PageId

if TYPE_CHECKING:
    import numpy as np

RowTokens: TypeAlias = "Seq[int] | np.ndarray"  # one for each row of a step


class LaunchedRows(Protocol):
    """The rows of one step, as they stood when it was scheduled."""

    @property
    def items(self) -> list[ScheduledSequence]:
        """One token each."""
        ...

    @property
    def step(self) -> int: ...

    @property
    def num_contexts(self) -> float:
        """See `ScheduledSequence.num_contexts`; of all together."""
        ...


LaunchedT = TypeVar("LaunchedT", bound=LaunchedRows)


class StepPlan(Seq[ScheduledSequence], Generic[LaunchedT]):
    """What one step computes: the rows' next tokens, then chunks of prompts and whoever else has no row yet."""

    def __init__(self, rows: LaunchedT, chunks: list[ScheduledSequence]) -> None:
        self.rows = rows
        self.chunks = chunks
        self._items = rows.items + chunks if chunks else rows.items
        self.num_tokens = len(rows.items) + sum(chunk.num_tokens for chunk in chunks)
        # Over the tokens to compute, the sum of those before each.
        self.num_contexts = rows.num_contexts + sum(chunk.num_contexts for chunk in chunks)

    @property
    def step(self) -> int:
        return self.rows.step

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


class Rows(Protocol[LaunchedT]):
    """The sequences that get a token in every step."""

    def __len__(self) -> int: ...

    def __contains__(self, sequence: Sequence) -> bool: ...

    def add(self, sequence: Sequence) -> None:
        """All its tokens but the last have their KV in its pages."""
        ...

    def add_awaiting(self, sequence: Sequence, step: int, place: int) -> None:
        """One whose last known token that step computes, at that place of its plan, and which draws the next there."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Does nothing where it has no row."""
        ...

    def add_pages(self, sequences: Seq[Sequence], pages: Seq[PageId]) -> None:
        """One page for each of them, after those that its row knows."""
        ...

    def short(self) -> list[Sequence]:
        """Those whose next token has no page yet."""
        ...

    def is_special(self) -> bool:
        """Whether somebody's next draw needs more than the columns."""
        ...

    def launch(self, step: int) -> LaunchedT:
        """The rows of a step that is computed from now on; they stand at their next token then."""
        ...

    def record(
        self, launched: LaunchedT, drawn: RowTokens, others: Seq[int | None], void: Collection[Sequence]
    ) -> list[Sequence]:
        """The tokens of a step are known on the host: each row's sequence that is not in `void` gets its own. Returns
        those that have filled a page. Those behind the rows of its plan have theirs of `others` already. The oldest
        step first."""
        ...

    def rewind(self) -> None:
        """Steps that were launched have come to nothing: every row stands where its sequence does."""
        ...

    def check_integrity(self) -> None: ...
