"""One sequence's way to another decode worker, as `Departures` keeps it: plain data, changed there alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.sequence import Sequence as Generation
from kv_transfer.lease import Lease
from kv_transfer.reshard import Plan
from penstock.errors import PenstockError
from penstock.types import Epoch, PageId, TransferKey, WorkerId


@dataclass(frozen=True, slots=True)
class Target:
    """The decode worker that sequences move to."""

    worker_id: WorkerId
    epoch: Epoch
    address: str
    source_address: str  # ours, as the target reaches us


@dataclass(slots=True, eq=False)
class Departure:
    """One attempt. It has an outcome once it is `adopted` or has an `error`; then the sequence is not its matter."""

    key: TransferKey
    sequence: Generation  # whose request may change: a router comes to one that has just moved here itself
    target: Target
    report: Callable[[PenstockError | None], None]  # called once, with the outcome
    num_told: int  # tokens in the state that the target has
    lease: Lease  # of the target
    is_open: bool = False  # at the sender
    plan: Plan | None = None  # from our pages to the target's; set with the destination
    destination: Sequence[PageId] = ()
    num_held: int = 0  # leading pages that the target had already; its pages, here and below
    num_pushed: int = 0  # those included, as below
    num_landed: int = 0
    checksums: list[int] = field(default_factory=list)
    borrowed: dict[int, PageId] = field(default_factory=dict)  # ours, by index; a reference each until sent
    token_s: float = 0.0  # the last step, monotonic
    is_stopping: bool = False  # it decodes no further, but a step under way may still compute it
    stopped_s: float = 0.0  # 0: it does not stand still yet
    adopted: bool = False
    error: PenstockError | None = None

    @property
    def has_outcome(self) -> bool:
        return self.adopted or self.error is not None

    @property
    def num_reserved(self) -> int:
        return self.num_held + len(self.destination)

    @property
    def page_size(self) -> int:
        """Of the target's pages."""
        assert self.plan is not None
        return self.plan.target.page_size
