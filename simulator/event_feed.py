"""A worker's load and KV events on their way to one router, at the pace of `penstock.worker_service`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from penstock.kv_events import KvEventBatch, KvEventLog, split_snapshot
from penstock.types import WorkerLoad
from simulator.events import Timer
from simulator.network import Call, Node

_HEARTBEAT_S = 1.0
_SNAPSHOT_PART_PAGES = 32  # far fewer than the real ones have, so that small caches come in parts too

Deliver = Callable[[KvEventBatch, WorkerLoad], None]


@dataclass(slots=True)
class EventFaults:
    """What happens to batches on their way, each with this probability. A gRPC stream does none of it."""

    rng: random.Random
    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0  # up to a second: later ones overtake them


class EventFeed:
    """One `WatchEvents` call: begins at once, ends with the call."""

    def __init__(
        self,
        node: Node,
        call: Call,
        events: KvEventLog,
        load: Callable[[], WorkerLoad],
        next_seq: int,
        deliver: Deliver,
        interval_s: float,
        faults: EventFaults,
    ) -> None:
        self._node = node
        self._call = call
        self._events = events
        self._load = load
        self._next_seq = next_seq
        self._deliver = deliver
        self._interval_s = interval_s
        self._faults = faults
        self._changed = False
        self._resting = False
        self._heartbeat: Timer | None = None
        self._send()

    @property
    def is_open(self) -> bool:
        return self._call.is_open

    def notify(self) -> None:
        """Load or cache changed: the router is told soon."""
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
        self._changed, self._resting = False, True
        self._node.after(self._interval_s, self._rested)
        for part in split_snapshot(batch, _SNAPSHOT_PART_PAGES):
            self._send_part(part, load)

    def _send_part(self, batch: KvEventBatch, load: WorkerLoad) -> None:
        faults, draw = self._faults, self._faults.rng.random
        for _ in range(1 + (draw() < faults.repeated) if faults.repeated else 1):
            if faults.lost and draw() < faults.lost:
                continue
            if faults.late and draw() < faults.late:
                self._node.after(draw(), lambda: self._hand_on(batch, load))
            else:
                self._hand_on(batch, load)

    def _hand_on(self, batch: KvEventBatch, load: WorkerLoad) -> None:
        self._call.send(self._node, lambda: self._deliver(batch, load))

    def _rested(self) -> None:
        self._resting = False
        if self._changed:
            self._send()
        else:
            self._heartbeat = self._node.after(_HEARTBEAT_S, self._send)
