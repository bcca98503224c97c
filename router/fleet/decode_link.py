"""Holds the Serve call to a decode worker: sends submissions and cancels, receives step frames and delivers their
tokens to requests.

The call is the lease of every request on it. When it breaks, all of them are notified at once, and the worker, if it
is still alive, drops them all.
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

_MAX_PAUSE_S = 0.005  # longest pause between two rounds of deliveries


class DecodeLink:
    """Carries requests to one decode worker. The worker's follower owns it and awaits `run`.

    A frame wakes every request that it has tokens for, and each of them writes to its client: a round of deliveries.
    After a round the link pauses for as long as the round took. Frames that arrive during the round and the pause are
    held and delivered together in the next round. If writes take longer than a step, clients thus get several tokens in
    one message instead of ever later tokens. First tokens are never held.
    """

    def __init__(self, worker_id: WorkerId, on_change: Callable[[], None]) -> None:
        """`on_change` is called when the link opens or closes; on closing, before requests are notified."""
        self._worker_id = worker_id
        self._on_change = on_change
        self._streams: dict[int, Deliver] = {}
        self._commands: deque[worker_pb2.DecodeCommand] = deque()
        self._has_commands = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_id = 0
        self._begun: set[int] = set()  # streams that have received a delta
        self._held: list[worker_pb2.StepDelta] = []  # deltas of begun streams, in order of arrival
        self._round: asyncio.Handle | None = None  # ends the current round, or the pause after it
        self.is_open = False

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def submit(self, command: worker_pb2.DecodeCommand, deliver: Deliver) -> int:
        """Fills in the `submit`'s stream id, sends it and returns the id. Raises Unavailable if the link is closed."""
        if not self.is_open:
            raise Unavailable(f"decode worker {self._worker_id} is not connected")
        self._last_id += 1
        command.submit.stream_id = self._last_id
        self._streams[self._last_id] = deliver
        self._idle.clear()
        self._send(command)
        return self._last_id

    def cancel(self, stream_id: int) -> None:
        """Ends a stream here and at the worker; nothing more is delivered. A no-op if the stream has ended."""
        if self._streams.pop(stream_id, None) is not None:
            self._begun.discard(stream_id)
            self._send(worker_pb2.DecodeCommand(cancel=worker_pb2.DecodeCancel(stream_id=stream_id)))
            self._notify_if_idle()

    async def wait_idle(self) -> None:
        """Returns once the link has no streams. The requests' own deadlines bound the wait."""
        await self._idle.wait()

    async def run(self, stub: worker_pb2_grpc.DecodeWorkerStub) -> None:
        """Serves until the call breaks or the task is cancelled; every open stream then ends with Unavailable."""
        call = stub.Serve()
        writer = asyncio.create_task(self._write(call))
        self._set_open(True)
        reason = "it closed the stream"
        try:
            async for frame in call:
                self._receive(frame)
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

    def _receive(self, frame: worker_pb2.StepFrame) -> None:
        if self._round is None:
            for delta in frame.deltas:
                self._deliver(delta)
            self._begin_round()
            return
        begun = self._begun
        for delta in frame.deltas:
            if delta.stream_id in begun:
                self._held.append(delta)
            else:
                self._deliver(delta)

    def _begin_round(self) -> None:
        """Measures how long the woken requests take: the event loop runs them before this callback."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self._round = loop.call_soon(lambda: self._end_round(loop, loop.time() - started_s))

    def _end_round(self, loop: asyncio.AbstractEventLoop, took_s: float) -> None:
        self._round = loop.call_later(min(took_s, _MAX_PAUSE_S), self._next_round)

    def _next_round(self) -> None:
        self._round = None
        if self._held:
            held, self._held = self._held, []
            for delta in held:
                self._deliver(delta)
            self._begin_round()

    def _deliver(self, delta: worker_pb2.StepDelta) -> None:
        deliver = self._streams.get(delta.stream_id)
        if deliver is None:  # the stream was cancelled
            return
        self._begun.add(delta.stream_id)
        if delta.finish_reason:
            drop_false_figures(delta.timing, MAX_STAGE_MS)
        if delta.finish_reason or delta.HasField("error") or delta.HasField("migrated"):
            del self._streams[delta.stream_id]
            self._begun.discard(delta.stream_id)
            self._notify_if_idle()
        deliver(delta)

    def _lose_all(self, reason: str) -> None:
        """Delivers the held deltas, then ends every stream with Unavailable."""
        if self._round is not None:
            self._round.cancel()
            self._round = None
        for delta in self._held:
            self._deliver(delta)
        self._held.clear()
        self._begun.clear()
        lost, self._streams = self._streams, {}
        self._commands.clear()
        self._notify_if_idle()
        if lost:
            log.warning("lost decode worker %s with %d requests: %s", self._worker_id, len(lost), reason)
        for deliver in lost.values():
            deliver(Unavailable(f"decode worker {self._worker_id} was lost: {reason}"))

    def _send(self, command: worker_pb2.DecodeCommand) -> None:
        self._commands.append(command)
        self._has_commands.set()

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            while True:
                # No deadline: the link lives as long as its worker, and keepalive pings detect a dead one.
                await self._has_commands.wait()
                self._has_commands.clear()
                while self._commands:
                    await call.write(self._commands.popleft())
        except (grpc.RpcError, asyncio.InvalidStateError):
            log.debug("the link to %s no longer takes commands; the reader logs the reason", self._worker_id)

    def _notify_if_idle(self) -> None:
        if not self._streams:
            self._idle.set()
