"""One completion of a request as its token stream holds it: where it runs, and all that it has emitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.errors import PenstockError
from penstock.v1 import worker_pb2
from router.inflight import WorkKey
from router.link import Link
from router.request import Request


class Leg:
    """A `link.Sink` of its present submission."""

    def __init__(self, index: int, request: Request, deliver: Callable[[Leg, object], None]) -> None:
        seed = (request.sampling.seed + index) % (1 << 64)
        self.index = index
        self.sampling = replace(request.sampling, n=1, seed=seed, stop=())  # stop strings are matched here
        self.emitted: list[int] = []
        self.num_redispatches = 0
        self.refused_by: set[int] = set()  # epochs of workers that would not take it
        self.ended = False
        self.sent_s = 0.0  # monotonic, the present submission
        self.first_token_s = 0.0
        self.credits: list[WorkKey] = []
        self.decode_worker = ""
        self.decode_epoch = 0
        self._deliver = deliver
        self._link: Link | None = None
        self._stream_id = 0

    def submit(self, link: Link, submit: worker_pb2.DecodeSubmit) -> None:
        self._stream_id = link.submit(submit, self)
        self._link = link

    def cancel(self) -> None:
        self.ended = True
        if self._link is not None:
            self._link.cancel(self._stream_id)

    def on_delta(self, delta: worker_pb2.StepDelta) -> None:
        self._deliver(self, delta)

    def on_lost(self, error: PenstockError) -> None:
        self._deliver(self, error)
