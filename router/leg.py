"""One completion of a request as its token stream holds it: where it runs, and all that it has emitted."""

from __future__ import annotations

from collections.abc import Callable

from penstock import legs
from penstock.errors import PenstockError
from penstock.types import Epoch
from penstock.v1 import common_pb2, worker_pb2
from router.follower import Follower
from router.inflight import WorkKey
from router.link import Link
from router.placement import Placement
from router.quarantine import Suspicion
from router.request import Request


class Leg:
    """A `link.Sink` of its present submission."""

    def __init__(self, index: int, request: Request, deliver: Callable[[Leg, object], None]) -> None:
        self.index = index
        self.sampling = legs.sampling_of(request.sampling, index)
        before = request.emitted.get(index)
        self.emitted = list(before.token_ids) if before else []
        self.num_redispatches = 0
        self.refused_by: set[int] = set()  # epochs of workers that would not take it
        self.ended = before is not None and before.finished
        self.sent_s = 0.0  # monotonic, the present submission
        self.first_token_s = 0.0
        self.credits: list[WorkKey] = []
        self.suspicion = Suspicion()
        self.in_ward = False
        self.timing: common_pb2.Timing | None = None  # once it has ended
        self.placements: list[Placement] = []  # one a submission to a worker that was chosen
        self.decode_worker = ""
        self.decode_address = ""
        self.decode_epoch = Epoch(0)
        self._deliver = deliver
        self._link: Link | None = None
        self._stream_id = 0

    def submit(self, link: Link, command: worker_pb2.DecodeCommand) -> None:
        self._stream_id = link.submit(command, self)
        self._link = link

    def runs_at(self, worker: Follower) -> None:
        self.decode_worker, self.decode_epoch = worker.worker_id, worker.epoch
        self.decode_address = worker.address

    def cancel(self) -> None:
        self.ended = True
        if self._link is not None:
            self._link.cancel(self._stream_id)

    def on_delta(self, delta: worker_pb2.StepDelta) -> None:
        self._deliver(self, delta)

    def on_lost(self, error: PenstockError) -> None:
        self._deliver(self, error)
