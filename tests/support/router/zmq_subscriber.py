"""Provides a subscriber to a worker's block events, as another project would write one: plain blocking sockets."""

from __future__ import annotations

from types import TracebackType

import zmq

from penstock.kv.block_events import END_SEQ, BlockEvent, decode_batch

_PATIENCE_MS = 60_000


class ZmqSubscriber:
    """Subscribes to events; use as a context manager."""

    def __init__(self, port: int, replay_port: int, topic: bytes = b"") -> None:
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.SUBSCRIBE, topic)
        self._replays = self._context.socket(zmq.DEALER)
        self._events.connect(f"tcp://127.0.0.1:{port}")
        self._replays.connect(f"tcp://127.0.0.1:{replay_port}")

    def __enter__(self) -> ZmqSubscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def is_ready(self) -> bool:
        """Returns whether a batch has arrived, or arrives within a moment."""
        return bool(self._events.poll(50))

    def next(self) -> tuple[bytes, int, list[BlockEvent]]:
        """Returns topic, number and events of the next batch."""
        assert self._events.poll(_PATIENCE_MS), "no batch came"
        topic, seq, payload = self._events.recv_multipart()
        return topic, int.from_bytes(seq, "big"), decode_batch(payload)

    def ask(self, *frames: bytes) -> None:
        self._replays.send_multipart(frames)

    def replay(self, seq: int) -> list[tuple[int, bytes]]:
        """Asks for the batches from a number on, and returns them up to the mark that ends the answer."""
        self.ask(b"", seq.to_bytes(8, "big"))
        found: list[tuple[int, bytes]] = []
        while True:
            assert self._replays.poll(_PATIENCE_MS), "the answer did not end"
            empty, _, number, payload = self._replays.recv_multipart()
            assert empty == b""
            if number == END_SEQ:
                return found
            found.append((int.from_bytes(number, "big"), payload))
