"""Receives an engine's KV events over ZMQ, in order and without gaps as far as its replay socket allows.

Events come from an unauthenticated port, so message sizes and queues are bounded before a byte is read. A message that
cannot be decoded counts as a lost event: the engine's pages are forgotten, and later events are applied as usual.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType

import zmq
import zmq.asyncio

from penstock.kv.block_events import END_SEQ, MAX_BATCH_BYTES, SEQ_BYTES, BlockEvent, decode_batch
from router.fleet.engines.event_sequence import EventSequence, Verdict

log = logging.getLogger(__name__)

_QUEUE, _REPLAY_QUEUE = 128, 512  # messages queued here; beyond that the sender drops them, which shows as a gap
_REPLAY_TIMEOUT_S = 5.0
_BIG_BATCH_BYTES = 1 << 16  # larger batches are decoded in a thread


class EventSubscription:
    """Calls back with an engine's events, on the event loop. Use it as a context manager and await `run`."""

    def __init__(
        self,
        address: str,
        replay_address: str,
        topic: str,
        on_events: Callable[[Sequence[BlockEvent]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """`on_lost` is called with the reason when everything known of the cache becomes void. Without a
        `replay_address`, that is after every gap.
        """
        self._on_events, self._on_lost = on_events, on_lost
        self._sequence = EventSequence()
        self._has_replays = bool(replay_address)
        self._context = zmq.asyncio.Context()
        self._replay_address = replay_address
        try:
            self._events = self._open(zmq.SUB, _QUEUE)
            self._events.setsockopt(zmq.SUBSCRIBE, topic.encode())
            self._events.connect(address)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def __enter__(self) -> EventSubscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def _open(self, kind: int, queue: int) -> zmq.asyncio.Socket:
        opened = self._context.socket(kind)
        for option, value in ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, MAX_BATCH_BYTES), (zmq.RCVHWM, queue)):
            opened.setsockopt(option, value)
        return opened

    async def run(self) -> None:
        """Runs until cancelled. ZMQ reconnects by itself."""
        await self._replay()
        while True:
            await asyncio.sleep(0)  # receiving a message that has already arrived would not yield to the event loop
            # No deadline: an idle engine sends nothing, and its follower detects a lost engine by its metrics.
            frames = await self._events.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != SEQ_BYTES:
                self._on_lost(f"a message has {len(frames)} frames or no valid number")
                continue
            await self._receive_live(int.from_bytes(frames[1], "big"), frames[2])

    async def _receive_live(self, seq: int, payload: bytes) -> None:
        verdict = self._sequence.on_live(seq)
        if verdict is Verdict.RESTARTED:
            self._on_lost("its event publisher has restarted")
            verdict = Verdict.MISSING if seq else self._sequence.on_replayed(seq)
        if verdict is Verdict.MISSING:
            await self._replay()
            verdict = self._sequence.on_replayed(seq)
            if verdict is Verdict.MISSING:
                self._on_lost(f"its events before {seq} are gone")
                verdict = Verdict.APPLY
        if verdict is Verdict.APPLY:
            await self._apply(payload)

    async def _apply(self, payload: bytes) -> None:
        try:
            is_big = len(payload) > _BIG_BATCH_BYTES
            events = await asyncio.to_thread(decode_batch, payload) if is_big else decode_batch(payload)
        except ValueError as error:
            self._on_lost(f"its events cannot be decoded: {error}")
            return
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self._on_events(events)
        await asyncio.sleep(loop.time() - started_s)  # events take at most half of the event loop's time

    async def _replay(self) -> None:
        """Requests all batches that have not been applied, and applies those that arrive."""
        if not self._has_replays:
            return
        socket = self._open(zmq.DEALER, _REPLAY_QUEUE)
        try:
            socket.connect(self._replay_address)
            async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", self._sequence.next_seq.to_bytes(SEQ_BYTES, "big")])
                while True:
                    await asyncio.sleep(0)
                    frames = await socket.recv_multipart()
                    if len(frames) != 4 or len(frames[2]) != SEQ_BYTES:
                        self._on_lost(f"a replayed message has {len(frames)} frames or no valid number")
                        return
                    if frames[2] == END_SEQ:
                        return
                    await self._receive_replayed(int.from_bytes(frames[2], "big"), frames[3])
        except TimeoutError:
            log.info("the replay of events did not end within %g s", _REPLAY_TIMEOUT_S)
        finally:
            socket.close(linger=0)

    async def _receive_replayed(self, seq: int, payload: bytes) -> None:
        verdict = self._sequence.on_replayed(seq)
        if verdict is Verdict.MISSING:
            self._on_lost(f"its events before {seq} are gone")
        if verdict is not Verdict.DROP:
            await self._apply(payload)
