"""Sends a worker's load and KV events to one router, at the pace of `worker.service`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from penstock.kv.events import KvEventBatch, KvEventLog, split_snapshot
from penstock.types import WorkerLoad
from simulator.workers.step_loop import VirtualStepLoop
from simulator.world.network import Call, Node
from simulator.world.virtual_time import Timer

_HEARTBEAT_S = 1.0
_SNAPSHOT_PART_PAGES = 32  # far fewer than in reality, so that small caches are split too

Deliver = Callable[[KvEventBatch, WorkerLoad], None]


@dataclass(slots=True)
class EventFaults:
    """Probabilities of faults in delivery, none of which a gRPC stream has."""

    rng: random.Random
    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0  # by up to a second, so that later batches overtake

    @property
    def are_over(self) -> bool:
        return not (self.lost or self.repeated or self.late)


class EventFeed:
    """A `WatchEvents` call. It sends at once and ends with the call."""

    def __init__(
        self,
        node: Node,
        call: Call,
        events: KvEventLog,
        load: Callable[[], WorkerLoad],
        next_seq: int,
        deliver: Deliver,
        interval_s: float,
        run_interval_s: float,
        faults: EventFaults,
        loop: VirtualStepLoop,
    ) -> None:
        """`loop` returns when the steps of a run end, each of which changes the load.

        Two reports are `interval_s` apart, and `run_interval_s` where nothing but such steps has happened.
        """
        self._node = node
        self._call = call
        self._events = events
        self._load = load
        self._next_seq = next_seq
        self._deliver = deliver
        self._interval_s = interval_s
        self._run_interval_s = run_interval_s
        self._sent_s = 0.0
        self._faults = faults
        self._loop = loop
        self._changed = False
        self._resting = False
        self._heartbeat: Timer | None = None
        self._send()

    @property
    def is_open(self) -> bool:
        return self._call.is_open

    def notify(self) -> None:
        """Schedules a report, since load or cache changed."""
        self._changed = True
        if not self._resting and self._call.is_open:
            if self._heartbeat is not None:
                self._heartbeat.cancel()
            self._send()

    def _send(self) -> None:
        if not self._call.is_open:
            return
        batch, load = self._events.read(self._next_seq), self._load()
        self._next_seq = batch.next_seq
        self._changed, self._resting, self._sent_s = False, True, self._node.sim.now_s
        self._node.after(self._interval_s, self._rested)
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
        self._call.send(self._node, lambda: self._deliver(batch, load))

    def _rested(self) -> None:
        self._resting = False
        now_s = self._node.sim.now_s
        due_s = max(now_s, self._sent_s + self._run_interval_s)
        if self._changed or (due_s == now_s and self._loop.has_ended_steps()):
            self._send()
        elif (next_s := self._loop.next_end_s(due_s)) is not None:
            self._heartbeat = self._node.at(next_s, self._send)
        else:
            self._heartbeat = self._node.after(_HEARTBEAT_S, self._send)
