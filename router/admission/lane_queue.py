"""Queues the requests of one lane. The tenant that was served least goes next, with its request that is due first.

Pure, without a clock. A request is due at its deadline, but no later than a fixed time after its arrival, so that a
stream of urgent requests cannot delay a request with a late deadline forever. The queue tracks the memory of its
requests, in total and by tenant; `RefusalPolicy` bounds it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from router.admission.fairness import FairCounters
from router.admission.interface import AdmissionRequest

# Memory of a request that waits on an open HTTP connection: task, buffers, body and two lists of Python integers.
# Measured 2026-11-22 as growth of the router's RSS: 36 KiB for 1 token, 120 KiB for 1024 tokens.
_REQUEST_BYTES = 36 * 1024
_TOKEN_BYTES = 90


def request_bytes(prompt_tokens: int) -> int:
    """Returns the estimated memory of a waiting request."""
    return _REQUEST_BYTES + _TOKEN_BYTES * prompt_tokens


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A request's place in a lane's queue."""

    key: int
    tenant: str
    due_s: float
    expires_s: float  # when it leaves unserved
    cost: float  # expected, in weighted tokens
    num_tokens: int  # tokens of KV that count against its tenant's quota
    prompt_tokens: int = 0
    waits: bool = field(default=True, init=False)  # False once it has left; the heaps then skip it


@dataclass(slots=True)
class TrackedRequest:
    """Admission's record of a request, from its arrival to its end."""

    request: AdmissionRequest
    output_tokens: int  # expected, of all sequences
    cost: float  # as charged, in weighted tokens
    num_tokens: int  # tokens of KV that count against its tenant's quota
    entry: QueueEntry | None = None  # None unless it is queued
    sent_s: float = 0.0
    contended: bool = False  # True once it has been queued
    started: bool = False


class _DueCosts:
    """Sums weighted tokens by the second in which they are due, so that a wait is predicted without scanning the
    queue.
    """

    def __init__(self) -> None:
        self._by_second: dict[int, tuple[int, float]] = {}  # number of requests and their cost

    def add(self, entry: QueueEntry, sign: int) -> None:
        second = int(entry.due_s)
        count, cost = self._by_second.get(second, (0, 0.0))
        if count + sign:
            self._by_second[second] = (count + sign, cost + sign * entry.cost)
        else:
            del self._by_second[second]

    def before(self, due_s: float) -> float:
        """Returns the cost of all requests that are due before `due_s` or in the same second."""
        return sum(cost for second, (_, cost) in self._by_second.items() if second <= due_s)


@dataclass(slots=True)
class QueueUse:
    """Counts the queued requests of one tenant or of all."""

    num_requests: int = 0
    num_bytes: int = 0
    prompt_tokens: int = 0

    def add(self, entry: QueueEntry, sign: int) -> None:
        self.num_requests += sign
        self.num_bytes += sign * request_bytes(entry.prompt_tokens)
        self.prompt_tokens += sign * entry.prompt_tokens


_NOTHING = QueueUse()


class LaneQueue:
    """Owns the lane's queued requests and the counters of the service that each tenant received."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[float, int, QueueEntry]]] = {}  # by tenant; each has an entry that waits
        self._uses: dict[str, QueueUse] = {}  # by tenant
        self._due: dict[str, _DueCosts] = {}
        self._expiries: list[tuple[float, int, QueueEntry]] = []
        self.tenants = FairCounters[str]()
        self.total = QueueUse()
        self.cost = 0.0  # of all queued requests

    @property
    def num_waiting(self) -> int:
        return self.total.num_requests

    def use_of(self, tenant: str) -> QueueUse:
        return self._uses.get(tenant, _NOTHING)

    def push(self, entry: QueueEntry) -> None:
        tenant = entry.tenant
        if tenant not in self._heaps:
            self._heaps[tenant] = []
            self._uses[tenant], self._due[tenant] = QueueUse(), _DueCosts()
            self.tenants.activate(tenant)
        heapq.heappush(self._heaps[tenant], (entry.due_s, entry.key, entry))
        heapq.heappush(self._expiries, (entry.expires_s, entry.key, entry))
        self._uses[tenant].add(entry, 1)
        self._due[tenant].add(entry, 1)
        self.total.add(entry, 1)
        self.cost += entry.cost

    def remove(self, entry: QueueEntry) -> None:
        """Removes a request that is dispatched, expires or is cancelled."""
        assert entry.waits
        entry.waits = False
        tenant = entry.tenant
        self.total.add(entry, -1)
        self.cost = self.cost - entry.cost if self.num_waiting else 0.0  # an empty queue resets rounding errors
        self._uses[tenant].add(entry, -1)
        self._due[tenant].add(entry, -1)
        if not self._uses[tenant].num_requests:
            del self._heaps[tenant], self._uses[tenant], self._due[tenant]
            self.tenants.deactivate(tenant)
        if len(self._expiries) > 2 * self.num_waiting + 64:
            self._compact()

    def next(self, fits: Callable[[QueueEntry], bool]) -> QueueEntry | None:
        """Returns the first due entry of the least served tenant, among tenants whose first due entry fits.

        The entry stays queued.
        """
        best: tuple[float, float, int, QueueEntry] | None = None
        for tenant, heap in self._heaps.items():
            while not heap[0][2].waits:
                heapq.heappop(heap)
            due_s, key, entry = heap[0]
            if not fits(entry):
                self.tenants.deactivate(tenant)
                continue
            self.tenants.activate(tenant)
            rank = (self.tenants[tenant], due_s, key, entry)
            best = rank if best is None or rank[:3] < best[:3] else best
        return best[3] if best else None

    def expired(self, now_s: float) -> Iterator[QueueEntry]:
        """Yields expired entries, each still queued, for the caller to remove."""
        while (expires_s := self.next_expiry_s()) is not None and expires_s <= now_s:
            yield heapq.heappop(self._expiries)[2]

    def next_expiry_s(self) -> float | None:
        while self._expiries and not self._expiries[0][2].waits:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def cost_before(self, tenant: str, due_s: float, share: float) -> float:
        """Returns the weighted tokens ahead of a new request of `tenant`, which gets `share` of the lane's service."""
        own = self._due[tenant].before(due_s) if tenant in self._due else 0.0
        return min(self.cost, own / share)

    def waiting_tenants(self) -> Iterator[str]:
        yield from self._heaps

    def _compact(self) -> None:
        """Drops entries that have left from the heaps."""
        self._expiries = [item for item in self._expiries if item[2].waits]
        heapq.heapify(self._expiries)
        for tenant, heap in self._heaps.items():
            self._heaps[tenant] = [item for item in heap if item[2].waits]
            heapq.heapify(self._heaps[tenant])
