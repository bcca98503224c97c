"""Submissions on their way from the event loop to the step loop, whoever sends them: a router's call or a client's."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from decode_worker.adoptions import Adoptions
from decode_worker.prefill_client import PrefillCandidate
from decode_worker.request import DecodeRequest
from decode_worker.stream import RouterStream
from decode_worker.worker import DecodeWorker
from engine.sequence import Sequence
from engine.step_loop import StepLoop
from penstock import wire
from penstock.errors import DeadlineExceeded, PenstockError
from penstock.types import Epoch, RequestId, TransferId
from penstock.v1 import worker_pb2


class Intake:
    def __init__(self, worker: DecodeWorker, adoptions: Adoptions, loop: StepLoop) -> None:
        self._worker = worker
        self._adoptions = adoptions
        self._loop = loop

    def submit(self, submit: worker_pb2.DecodeSubmit, stream: RouterStream) -> DecodeRequest:
        """What becomes of it goes to `stream`; its deadline runs from now."""
        timeout_s = submit.timeout_ms / 1e3
        request = _request(submit, stream, time.monotonic() + timeout_s)
        late = DeadlineExceeded(f"{submit.request_id} did not end within its deadline")
        deadline = asyncio.get_running_loop().call_later(timeout_s, self.cancel, request, late)
        stream.begin(request, deadline)
        ticket = TransferId(submit.ticket)

        def begin() -> None:
            if not (ticket and self._adoptions.attach(ticket, request)):
                self._worker.submit(request)

        self._loop.post(begin)
        return request

    def cancel(self, request: DecodeRequest, error: PenstockError | None = None) -> None:
        self._loop.post(lambda: self._worker.cancel(request, error))

    def close(self, stream: RouterStream) -> None:
        """Whoever listened there has gone: everything that is open is released before the next step."""
        for request in stream.open_requests:
            stream.end(request.stream_id)
            self.cancel(request)


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
        PrefillCandidate(
            item.worker_id, Epoch(item.epoch), item.address, item.queue_s, item.prefill_s, item.num_ranks or 1
        )
        for item in submit.prefill_candidates
    )
    return DecodeRequest(submit.stream_id, sequence, stream.outlet, candidates, deadline_s)
