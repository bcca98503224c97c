"""Work that routers have sent to workers and that the workers' load reports do not show yet.

Placement adds it to every worker's reported load; without it, all requests between two reports would go to the same
worker, the least loaded one. `InflightLedger` holds this router's own work, `PeerInflight` the work that other routers
report. Pure: time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from penstock.types import Epoch, WorkerId

STALE_S = 2.0  # a peer's report older than this is ignored; peers report every half second
_REPORT_LAG_S = 0.05  # the most time that a load report takes from its worker to this router
_MAX_EARLIER = 8  # replaced epochs remembered for each address


class InflightWork(NamedTuple):
    """The load that one request puts on one worker or link.

    A plain tuple, because every request makes and sums several.
    """

    num_requests: int = 0  # that the worker decodes
    num_pages: int = 0  # that they take there
    prefill_tokens: int = 0  # that the worker computes
    num_bytes: int = 0  # that the link moves

    def __add__(self, other: InflightWork) -> InflightWork:  # type: ignore[override]
        return InflightWork(self[0] + other[0], self[1] + other[1], self[2] + other[2], self[3] + other[3])

    def __sub__(self, other: InflightWork) -> InflightWork:
        return InflightWork(self[0] - other[0], self[1] - other[1], self[2] - other[2], self[3] - other[3])


NO_WORK = InflightWork()


WorkerPair = tuple[WorkerId, WorkerId]  # prefill and decode worker; names the link between them


class WorkKey(NamedTuple):
    """Identifies one entry of the ledger."""

    owner: WorkerId | WorkerPair
    number: int


@dataclass(slots=True)
class _Account:
    entries: dict[int, tuple[float, InflightWork]] = field(default_factory=dict)  # ordered by the time sent
    pinned: dict[int, InflightWork] = field(default_factory=dict)  # not sent yet
    kept: dict[int, InflightWork] = field(default_factory=dict)  # whatever is reported

    @property
    def is_empty(self) -> bool:
        return not (self.entries or self.pinned or self.kept)


class InflightLedger:
    """Credits workers and links with what this router sends them.

    An entry for a worker is removed when its request makes progress or ends (`settle`), or when a later load report
    includes it. Load reports do not cover links, so only `settle` removes a link's entries. The same holds for work
    recorded with `keep`. Work that a client has yet to send is pinned, and no report removes it until it is unpinned.
    """

    def __init__(self) -> None:
        self._accounts: dict[WorkerId | WorkerPair, _Account] = {}
        self._totals: dict[WorkerId | WorkerPair, InflightWork] = {}  # invariant: the sum of each account's works
        self._last = 0
        self._watchers: list[Callable[[], None]] = []
        self._settle_watchers: list[Callable[[WorkKey], None]] = []

    def watch(self, callback: Callable[[], None]) -> None:
        """Registers a callback for every change of a total. The callback must be quick."""
        self._watchers.append(callback)

    def watch_settled(self, callback: Callable[[WorkKey], None]) -> None:
        """Registers a callback for every settled key, even one whose entry is gone. The callback must be quick."""
        self._settle_watchers.append(callback)

    def totals(self) -> list[tuple[WorkerId, InflightWork]]:
        """Returns the work in flight to each worker that has any."""
        return [
            (owner, self._totals[owner])
            for owner, account in self._accounts.items()
            if not account.is_empty and not isinstance(owner, tuple)
        ]

    def sent_to(self, worker_id: WorkerId) -> InflightWork:
        return self._totals.get(worker_id, NO_WORK)

    def sent_to_all(self, worker_ids: Iterable[WorkerId]) -> list[InflightWork]:
        """Returns `sent_to` of each worker."""
        return list(map(self._totals.get, worker_ids, repeat(NO_WORK)))

    def link_bytes(self, link: WorkerPair) -> int:
        """Returns the bytes recorded for the link that are not known to have arrived."""
        return self._totals.get(link, NO_WORK).num_bytes

    def record(self, owner: WorkerId | WorkerPair, work: InflightWork, now_s: float, *, keep: bool = False) -> WorkKey:
        account = self._accounts.setdefault(owner, _Account())
        self._last += 1
        if keep:
            account.kept[self._last] = work
        else:
            account.entries[self._last] = (now_s, work)
        self._change(owner, self._totals.get(owner, NO_WORK) + work)
        return WorkKey(owner, self._last)

    def settle(self, keys: Iterable[WorkKey]) -> None:
        """Removes entries. Idempotent."""
        for key in keys:
            for callback in self._settle_watchers:
                callback(key)
            account = self._accounts.get(key.owner)
            if account is None:
                continue
            _, work = account.entries.pop(key.number, (0.0, None))
            work = work or account.pinned.pop(key.number, None) or account.kept.pop(key.number, None)
            if work is not None:
                self._change(key.owner, self._totals[key.owner] - work)
                if account.is_empty and isinstance(key.owner, tuple):
                    del self._accounts[key.owner], self._totals[key.owner]

    def pin(self, keys: Iterable[WorkKey]) -> None:
        """Marks entries as not sent yet, because a client sends them later; no report removes them before `unpin`."""
        for key in keys:
            account = self._accounts[key.owner]
            if key.number in account.entries:
                account.pinned[key.number] = account.entries.pop(key.number)[1]

    def unpin(self, keys: Iterable[WorkKey], now_s: float) -> None:
        """Marks pinned entries as sent now. Idempotent."""
        for key in keys:
            account = self._accounts.get(key.owner)
            work = account.pinned.pop(key.number, None) if account else None
            if account and work is not None:
                account.entries[key.number] = (now_s, work)

    def on_report(self, worker_id: WorkerId, now_s: float) -> None:
        """Removes the entries old enough to be included in the load report that has just arrived from the worker."""
        account = self._accounts.get(worker_id)
        if account is None:
            return
        for number, (sent_s, work) in list(account.entries.items()):
            if sent_s >= now_s - _REPORT_LAG_S:
                return
            del account.entries[number]
            self._change(worker_id, self._totals[worker_id] - work)

    def forget(self, worker_id: WorkerId) -> None:
        """Drops all entries of a worker that has left and of its links."""
        self._accounts.pop(worker_id, None)
        self._totals.pop(worker_id, None)
        for link in [owner for owner in self._accounts if isinstance(owner, tuple) and worker_id in owner]:
            del self._accounts[link], self._totals[link]

    def _change(self, owner: WorkerId | WorkerPair, total: InflightWork) -> None:
        self._totals[owner] = total
        for callback in self._watchers:
            callback()


@dataclass(slots=True)
class _Report:
    epoch: Epoch
    earlier: tuple[Epoch, ...]  # previous epochs at the same address, oldest first
    number: int
    received_s: float
    work: Mapping[WorkerId, InflightWork]


class PeerInflight:
    """The newest report of each other router, by its address.

    A report is a whole state, not a change: a lost, late or repeated one does no harm. A router that falls silent is
    ignored after `STALE_S`.
    """

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}

    def apply(self, peer: str, epoch: Epoch, number: int, work: Mapping[WorkerId, InflightWork], now_s: float) -> None:
        """Replaces the peer's report, unless the known one is newer.

        Epochs have no order: an unseen one means that the router has restarted, and reports of its earlier epochs are
        ignored from then on.
        """
        known = self._reports.get(peer)
        earlier: tuple[Epoch, ...] = ()
        if known is not None:
            if epoch in known.earlier or (epoch == known.epoch and number <= known.number):
                return
            earlier = known.earlier if epoch == known.epoch else (*known.earlier, known.epoch)[-_MAX_EARLIER:]
        self._reports[peer] = _Report(epoch, earlier, number, now_s, work)

    def sent_to(self, worker_id: WorkerId, now_s: float) -> InflightWork:
        total = NO_WORK
        for report in self._reports.values():
            if worker_id in report.work and now_s - report.received_s < STALE_S:
                total += report.work[worker_id]
        return total

    def added_to(self, own: list[InflightWork], worker_ids: Sequence[WorkerId], now_s: float) -> list[InflightWork]:
        """Returns the work that a router has sent to each worker, with `sent_to` of the worker added."""
        for report in self._reports.values():
            if report.work and now_s - report.received_s < STALE_S:
                more = map(report.work.get, worker_ids)
                own = [work if other is None else work + other for work, other in zip(own, more, strict=True)]
        return own

    def drop(self, peer: str) -> None:
        """Forgets a router that has left."""
        self._reports.pop(peer, None)
