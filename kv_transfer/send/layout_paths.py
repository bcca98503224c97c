"""The transports that reach receivers of one page layout: over the pool itself, or over a staging buffer.

It sits between the sender and the transports. A transport serves one buffer of pages and knows no layout. So receivers
with pages like ours share the transports over the pool; every other layout gets a path of its own: a staging buffer and
transports over it, opened for its first receiver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from engine.cache.kv_layout import KVLayout
from kv_transfer.layout.pages import PageBuffer
from kv_transfer.layout.reshard import PageRows, ReshardPlan, page_rows, plan_reshard
from kv_transfer.layout.staging import PageSlices, Staging, page_slices
from kv_transfer.transports import registry
from kv_transfer.transports.transport import SendingTransport
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId

MAX_STAGED_PATHS = 4  # limit of layouts other than ours, to bound the memory for staging


class LayoutPath:
    """The path to receivers of one layout. Its transports open on first use, because they may take a while."""

    def __init__(
        self, plan: ReshardPlan, pool: torch.Tensor, config: TransferConfig, epoch: Epoch, wake: Callable[[], None]
    ) -> None:
        self.plan = plan
        self.rows: PageRows = page_rows(plan.page, plan.target.heads)  # rows of a page that the transports move
        self._pool = pool
        self._config = config
        self._epoch = epoch
        self._wake = wake
        self._lock = threading.Lock()
        self._staging: Staging | None = None
        self._transports: dict[str, SendingTransport] | None = None
        self._problem: TransferError | None = None

    @property
    def staging(self) -> Staging | None:
        """The buffer of repacked pages; None if these receivers take our pages unchanged."""
        return self._staging

    def transports(self) -> Mapping[str, SendingTransport]:
        """Returns the transports by name. The first call opens them and blocks. Thread-safe. Raises TransferError and
        ConfigError.
        """
        with self._lock:
            if self._problem is not None:
                raise TransferError(self._problem.message)
            if self._transports is None:
                if not self.plan.whole_pages:
                    self._staging = Staging(self.plan, self._pool, self._wake)
                pages = self._staging.pages if self._staging else PageBuffer(self._pool)
                made = registry.sending_transports(
                    pages.in_rows(self.rows.num_in_part), self._config, self._epoch, self._wake
                )
                self._transports = {transport.name: transport for transport in made}
            return self._transports

    def sources(
        self, tokens: range, src_pages: Sequence[PageId], num_pages: int
    ) -> Sequence[PageId] | Sequence[PageSlices]:
        """Returns the sources of the receiver's next `num_pages` pages, which hold `tokens`; `src_pages` are then the
        sequence's pages from the first. Without tokens they are `src_pages` unchanged. Raises TransferError.
        """
        size = self.plan.target.page_size
        if not tokens:
            if not self.plan.whole_pages:
                raise TransferError("whole pages cannot be pushed to a receiver of another layout")
            return src_pages
        if tokens.start % size or num_pages != -(-len(tokens) // size):
            raise TransferError(f"{tokens} does not fit {num_pages} pages of {size} tokens")
        if self.plan.whole_pages:
            return src_pages[tokens.start // size :][:num_pages]
        return page_slices(self.plan, tokens, src_pages)

    def close(self, problem: TransferError) -> list[SendingTransport]:
        """Makes `transports` raise `problem`. Returns the open transports, which the caller must close."""
        with self._lock:
            self._problem = problem
            made, self._transports = self._transports or {}, None
            return list(made.values())


class LayoutPaths:
    """All paths of a sender by plan. Only the sender's thread uses it, except for `own`."""

    def __init__(
        self, layout: KVLayout, pool: torch.Tensor, config: TransferConfig, epoch: Epoch, wake: Callable[[], None]
    ) -> None:
        """Raises ConfigError if the configured transport cannot be used."""
        self._make = lambda plan: LayoutPath(plan, pool, config, epoch, wake)
        self.own = self._make(plan_reshard(layout, layout))
        self.own.transports()
        self._staged: dict[ReshardPlan, LayoutPath] = {}

    def find(self, plan: ReshardPlan, in_use: Collection[LayoutPath]) -> tuple[LayoutPath, list[SendingTransport]]:
        """Returns the path for a plan, and the transports of an unused path that it displaces, which the caller must
        close. If every path is in use, the returned path raises when used.
        """
        if plan.whole_pages and plan.fills_pages:
            return self.own, []
        if (known := self._staged.get(plan)) is not None:
            return known, []
        path = self._make(plan)
        if len(self._staged) < MAX_STAGED_PATHS:
            self._staged[plan] = path
            return path, []
        unused = next((other for other, staged in self._staged.items() if staged not in in_use), None)
        if unused is None:
            return path, path.close(
                TransferError(
                    f"this sender has staging memory for {MAX_STAGED_PATHS} page layouts other than its own, and all "
                    "are in use; use fewer page sizes"
                )
            )
        self._staged[plan] = path
        return path, self._staged.pop(unused).close(TransferError("this page layout had to make room for another one"))

    def close(self) -> list[SendingTransport]:
        """Returns the transports of all paths, which the caller must close."""
        problem = TransferError("this sender is shut down")
        return [transport for path in (self.own, *self._staged.values()) for transport in path.close(problem)]
