"""What leads to receivers of one layout: wires over the pool itself, or over staged pages where layouts differ.

Between the sender and the wires. A wire is made for one buffer of pages and knows of no layout; so receivers whose
pages are like ours share the wires over the pool, and for each other layout there is a lane with a staging buffer and
wires of its own, made when the first such receiver comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from engine.kv_layout import KVLayout
from kv_transfer import wires
from kv_transfer.pages import PageBuffer
from kv_transfer.reshard import PageRows, Plan, make_plan, page_rows
from kv_transfer.staging import PageParts, Staging, page_parts
from kv_transfer.transport import SendingTransport
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId

MAX_STAGED_LANES = 4  # layouts other than ours at a time: bounds the memory for staging


class Lane:
    """Made at once, its wires on first use: they may take a while."""

    def __init__(
        self, plan: Plan, pool: torch.Tensor, config: TransferConfig, epoch: Epoch, wake: Callable[[], None]
    ) -> None:
        self.plan = plan
        self.rows: PageRows = page_rows(plan.page, plan.target.heads)  # that wires move, of a page
        self._pool = pool
        self._config = config
        self._epoch = epoch
        self._wake = wake
        self._lock = threading.Lock()
        self._staging: Staging | None = None
        self._wires: dict[str, SendingTransport] | None = None
        self._problem: TransferError | None = None

    @property
    def staging(self) -> Staging | None:
        """Where pages are made for these receivers; None where they take ours as they are."""
        return self._staging

    def wires(self) -> Mapping[str, SendingTransport]:
        """By name. Blocks while they are made; safe from any thread. Raises TransferError, ConfigError."""
        with self._lock:
            if self._problem is not None:
                raise TransferError(self._problem.message)
            if self._wires is None:
                if not self.plan.whole_pages:
                    self._staging = Staging(self.plan, self._pool, self._wake)
                pages = self._staging.pages if self._staging else PageBuffer(self._pool)
                made = wires.sending(pages.in_rows(self.rows.num_in_part), self._config, self._epoch, self._wake)
                self._wires = {wire.name: wire for wire in made}
            return self._wires

    def sources(
        self, tokens: range, src_pages: Sequence[PageId], num_pages: int
    ) -> Sequence[PageId] | Sequence[PageParts]:
        """What the receiver's next `num_pages` pages are made of: of `tokens`, where the sequence's pages from its
        first on are `src_pages`; or of these pages as they are, where no tokens are given. Raises TransferError."""
        size = self.plan.target.page_size
        if not tokens:
            if not self.plan.whole_pages:
                raise TransferError("whole pages are pushed to a receiver of another layout")
            return src_pages
        if tokens.start % size or num_pages != -(-len(tokens) // size):
            raise TransferError(f"{tokens} for {num_pages} pages of {size} tokens")
        if self.plan.whole_pages:
            return src_pages[tokens.start // size :][:num_pages]
        return page_parts(self.plan, tokens, src_pages)

    def close(self, problem: TransferError) -> list[SendingTransport]:
        """`wires` raises from now on; returns those that were made, to be closed."""
        with self._lock:
            self._problem = problem
            made, self._wires = self._wires or {}, None
            return list(made.values())


class Lanes:
    """Used by the sender's thread alone, but for `own`."""

    def __init__(
        self, layout: KVLayout, pool: torch.Tensor, config: TransferConfig, epoch: Epoch, wake: Callable[[], None]
    ) -> None:
        """Raises ConfigError when the configured wire cannot be used here."""
        self._make = lambda plan: Lane(plan, pool, config, epoch, wake)
        self.own = self._make(make_plan(layout, layout))
        self.own.wires()
        self._staged: dict[Plan, Lane] = {}

    def find(self, plan: Plan, in_use: Collection[Lane]) -> tuple[Lane, list[SendingTransport]]:
        """The lane for a plan, and wires of an unused one that had to make room for it, to be closed. Where all are in
        use it is a lane that does not lead anywhere."""
        if plan.whole_pages and plan.fills_pages:
            return self.own, []
        if (known := self._staged.get(plan)) is not None:
            return known, []
        lane = self._make(plan)
        if len(self._staged) < MAX_STAGED_LANES:
            self._staged[plan] = lane
            return lane, []
        unused = next((other for other, one in self._staged.items() if one not in in_use), None)
        if unused is None:
            return lane, lane.close(
                TransferError(
                    f"receivers of {MAX_STAGED_LANES} page layouts other than this sender's are served already, the "
                    "most that it has staging memory for; use fewer page sizes"
                )
            )
        self._staged[plan] = lane
        return lane, self._staged.pop(unused).close(TransferError("another page layout has taken this one's place"))

    def close(self) -> list[SendingTransport]:
        """The wires of all of them, to be closed."""
        problem = TransferError("this sender is shut down")
        return [wire for lane in (self.own, *self._staged.values()) for wire in lane.close(problem)]
