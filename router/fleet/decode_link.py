"""The Serve call to a decode worker: submissions and cancels go out, step frames come in and are distributed to
requests.

The call is the lease of every request on it. When it breaks, each of them is notified at once and the worker, if it
still lives, drops them all.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import grpc
import grpc.aio

from penstock.errors import Unavailable, from_rpc_error
from penstock.rpc.measured import MAX_STAGE_MS, drop_false_figures
from penstock.types import WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc
from router.fleet.token_link import Deliver

log = logging.getLogger(__name__)

_MAX_HOLD_S = 0.005  # how long a token may be held, however busy the loop is


class DecodeLink:
    """Owned by the worker's follower, which awaits `run`.

    A frame wakes every request that it has tokens for, and each writes to its client. While that takes longer
    than a step, frames that arrive in the meantime are held for as long as the last wave of writes took, then
    distributed together: a client gets several tokens in one message instead of each of them later and later. Where
    steps take longer than the writes nothing is held. First tokens never are.
    """

    def __init__(self, worker_id: WorkerId, on_change: Callable[[], None]) -> None:
        """`on_change` is called when the link opens or closes, before requests are notified."""
        self._worker_id = worker_id
        self._on_change = on_change
        self._streams: dict[int, Deliver] = {}
        self._commands: deque[worker_pb2.DecodeCommand] = deque()
        self._wanted = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_id = 0
        self._begun: set[int] = set()  # streams that have received something
        self._held: list[worker_pb2.StepDelta] = []  # of begun streams, in order of arrival
        self._wave: asyncio.Handle | None = None  # ends the present wave, or the pause after it
        self.is_open = False

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def submit(self, command: worker_pb2.DecodeCommand, deliver: Deliver) -> int:
        """Sends a `submit` that lacks only its stream id, and returns that id. Raises Unavailable on a closed link."""
        if not self.is_open:
            raise Unavailable(f"decode worker {self._worker_id} is not connected")
        self._last_id += 1
        command.submit.stream_id = self._last_id
        self._streams[self._last_id] = deliver
        self._idle.clear()
        self._send(command)
        return self._last_id

    def cancel(self, stream_id: int) -> None:
        """Ends a stream here and at the worker; nothing more is delivered. Does nothing if the stream has ended."""
        if self._streams.pop(stream_id, None) is not None:
            self._begun.discard(stream_id)
            self._send(worker_pb2.DecodeCommand(cancel=worker_pb2.DecodeCancel(stream_id=stream_id)))
            self._note_idle()

    async def wait_idle(self) -> None:
        """Returns once no request is on the link. Bounded by the requests' own deadlines."""
        await self._idle.wait()

    async def run(self, stub: worker_pb2_grpc.DecodeWorkerStub) -> None:
        """Serves until the call breaks or the task is cancelled; then every open submission is lost."""
        call = stub.Serve()
        writer = asyncio.create_task(self._write(call))
        self._set_open(True)
        reason = "it closed the stream"
        try:
            async for frame in call:
                self._take(frame)
        except grpc.RpcError as error:
            reason = from_rpc_error(error).message
        finally:
            self._set_open(False)
            writer.cancel()
            call.cancel()
            self._lose_all(reason)

    def _set_open(self, is_open: bool) -> None:
        self.is_open = is_open
        self._on_change()

    def _take(self, frame: worker_pb2.StepFrame) -> None:
        if self._wave is None:
            for delta in frame.deltas:
                self._deal(delta)
            self._begin_wave()
            return
        begun = self._begun
        for delta in frame.deltas:
            if delta.stream_id in begun:
                self._held.append(delta)
            else:
                self._deal(delta)

    def _begin_wave(self) -> None:
        """Measures how long the requests just woken take: they run before the callback does."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self._wave = loop.call_soon(lambda: self._end_wave(loop, loop.time() - started_s))

    def _end_wave(self, loop: asyncio.AbstractEventLoop, took_s: float) -> None:
        self._wave = loop.call_later(min(took_s, _MAX_HOLD_S), self._next_wave)

    def _next_wave(self) -> None:
        self._wave = None
        if self._held:
            held, self._held = self._held, []
            for delta in held:
                self._deal(delta)
            self._begin_wave()

    def _deal(self, delta: worker_pb2.StepDelta) -> None:
        deliver = self._streams.get(delta.stream_id)
        if deliver is None:  # cancelled in the meantime
            return
        self._begun.add(delta.stream_id)
        if delta.finish_reason:
            drop_false_figures(delta.timing, MAX_STAGE_MS)
        if delta.finish_reason or delta.HasField("error") or delta.HasField("migrated"):
            del self._streams[delta.stream_id]
            self._begun.discard(delta.stream_id)
            self._note_idle()
        deliver(delta)

    def _lose_all(self, reason: str) -> None:
        if self._wave is not None:
            self._wave.cancel()
            self._wave = None
        for delta in self._held:
            self._deal(delta)
        self._held.clear()
        self._begun.clear()
        lost, self._streams = self._streams, {}
        self._commands.clear()
        self._note_idle()
        if lost:
            log.warning("lost decode worker %s with %d requests: %s", self._worker_id, len(lost), reason)
        for deliver in lost.values():
            deliver(Unavailable(f"decode worker {self._worker_id} was lost: {reason}"))

    def _send(self, command: worker_pb2.DecodeCommand) -> None:
        self._commands.append(command)
        self._wanted.set()

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            while True:
                # No deadline: the link lives as long as its worker, and keepalive pings notice a dead one.
                await self._wanted.wait()
                self._wanted.clear()
                while self._commands:
                    await call.write(self._commands.popleft())
        except (grpc.RpcError, asyncio.InvalidStateError):
            log.debug("the link to %s no longer takes commands; the reader logs the reason", self._worker_id)

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()
