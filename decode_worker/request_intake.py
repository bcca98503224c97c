"""Passes submissions and cancellations from the event loop to the step loop, for routers' calls and clients' tickets.

It owns no state: streams know their open requests, and the worker owns them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from decode_worker.delivery.router_stream import RouterStream
from decode_worker.migrate.incoming import IncomingMigrations
from decode_worker.prefill.client import PrefillCandidate
from decode_worker.request import DecodeRequest
from decode_worker.worker import DecodeWorker
from engine.step.loop import StepLoop
from penstock.errors import DeadlineExceeded, PenstockError
from penstock.types import Epoch, TransferId
from penstock.v1 import worker_pb2
from worker.pull.policy import source_from_wire
from worker.sequence_message import sequence_from_wire


class RequestIntake:
    """Submits and cancels requests. Called only on the event loop."""

    def __init__(self, worker: DecodeWorker, migrations: IncomingMigrations, loop: StepLoop) -> None:
        self._worker = worker
        self._migrations = migrations
        self._loop = loop

    def submit(self, submit: worker_pb2.DecodeSubmit, stream: RouterStream) -> DecodeRequest:
        """Submits a request that answers on `stream`; its deadline runs from now.

        With a ticket, the request continues the sequence that migrated here, if that still waits for its router.
        """
        timeout_s = submit.timeout_ms / 1e3
        request = _request(submit, stream, time.monotonic() + timeout_s)
        expired = DeadlineExceeded(f"{submit.request_id} did not end within its deadline")
        deadline = asyncio.get_running_loop().call_later(timeout_s, self.cancel, request, expired)
        stream.begin(request, deadline)
        ticket = TransferId(submit.ticket)

        def begin() -> None:
            if not (ticket and self._migrations.attach(ticket, request)):
                self._worker.submit(request)

        self._loop.post(begin)
        return request

    def cancel(self, request: DecodeRequest, error: PenstockError | None = None) -> None:
        self._loop.post(lambda: self._worker.cancel(request, error))

    def close(self, stream: RouterStream) -> None:
        """Cancels all open requests of a stream whose reader is gone; they are released before the next step."""
        for request in stream.open_requests:
            stream.end(request.stream_id)
            self.cancel(request)


def _request(submit: worker_pb2.DecodeSubmit, stream: RouterStream, deadline_s: float) -> DecodeRequest:
    sequence = sequence_from_wire(submit)
    candidates = deque(
        PrefillCandidate(
            item.worker_id,
            Epoch(item.epoch),
            item.address,
            item.queue_s,
            item.prefill_s,
            item.num_ranks or 1,
            item.cached_tokens,
            item.prefix_source if item.HasField("prefix_source") else None,
        )
        for item in submit.prefill_candidates
    )
    return DecodeRequest(
        submit.stream_id,
        sequence,
        stream,
        candidates,
        deadline_s,
        must_be_remote=submit.remote_prefill,
        num_resumed_tokens=sequence.num_output_tokens,
        prefix_source=source_from_wire(submit.prefix_source) if submit.HasField("prefix_source") else None,
    )
