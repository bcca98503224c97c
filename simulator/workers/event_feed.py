"""Models a worker's reports of load and KV events to one router, at the pace of `worker.service`.

Between two events of a worker, only steps of a run end, so its state determines when its next reports are due and what
they contain. Until the first fault, a feed therefore waits to be read: a router that is about to choose takes all
reports that have arrived, at once. From reports that a later one supersedes, it learns only how long their steps took.
From the first fault on, every report is a message at its time. Both ways give routers the same knowledge.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.kv.events import KvEventBatch, KvEventLog, split_snapshot
from penstock.types import StepTotals, WorkerLoad
from simulator.workers.step_loop import VirtualStepLoop
from simulator.world.network import Call, Node
from simulator.world.virtual_time import Timer

_HEARTBEAT_S = 1.0
_SNAPSHOT_PART_PAGES = 32  # far fewer than in reality, so that small caches are split too


class Reporter(Protocol):
    """A worker as its feeds see it. Times passed in never go back."""

    node: Node
    events: KvEventLog
    loop: VirtualStepLoop

    def load_at(self, at_s: float) -> WorkerLoad:
        """Commits the steps that have ended by `at_s`, so that `events` has their changes."""
        ...

    def totals_at(self, at_s: float) -> tuple[StepTotals, StepTotals]:
        """Returns the totals by `at_s` of the steps that have computed prompts and of those that have only decoded."""
        ...


class Report(NamedTuple):
    """A report. If a later one supersedes it, it has only the totals of its steps."""

    arrival_s: float
    totals: tuple[StepTotals, StepTotals]
    load: WorkerLoad | None = None
    batch: KvEventBatch | None = None


Deliver = Callable[[KvEventBatch, WorkerLoad], None]


@dataclass(slots=True)
class EventFaults:
    """Probabilities of faults in delivery. A real gRPC stream has none of them."""

    rng: random.Random
    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0  # delays of up to a second, so that later batches overtake

    @property
    def are_over(self) -> bool:
        return not (self.lost or self.repeated or self.late)


class EventFeed:
    """A `WatchEvents` call. It sends at once and ends with the call."""

    def __init__(
        self,
        worker: Reporter,
        call: Call,
        next_seq: int,
        deliver: Deliver,
        interval_s: float,
        faults: EventFaults,
        waits: bool,
    ) -> None:
        """Two reports are at least `interval_s` apart. With `waits`, all but the first wait to be read."""
        self.due_s = math.inf  # set by the router that reads: when the next report should be read
        self.on_due: Callable[[EventFeed], None] = lambda feed: None  # called when `due_s` may be earlier than before
        self._worker = worker
        self._node = worker.node
        self._loop = worker.loop
        self._call = call
        self._next_seq = next_seq
        self._deliver = deliver
        self._interval_s = interval_s
        self._faults = faults
        self._rng = worker.node.sim.rng(f"reports {worker.node.name} {worker.node.epoch} {call.ends[0].name}")
        self._waits = False
        self._changed = False
        self._changed_s = 0.0
        self._made_s = 0.0  # time at which the last report was made
        self._rest_until_s = 0.0
        self._made: deque[Report] = deque()  # reports not read yet
        self._arrival_s = 0.0
        self._timer: Timer | None = None
        self._send(self._node.sim.now_s)
        self._waits = waits
        self._arm()

    @property
    def is_open(self) -> bool:
        return self._call.is_open

    @property
    def waits(self) -> bool:
        return self._waits

    def notify(self) -> None:
        """Notes that load or cache changed, which is reported as soon as the pause after the last report is over."""
        if not self._call.is_open:
            return
        now_s = self._node.sim.now_s
        if not self._changed:
            self._changed, self._changed_s = True, now_s
        if self._waits:
            self._make_until(math.nextafter(now_s, math.inf))
            if self.next_s() < self.due_s:
                self.on_due(self)
            return
        if now_s >= self._rest_until_s:
            self._send(now_s)
        self._arm()

    # When.

    def next_s(self) -> float:
        """Returns when to look for the next report: when it arrives or, if it is not made yet, when it will be made."""
        return self._made[0].arrival_s if self._made else self._next_made_s()

    def _next_made_s(self) -> float:
        if self._changed:
            return max(self._rest_until_s, self._changed_s)
        if (end_s := self._loop.next_end_s(self._made_s)) is not None:
            return max(self._rest_until_s, end_s)
        return self._rest_until_s + _HEARTBEAT_S if not self._loop.is_in_run else math.inf  # its end is a change

    # Reports that wait to be read.

    def read(self, now_s: float) -> list[Report]:
        """Returns the reports that have arrived since the last call."""
        self._make_until(math.nextafter(now_s, math.inf))
        read = []
        while self._made and self._made[0].arrival_s <= now_s:
            read.append(self._made.popleft())
        return read

    def before_change(self) -> None:
        """Makes the reports that were due before now, because the state that they describe is about to change."""
        if self._waits:
            self._make_until(self._node.sim.now_s)

    def stop_waiting(self) -> None:
        """Sends reports as messages from now on. Call `read` first."""
        if self._waits:
            self._waits = False
            while self._made:
                report = self._made.popleft()
                assert report.batch is not None
                assert report.load is not None
                self._call.send_at(self._node, report.arrival_s, self._delivery(report.batch, report.load))
            self._arm()

    def _make_until(self, until_s: float) -> None:
        """Makes the reports that are due before `until_s`. A report is whole unless the next one has arrived, too."""
        at_s = self._next_made_s()
        if at_s >= until_s:
            return
        worker, call, made, rng = self._worker, self._call, self._made, self._rng
        surely_s = min(until_s, self._node.sim.now_s - call.network.longest_s)  # earlier reports have surely arrived
        while at_s < until_s:
            totals = worker.totals_at(at_s)
            self._begin_pause(at_s)
            self._arrival_s = max(self._arrival_s, call.arrival_s(at_s, rng))
            next_s = self._next_made_s()
            if next_s >= surely_s:
                made.append(Report(self._arrival_s, totals, worker.load_at(at_s), self._events()))
                next_s = self._next_made_s()
            else:
                made.append(Report(self._arrival_s, totals))
            at_s = next_s

    def _begin_pause(self, at_s: float) -> None:
        self._changed, self._made_s, self._rest_until_s = False, at_s, at_s + self._interval_s

    def _events(self) -> KvEventBatch:
        batch = self._worker.events.read(self._next_seq)
        self._next_seq = batch.next_seq
        return batch

    # Reports that are messages at their time.

    def _arm(self) -> None:
        next_s = math.inf if self._waits else self._next_made_s()
        if next_s == math.inf or (self._timer is not None and self._timer.time_s <= next_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._node.at(next_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self._call.is_open:
            return
        if self._next_made_s() <= self._node.sim.now_s:
            self._send(self._node.sim.now_s)
        self._arm()

    def _send(self, at_s: float) -> None:
        load = self._worker.load_at(at_s)
        batch = self._events()
        self._begin_pause(at_s)
        if not batch.snapshot and self._faults.are_over:
            self._forward(batch, load)
            return
        for part in split_snapshot(batch, _SNAPSHOT_PART_PAGES):
            self._send_part(part, load)

    def _send_part(self, batch: KvEventBatch, load: WorkerLoad) -> None:
        faults, random_share = self._faults, self._faults.rng.random
        for _ in range(1 + (random_share() < faults.repeated) if faults.repeated else 1):
            if faults.lost and random_share() < faults.lost:
                continue
            if faults.late and random_share() < faults.late:
                self._node.after(random_share(), lambda: self._forward(batch, load))
            else:
                self._forward(batch, load)

    def _forward(self, batch: KvEventBatch, load: WorkerLoad) -> None:
        self._arrival_s = max(self._arrival_s, self._call.arrival_s(self._node.sim.now_s, self._rng))
        self._call.send_at(self._node, self._arrival_s, self._delivery(batch, load))

    def _delivery(self, batch: KvEventBatch, load: WorkerLoad) -> Callable[[], None]:
        return lambda: self._deliver(batch, load)
