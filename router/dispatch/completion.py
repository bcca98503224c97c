"""A dispatched completion: which worker runs it, and all tokens that it has emitted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from penstock import wire
from penstock.errors import PenstockError
from penstock.kv.weights_version import weights_version
from penstock.text.completions import completion_id, completion_sampling, streamed_timing
from penstock.v1 import common_pb2, worker_pb2
from router.dispatch.completion_core import CompletionCore
from router.dispatch.placement import Placement
from router.fleet.fleet_worker import FleetWorker
from router.fleet.quarantine import Suspicion
from router.fleet.token_link import TokenLink
from router.prepared_request import PreparedRequest
from router.tracing.stages import LegCause, WorkerLeg


class DispatchedCompletion:
    """A completion owned by its token stream, which chooses the workers that `submit` sends it to in turn."""

    def __init__(self, index: int, request: PreparedRequest, make_core: Callable[[int, bool], CompletionCore]) -> None:
        """`make_core` takes the number of tokens emitted by an earlier call, and whether the completion is over."""
        self.index = index
        self.sampling = completion_sampling(request.sampling, index)
        earlier = request.emitted.get(index)
        self.emitted = list(earlier.token_ids) if earlier else []
        self.ended = earlier is not None and earlier.finished  # the reader has seen its end
        self.core = make_core(len(self.emitted), self.ended)
        self.is_counted = not self.ended  # whether the stream counts it among its running completions
        self.sent_s = 0.0  # monotonic; when it was placed and sent last
        self.first_token_s = 0.0  # 0: no token yet
        self.suspicion = Suspicion()
        self.in_isolation = False  # holds the quarantine's isolation lock
        self.timing: common_pb2.Timing | None = None  # set when its last token has arrived
        self.placements: list[Placement] = []  # one for each leg that did not begin with a migration
        self.legs: list[WorkerLeg] = []  # one for each submission
        self.worker_id = ""
        self.worker_address = ""
        self.weight_version = 0  # of the worker that it was sent to last
        self._link: TokenLink | None = None
        self._stream_id = 0

    def submit(
        self,
        worker: FleetWorker,
        command: worker_pb2.DecodeCommand,
        sent_s: float,
        cause: LegCause,
        deliver: Callable[[DispatchedCompletion, worker_pb2.StepDelta | PenstockError], None],
    ) -> None:
        """Sends the completion to a worker. Raises Unavailable if its link is closed.

        `deliver` is called on the event loop with whatever the worker sends. Only the link keeps it: kept here, it
        would tie the request's objects into a cycle, which only the garbage collector frees.
        """
        self.worker_id, self.worker_address = worker.worker_id, worker.address
        assert worker.link is not None  # the caller has chosen a worker with a link
        self._stream_id = worker.link.submit(command, functools.partial(deliver, self))
        self._link = worker.link
        self.weight_version = weights_version(worker.description.model_revision)
        self.legs.append(WorkerLeg(worker.worker_id, sent_s, cause, weight_version=self.weight_version))
        self.core.on_sent(worker.epoch)

    def release(self) -> None:
        """Ends the completion, and cancels it at its worker if it still runs."""
        self.ended = True
        if self.core.release() and self._link is not None:
            self._link.cancel(self._stream_id)

    def submission(
        self,
        request: PreparedRequest,
        candidates: Sequence[worker_pb2.PrefillCandidate],
        timeout_s: float,
        prefix_source: worker_pb2.PrefixSource | None = None,
    ) -> worker_pb2.DecodeCommand:
        """Returns the command that starts the completion at a worker, or continues it after the emitted tokens."""
        command = worker_pb2.DecodeCommand()
        submit = command.submit  # filled in place, since setting a submessage would copy it
        submit.request_id = completion_id(request.request_id, self.index, request.sampling.n)
        submit.token_ids.extend(request.token_ids)
        submit.token_ids.extend(self.emitted)
        submit.num_prompt_tokens = len(request.token_ids)
        wire.set_sampling(submit.sampling, self.sampling)
        submit.salt = request.salt
        submit.timeout_ms = max(1, int(timeout_s * 1e3))
        submit.prefill_candidates.extend(candidates)
        if prefix_source is not None:
            submit.prefix_source.CopyFrom(prefix_source)
        submit.lane = wire.lane_to_wire(request.lane)
        submit.tenant = request.tenant
        if self.index == 0 and (hints := wire.kv_hints_to_wire(request.kv_hints)) is not None:
            submit.kv_hints.CopyFrom(hints)
        if (adapter := wire.adapter_to_wire(request.adapter)) is not None:
            submit.adapter.CopyFrom(adapter)
        return command

    def end_timing(self, request: PreparedRequest, reported: common_pb2.Timing, now_s: float) -> common_pb2.Timing:
        """Returns, and keeps, the worker's report of the ended completion with the times that only the router knows."""
        timing = streamed_timing(
            reported,
            waited_s=0.0 if self.core.num_redispatches else self.sent_s - request.accepted_s,
            accepted_s=request.accepted_s,
            first_token_s=self.first_token_s,
            now_s=now_s,
            decode_worker=self.worker_id,
            num_prompt_tokens=len(request.token_ids),
        )
        timing.num_redispatches = self.core.num_redispatches
        self.timing = timing
        return timing
