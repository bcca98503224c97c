"""Implements the gRPC service of a prefill worker: one call for each prefill. It only translates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc.aio

from engine.step.loop import StepLoop
from penstock import wire
from penstock.errors import Cancelled, DeadlineExceeded, Unavailable, to_status
from penstock.rpc.server import read_start, typed_errors
from penstock.types import PageId, TransferKey
from penstock.v1 import worker_pb2, worker_pb2_grpc
from prefill_worker.job import Closed, FirstToken, Heartbeat, PrefillJob, PrefillOutcome, Pushed, ReservePages
from prefill_worker.worker import PrefillWorker
from worker.pull.policy import source_from_wire
from worker.sequence_message import sequence_from_wire


class PrefillService(worker_pb2_grpc.PrefillWorkerServicer):
    def __init__(self, worker: PrefillWorker, loop: StepLoop) -> None:
        self._worker = worker
        self._loop = loop
        self._waiting: set[asyncio.Timeout] = set()  # of the calls without a start command
        self._is_closed = False

    def close(self) -> None:
        """Ends the calls that decode workers have opened in advance, so that the server's shutdown does not wait for
        them.
        """
        self._is_closed = True
        for waiting in self._waiting:
            waiting.reschedule(asyncio.get_running_loop().time())

    async def Prefill(
        self, request_iterator: AsyncIterator[worker_pb2.PrefillCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.PrefillEvent]:
        async with typed_errors(context):
            start = (await self._read_start(request_iterator)).start
            outcomes: asyncio.Queue[PrefillOutcome] = asyncio.Queue()
            event_loop = asyncio.get_running_loop()
            job = PrefillJob(
                key=wire.transfer_key_from_wire(start.transfer),
                sequence=sequence_from_wire(start),
                emit=lambda outcome: _post(event_loop, outcomes, outcome),
                submitted_s=time.monotonic(),
                prefix_source=source_from_wire(start.prefix_source) if start.HasField("prefix_source") else None,
            )
            self._loop.post(lambda: self._worker.submit(job, start.offer))
            expired = DeadlineExceeded(f"the prefill of {start.request_id} did not end within its deadline")
            timer = event_loop.call_later(start.timeout_ms / 1000, self._cancel, job.key, expired)
            reader = asyncio.create_task(self._read_commands(request_iterator, job.key))
            try:
                while True:
                    outcome = await outcomes.get()  # the timer bounds this wait: a cancelled job always closes
                    yield _outcome_to_wire(outcome)
                    if isinstance(outcome, Closed):
                        return
            finally:
                timer.cancel()
                reader.cancel()
                self._cancel(job.key, Cancelled("the decode worker ended the call"))

    async def _read_start(self, commands: AsyncIterator[worker_pb2.PrefillCommand]) -> worker_pb2.PrefillCommand:
        """Reads the first command. Raises as `read_start`, and Unavailable once the service is closed."""
        try:
            async with asyncio.timeout(0.0 if self._is_closed else None) as waiting:
                self._waiting.add(waiting)
                try:
                    return await read_start(commands)
                finally:
                    self._waiting.discard(waiting)
        except TimeoutError:
            raise Unavailable("the prefill worker is closing; ask another") from None

    def _cancel(self, key: TransferKey, error: Cancelled | DeadlineExceeded) -> None:
        self._loop.post(lambda: self._worker.cancel(key, error))

    async def _read_commands(self, commands: AsyncIterator[worker_pb2.PrefillCommand], key: TransferKey) -> None:
        """Handles the commands after the first, until the caller hangs up."""
        async for command in commands:
            if command.WhichOneof("command") == "destination":
                self._set_destination(key, command.destination)
            elif command.WhichOneof("command") == "heartbeat":
                self._loop.post(lambda: self._worker.on_heartbeat(key))
            elif command.WhichOneof("command") == "cancel":
                self._cancel(key, Cancelled("the decode worker cancelled the prefill"))

    def _set_destination(self, key: TransferKey, destination: worker_pb2.PrefillDestination) -> None:
        pages, slots = [PageId(page) for page in destination.pages], list(destination.window_slots)
        self._loop.post(lambda: self._worker.set_destination(key, destination.num_pages_held, pages, slots))


def _post(loop: asyncio.AbstractEventLoop, outcomes: asyncio.Queue[PrefillOutcome], outcome: PrefillOutcome) -> None:
    loop.call_soon_threadsafe(outcomes.put_nowait, outcome)


def _outcome_to_wire(outcome: PrefillOutcome) -> worker_pb2.PrefillEvent:
    match outcome:
        case ReservePages():
            return worker_pb2.PrefillEvent(reserve=worker_pb2.PrefillReserve(num_pages=outcome.num_pages))
        case FirstToken():
            logprob = outcome.token.logprob
            return worker_pb2.PrefillEvent(
                first_token=worker_pb2.PrefillFirstToken(
                    token_id=outcome.token.token_id,
                    logprob=wire.logprob_to_wire(logprob) if logprob else None,
                    queue_ms=outcome.queue_s * 1e3,
                    prefill_ms=outcome.prefill_s * 1e3,
                    cached_tokens=outcome.cached_tokens,
                    pull=outcome.pull,
                    hints=[wire.hint_answer_to_wire(answer) for answer in outcome.hints],
                )
            )
        case Pushed():
            return worker_pb2.PrefillEvent(
                pushed=worker_pb2.PrefillPushed(
                    num_tokens=outcome.num_tokens,
                    page_hashes=outcome.page_hashes,
                    num_pages=outcome.num_pages,
                    checksums=outcome.checksums,
                )
            )
        case Heartbeat():
            return worker_pb2.PrefillEvent(heartbeat=worker_pb2.Heartbeat())
        case Closed():
            error = to_status(outcome.error) if outcome.error else None
            return worker_pb2.PrefillEvent(closed=worker_pb2.PrefillClosed(error=error))
