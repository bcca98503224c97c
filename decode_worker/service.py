"""gRPC over the decode worker: one call a router, the lease of every request on it. Translates and nothing else.

What concerns sequences that move is in `adopt_service`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator

import grpc.aio

from decode_worker.adopt_service import AdoptService
from decode_worker.adoptions import Adoptions
from decode_worker.prefill_client import PrefillCandidate
from decode_worker.request import DecodeRequest
from decode_worker.stream import RouterStream
from decode_worker.worker import DecodeWorker
from engine.sequence import Sequence
from engine.step_loop import StepLoop
from penstock import wire
from penstock.errors import DeadlineExceeded, PenstockError
from penstock.grpc_server import typed_errors
from penstock.types import Epoch, RequestId, TransferId
from penstock.v1 import worker_pb2, worker_pb2_grpc


class DecodeService(worker_pb2_grpc.DecodeWorkerServicer):
    def __init__(self, worker: DecodeWorker, adoptions: Adoptions, moves: AdoptService, loop: StepLoop) -> None:
        self._worker = worker
        self._adoptions = adoptions
        self._moves = moves
        self._loop = loop

    async def Migrate(
        self, request: worker_pb2.MigrateRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.MigrateResponse:
        async with typed_errors(context):
            return await self._moves.migrate(request)

    async def ListSequences(
        self, request: worker_pb2.ListSequencesRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ListSequencesResponse:
        async with typed_errors(context):
            return await self._moves.list_sequences()

    async def Adopt(
        self, request_iterator: AsyncIterator[worker_pb2.AdoptCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.AdoptEvent]:
        async with typed_errors(context):
            async with contextlib.aclosing(self._moves.adopt(request_iterator)) as events:
                async for event in events:
                    yield event

    async def Serve(
        self, request_iterator: AsyncIterator[worker_pb2.DecodeCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.StepFrame]:
        stream = RouterStream()
        reader = asyncio.create_task(self._follow(request_iterator, stream))
        try:
            async for frame in stream.frames():
                yield frame
        finally:
            reader.cancel()
            for request in stream.open_requests:
                stream.end(request.stream_id)
                self._cancel(request)

    async def _follow(self, commands: AsyncIterator[worker_pb2.DecodeCommand], stream: RouterStream) -> None:
        """Commands until the router says no more; its requests end with it."""
        try:
            async for command in commands:
                if command.WhichOneof("command") == "submit":
                    self._submit(command.submit, stream)
                elif command.WhichOneof("command") == "cancel":
                    request = stream.end(command.cancel.stream_id)
                    if request is not None:
                        self._cancel(request)
        finally:
            stream.close()

    def _submit(self, submit: worker_pb2.DecodeSubmit, stream: RouterStream) -> None:
        timeout_s = submit.timeout_ms / 1e3
        request = _request(submit, stream, time.monotonic() + timeout_s)
        late = DeadlineExceeded(f"{submit.request_id} did not end within its deadline")
        deadline = asyncio.get_running_loop().call_later(timeout_s, self._cancel, request, late)
        stream.begin(request, deadline)
        ticket = TransferId(submit.ticket)

        def begin() -> None:
            if not (ticket and self._adoptions.attach(ticket, request)):
                self._worker.submit(request)

        self._loop.post(begin)

    def _cancel(self, request: DecodeRequest, error: PenstockError | None = None) -> None:
        self._loop.post(lambda: self._worker.cancel(request, error))


def _request(submit: worker_pb2.DecodeSubmit, stream: RouterStream, deadline_s: float) -> DecodeRequest:
    sequence = Sequence(
        request_id=RequestId(submit.request_id),
        token_ids=list(submit.token_ids),
        num_prompt_tokens=submit.num_prompt_tokens,
        sampling=wire.sampling_from_wire(submit.sampling),
        salt=submit.salt,
        lane=wire.lane_from_wire(submit.lane),
    )
    candidates = deque(
        PrefillCandidate(item.worker_id, Epoch(item.epoch), item.address, item.queue_s, item.prefill_s)
        for item in submit.prefill_candidates
    )
    return DecodeRequest(submit.stream_id, sequence, stream.send, candidates, deadline_s)
