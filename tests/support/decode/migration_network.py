"""Carries `ReceiveSequence` calls between decode cores in one thread: messages stay in order each way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from decode_worker.migrate.client import MigrationTarget, TargetEvents
from decode_worker.migrate.incoming import IncomingMigrations
from decode_worker.migrate.outgoing import OutgoingMigrations
from decode_worker.worker import DecodeWorker
from kv_transfer.session.transfer_session import Manifest
from penstock import wire
from penstock.errors import PenstockError, TransferError
from penstock.types import Epoch, PageId, TransferKey
from penstock.v1 import worker_pb2

Action = Callable[[], object]


@dataclass
class Call:
    """Holds the messages of one `ReceiveSequence` call, in order each way, until it breaks or ends."""

    to_target: deque[Action] = field(default_factory=deque)
    to_source: deque[Action] = field(default_factory=deque)


class End(Protocol):
    """Represents one epoch of a decode worker."""

    epoch: Epoch
    worker: DecodeWorker
    incoming: IncomingMigrations
    outgoing: OutgoingMigrations
    calls: OutgoingCalls


class MigrationNetwork:
    """Owns the calls in flight, and knows which targets have lost theirs."""

    def __init__(self, alive: Callable[[int], End | None]) -> None:
        self.alive = alive  # by epoch
        self.calls: dict[TransferKey, Call] = {}
        self.lost: dict[TransferKey, End] = {}  # targets that do not know whether their source still writes

    def queues(self) -> list[deque[Action]]:
        return [queue for call in self.calls.values() for queue in (call.to_target, call.to_source)]

    def die(self, end: End) -> None:
        """Breaks the calls of a dead worker and forgets its lost calls."""
        self.lost = {key: target for key, target in self.lost.items() if target is not end}
        for key in [key for key in self.calls if end.epoch in (key.sender_epoch, key.receiver_epoch)]:
            self.break_call(key)

    def break_call(self, key: TransferKey) -> None:
        call = self.calls.pop(key, None)
        source, target = self.alive(key.sender_epoch), self.alive(key.receiver_epoch)
        if call is not None and target is not None:
            target.incoming.on_lost(key, TransferError("the call broke"))
            self.lost[key] = target
        if call is not None and source is not None:
            source.outgoing.on_failed(key, TransferError("the call broke"))

    def end_call(self, target: End, key: TransferKey, error: PenstockError | None) -> None:
        del self.calls[key]
        target.incoming.on_closed(key, error)

    def ask_about_lost(self) -> None:
        """Lifts fences, like the fence keeper, once their sources cannot write any more."""
        for key, target in list(self.lost.items()):
            source = self.alive(key.sender_epoch)
            if source is None or key not in source.calls.open_keys:
                del self.lost[key]
                target.worker.on_quiesced(key)


class OutgoingCalls:
    """Sends a source's commands; stands in for `MigrationClient`."""

    def __init__(self, network: MigrationNetwork, source: End) -> None:
        self._network = network
        self._source = source
        self.open_keys: set[TransferKey] = set()  # sources that may write

    def start(
        self,
        key: TransferKey,
        target: MigrationTarget,
        state: worker_pb2.SequenceState,
        num_tokens: int,
        num_dropped_tokens: int,
        events: TargetEvents,
    ) -> None:
        self.open_keys.add(key)
        call = self._network.calls[key] = Call()
        other = self._network.alive(target.epoch)
        if other is None:
            self._network.break_call(key)
            return
        start = worker_pb2.MigrationStart(
            transfer=wire.transfer_key_to_wire(key),
            state=state,
            num_tokens=num_tokens,
            num_dropped_tokens=num_dropped_tokens,
        )
        call.to_target.append(lambda: other.incoming.on_start(key, start, SourceCall(self._network, self._source, key)))

    def finish(self, key: TransferKey, state: worker_pb2.SequenceState, manifest: Manifest, paused_s: float) -> None:
        call, target = self._network.calls.get(key), self._network.alive(key.receiver_epoch)
        if call is not None and target is not None:
            call.to_target.append(lambda: target.incoming.on_finish(key, state, manifest, paused_s))

    def heartbeat(self, key: TransferKey) -> None:
        call, target = self._network.calls.get(key), self._network.alive(key.receiver_epoch)
        if call is not None and target is not None:
            call.to_target.append(lambda: target.incoming.on_heartbeat(key))

    def close(self, key: TransferKey, error: PenstockError | None) -> None:
        self.open_keys.discard(key)
        call, target = self._network.calls.get(key), self._network.alive(key.receiver_epoch)
        if call is not None and target is not None:
            call.to_target.append(lambda: self._network.end_call(target, key, error))


@dataclass
class SourceCall:
    """Sends a target's events back; stands in for `incoming.SourceCall`."""

    network: MigrationNetwork
    source: End
    key: TransferKey

    def _send(self, event: Action) -> None:
        call = self.network.calls.get(self.key)
        if call is not None:
            call.to_source.append(event)

    def destination(self, num_pages_held: int, pages: list[PageId]) -> None:
        target = self.network.alive(self.key.receiver_epoch)
        parts = target.engine.pool.parts if target is not None else None
        slots = parts.slots_of(pages) if parts is not None else []
        self._send(lambda: self.source.outgoing.on_destination(self.key, b"", num_pages_held, list(pages), slots))

    def landed(self, num_pages: int) -> None:
        self._send(lambda: self.source.outgoing.on_landed(self.key, num_pages))

    def accepted(self) -> None:
        self._send(lambda: self.source.outgoing.on_accepted(self.key))

    def heartbeat(self) -> None:
        self._send(lambda: self.source.outgoing.on_heartbeat(self.key))

    def refused(self, error: PenstockError) -> None:
        self._send(lambda: self.source.outgoing.on_failed(self.key, error))
