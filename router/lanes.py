"""The waiting requests of one lane: tenants take turns by what they have had, and within one the earliest due goes.

Pure, without a clock. Due is a request's deadline, but no later than a fixed patience after its arrival: whoever comes
when it is due already goes behind it, so that no stream of urgent requests holds a patient one back for good.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from router.fairness import FairCounters
from router.verdicts import Ask


@dataclass(slots=True, eq=False)
class Entry:
    """A request in a lane's queue."""

    key: int
    tenant: str
    due_s: float
    expires_s: float  # leaves unserved then
    cost: float  # in weighted tokens, as expected
    num_tokens: int  # of KV at its longest
    waits: bool = field(default=True, init=False)  # false: it has left, and its place in the heap is void


@dataclass(slots=True)
class Case:
    """A request that was admitted and has not left."""

    ask: Ask
    output_tokens: int  # expected, of all sequences
    cost: float  # in weighted tokens, as charged
    num_tokens: int  # of KV at its longest
    entry: Entry | None = None  # while it waits
    sent_s: float = 0.0
    contended: bool = False  # it has waited
    started: bool = False


class LaneQueue:
    """Owns who waits in the lane, and what each tenant has had of it."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[float, int, Entry]]] = {}  # each with one or more entries that wait
        self._num_waiting: dict[str, int] = {}
        self._expiries: list[tuple[float, int, Entry]] = []
        self.tenants = FairCounters[str]()
        self.num_waiting = 0
        self.cost = 0.0  # of all that wait

    def push(self, entry: Entry) -> None:
        tenant = entry.tenant
        if tenant not in self._heaps:
            self._heaps[tenant] = []
            self.tenants.activate(tenant)
        heapq.heappush(self._heaps[tenant], (entry.due_s, entry.key, entry))
        heapq.heappush(self._expiries, (entry.expires_s, entry.key, entry))
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1
        self.num_waiting += 1
        self.cost += entry.cost

    def remove(self, entry: Entry) -> None:
        """It goes to a worker, gives up, or was cancelled."""
        assert entry.waits
        entry.waits = False
        tenant = entry.tenant
        self.num_waiting -= 1
        self.cost = self.cost - entry.cost if self.num_waiting else 0.0  # rounding must not add up
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._heaps[tenant], self._num_waiting[tenant]
            self.tenants.deactivate(tenant)
        if len(self._expiries) > 2 * self.num_waiting + 64:
            self._drop_void()

    def next(self, fits: Callable[[Entry], bool]) -> Entry | None:
        """Whose turn it is, of those tenants whose most urgent request fits its quota. Leaves it in the queue."""
        best: tuple[float, float, int, Entry] | None = None
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

    def expired(self, now_s: float) -> Iterator[Entry]:
        """Each is still in the queue when it is handed out, for the caller to remove."""
        while (expires_s := self.next_expiry_s()) is not None and expires_s <= now_s:
            yield heapq.heappop(self._expiries)[2]

    def next_expiry_s(self) -> float | None:
        while self._expiries and not self._expiries[0][2].waits:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def cost_before(self, tenant: str, due_s: float, share: float) -> float:
        """Weighted tokens that go before a newcomer of that tenant, which gets this share of the lane's turns."""
        own = sum(entry.cost for due, _, entry in self._heaps.get(tenant, ()) if entry.waits and due <= due_s)
        return min(self.cost, own / share)

    def waiting_tenants(self) -> Iterator[str]:
        yield from self._heaps

    def _drop_void(self) -> None:
        self._expiries = [item for item in self._expiries if item[2].waits]
        heapq.heapify(self._expiries)
        for tenant, heap in self._heaps.items():
            self._heaps[tenant] = [item for item in heap if item[2].waits]
            heapq.heapify(self._heaps[tenant])
