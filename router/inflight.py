"""What this router has sent to workers and their load reports do not show yet. Pure: time is passed in.

Without it, every request between two reports would go to the same worker, the least loaded one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.types import WorkerId

_REPORT_LAG_S = 0.05  # a report left its worker up to this long before it came here


class Work(NamedTuple):
    """One request's demand on one worker. A plain tuple: several are made and added up for every request."""

    num_requests: int = 0  # to decode
    num_pages: int = 0  # that decoding will hold
    prefill_tokens: int = 0  # to compute
    num_bytes: int = 0  # to move over a link

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(self[0] + other[0], self[1] + other[1], self[2] + other[2], self[3] + other[3])

    def __sub__(self, other: Work) -> Work:
        return Work(self[0] - other[0], self[1] - other[1], self[2] - other[2], self[3] - other[3])


NO_WORK = Work()


Link = tuple[WorkerId, WorkerId]  # prefill and decode worker


class WorkKey(NamedTuple):
    owner: WorkerId | Link
    number: int


@dataclass(slots=True)
class _Account:
    total: Work = NO_WORK  # invariant: the sum of `entries` and `pinned`
    entries: dict[int, tuple[float, Work]] = field(default_factory=dict)  # in order of time sent
    pinned: dict[int, Work] = field(default_factory=dict)  # not sent yet


class InflightLedger:
    """An entry leaves when its request shows progress or ends (`settle`), or its worker has reported since.

    Bytes on links are in no report: they leave when settled. What a client has yet to send is
    pinned until then.
    """

    def __init__(self) -> None:
        self._accounts: dict[WorkerId | Link, _Account] = {}
        self._last = 0
        self.on_change: Callable[[], None] = lambda: None  # a total has changed

    def totals(self) -> list[tuple[WorkerId, Work]]:
        """Of each worker that something is under way to."""
        accounts = self._accounts.items()
        return [
            (owner, one.total)
            for owner, one in accounts
            if (one.entries or one.pinned) and not isinstance(owner, tuple)
        ]

    def sent_to(self, worker_id: WorkerId) -> Work:
        account = self._accounts.get(worker_id)
        return account.total if account else NO_WORK

    def link_bytes(self, link: Link) -> int:
        """Announced to go over it, and not known to have gone."""
        account = self._accounts.get(link)
        return account.total.num_bytes if account else 0

    def record(self, owner: WorkerId | Link, work: Work, now_s: float) -> WorkKey:
        account = self._accounts.setdefault(owner, _Account())
        self._last += 1
        account.entries[self._last] = (now_s, work)
        account.total += work
        self.on_change()
        return WorkKey(owner, self._last)

    def settle(self, keys: Iterable[WorkKey]) -> None:
        """Twice is once."""
        for key in keys:
            account = self._accounts.get(key.owner)
            if account is None:
                continue
            _, work = account.entries.pop(key.number, (0.0, None))
            work = work or account.pinned.pop(key.number, None)
            if work is not None:
                account.total -= work
                if not (account.entries or account.pinned) and isinstance(key.owner, tuple):
                    del self._accounts[key.owner]
                self.on_change()

    def pin(self, keys: Iterable[WorkKey]) -> None:
        """Recorded, but somebody else sends it later: until `unpin` no report can show it."""
        for key in keys:
            account = self._accounts[key.owner]
            account.pinned[key.number] = account.entries.pop(key.number)[1]

    def unpin(self, keys: Iterable[WorkKey], now_s: float) -> None:
        """It has been sent. Twice is once."""
        for key in keys:
            account = self._accounts.get(key.owner)
            work = account.pinned.pop(key.number, None) if account else None
            if account and work is not None:
                account.entries[key.number] = (now_s, work)

    def on_report(self, worker_id: WorkerId, now_s: float) -> None:
        """The worker has said its load: what it got well before is in it."""
        account = self._accounts.get(worker_id)
        if account is None:
            return
        for number, (sent_s, work) in list(account.entries.items()):
            if sent_s >= now_s - _REPORT_LAG_S:
                return
            del account.entries[number]
            account.total -= work
            self.on_change()

    def forget(self, worker_id: WorkerId) -> None:
        """The worker has left."""
        self._accounts.pop(worker_id, None)
        for link in [one for one in self._accounts if isinstance(one, tuple) and worker_id in one]:
            del self._accounts[link]
