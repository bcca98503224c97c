"""The queued requests of one lane: tenants take turns by what they were served, and each sends its earliest due first.

Pure, without a clock. A request is due at its deadline, but no later than a fixed patience after its arrival: requests
that arrive after a request is due go behind it, so that no stream of urgent requests holds a patient one back forever.
The queue knows the memory that its requests take, in all and by tenant; `RefusalPolicy` bounds it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from router.admission.fairness import FairCounters
from router.admission.interface import AdmissionRequest

# Of a request that waits with an open HTTP connection: task, buffers and body, and two lists of Python integers.
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
    expires_s: float  # it leaves unserved then
    cost: float  # in weighted tokens, as expected
    num_tokens: int  # of KV, as its tenant's quota counts them
    prompt_tokens: int = 0
    waits: bool = field(default=True, init=False)  # false once it has left; the heaps then skip it


@dataclass(slots=True)
class TrackedRequest:
    """A request from its arrival at admission to its end."""

    request: AdmissionRequest
    output_tokens: int  # expected, of all sequences
    cost: float  # in weighted tokens, as charged
    num_tokens: int  # of KV, as its tenant's quota counts them
    entry: QueueEntry | None = None  # while it is queued
    sent_s: float = 0.0
    contended: bool = False  # it has been queued
    started: bool = False


class _DueCosts:
    """Sums weighted tokens by the second in which they are due, so that a newcomer's wait is found without a scan."""

    def __init__(self) -> None:
        self._by_second: dict[int, tuple[int, float]] = {}  # how many requests, and their cost

    def add(self, entry: QueueEntry, sign: int) -> None:
        second = int(entry.due_s)
        count, cost = self._by_second.get(second, (0, 0.0))
        if count + sign:
            self._by_second[second] = (count + sign, cost + sign * entry.cost)
        else:
            del self._by_second[second]

    def before(self, due_s: float) -> float:
        """Returns the cost of what is due no later than within the same second."""
        return sum(cost for second, (_, cost) in self._by_second.items() if second <= due_s)


@dataclass(slots=True)
class QueueUse:
    """Counts what is queued, of one tenant or of all."""

    num_requests: int = 0
    num_bytes: int = 0
    prompt_tokens: int = 0

    def add(self, entry: QueueEntry, sign: int) -> None:
        self.num_requests += sign
        self.num_bytes += sign * request_bytes(entry.prompt_tokens)
        self.prompt_tokens += sign * entry.prompt_tokens


_NOTHING = QueueUse()


class LaneQueue:
    """Owns the lane's queued requests and the counters of what each tenant was served."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[float, int, QueueEntry]]] = {}  # each holds at least one entry that waits
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
        self.cost = self.cost - entry.cost if self.num_waiting else 0.0  # rounding errors must not add up
        self._uses[tenant].add(entry, -1)
        self._due[tenant].add(entry, -1)
        if not self._uses[tenant].num_requests:
            del self._heaps[tenant], self._uses[tenant], self._due[tenant]
            self.tenants.deactivate(tenant)
        if len(self._expiries) > 2 * self.num_waiting + 64:
            self._drop_void()

    def next(self, fits: Callable[[QueueEntry], bool]) -> QueueEntry | None:
        """Returns the entry whose turn it is among the tenants whose most urgent entry fits; leaves it queued."""
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
        """Returns the weighted tokens ahead of a newcomer of that tenant, which gets this share of the lane's turns."""
        own = self._due[tenant].before(due_s) if tenant in self._due else 0.0
        return min(self.cost, own / share)

    def waiting_tenants(self) -> Iterator[str]:
        yield from self._heaps

    def _drop_void(self) -> None:
        self._expiries = [item for item in self._expiries if item[2].waits]
        heapq.heapify(self._expiries)
        for tenant, heap in self._heaps.items():
            self._heaps[tenant] = [item for item in heap if item[2].waits]
            heapq.heapify(self._heaps[tenant])
