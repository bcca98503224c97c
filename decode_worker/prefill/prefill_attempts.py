"""Gets each request's prefill done, on this worker or on one prefill worker after another. Runs on the step loop.

A request that holds no pages is placed here or with its next candidate. A failed attempt only costs time. With hedging,
a prefill that has not begun in time is also requested from the next candidate. The first to ask for its destination
computes it, so pages are reserved only once, and the other attempt costs no more than a place in a queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from decode_worker.prefill.client import PrefillCandidate, RemoteFirstToken, TransferEvents
from decode_worker.prefill.placement_policy import (
    PrefillDecision,
    PrefillPlace,
    PrefillPlacement,
    PrefillTimes,
    RemoteOption,
)
from decode_worker.prefill.placement_state import PlacementState
from decode_worker.prefill.transfer_table import TransferTable
from decode_worker.request import DecodeRequest, HedgeAttempt
from decode_worker.schedule.pace import Pace
from decode_worker.schedule.scheduler import DecodeScheduler
from decode_worker.schedule.step_costs import StepCosts
from engine.cache.kv_layout import KVLayout
from penstock.config import DecodeConfig
from penstock.errors import AdapterUnavailable, Cancelled, DeadlineExceeded, InvalidInput, PenstockError, TransferError
from penstock.types import ChunkSpeed, Lane, TransferKey, WorkerId
from penstock.v1 import common_pb2, worker_pb2
from worker.pull.prompts import PrefixPulls

log = logging.getLogger(__name__)


class PrefillAttempts:
    """Owns each request's attempt at its prefill, and its hedge."""

    def __init__(
        self,
        worker_id: WorkerId,
        layout: KVLayout,
        scheduler: DecodeScheduler,
        transfers: TransferTable,
        config: DecodeConfig,
        pace: Pace,
        events: TransferEvents,
        report: Callable[[DecodeRequest, worker_pb2.PrefillOutcome], None],
        pulls: PrefixPulls | None = None,
    ) -> None:
        """`events` receives the answers of prefill workers; `report` is called with each remote attempt's outcome.
        Without `pulls` nothing is pulled from other workers.
        """
        self._worker_id = worker_id
        self._layout = layout
        self._scheduler = scheduler
        self._transfers = transfers
        self._config = config
        self._events = events
        self._report = report
        self._pulls = pulls
        self._policy = PrefillPlacement(config)
        token_bytes = layout.page_bytes / layout.page_size
        self._state = PlacementState(scheduler, transfers, config, pace, layout.page_size, token_bytes)

    def place(self, request: DecodeRequest) -> None:
        """Starts the prefill of a request that holds no pages, here or with one of its candidates."""
        request.transfer = None
        if self._pulls is not None:
            self._pulls.recall(request.sequence)
        now_s = time.monotonic()
        decision = self._choose(request, now_s)
        request.place(decision, now_s)
        chosen = decision.chosen
        if chosen.place is PrefillPlace.LOCAL:
            request.prefilled_by = self._worker_id
            if self._pulls is None:
                self._scheduler.compute_here(request.sequence)
            else:
                self._pulls.bring(request.sequence, request.prefix_source, partial(self._compute_here, request))
            return
        assert chosen.option is not None
        candidate = next(each for each in request.candidates if each.worker_id == chosen.option.worker_id)
        request.candidates.remove(candidate)
        may_hedge = bool(self._config.hedge_after_s and request.candidates)
        request.prefilled_by = WorkerId(candidate.worker_id)
        request.transfer = self._transfers.begin(
            request,
            candidate,
            self._events,
            self._config.hedge_after_s if may_hedge else None,
            chosen.num_remote if chosen.place is PrefillPlace.SPLIT else None,
        )

    def chunk_tokens(self, landed: Iterable[DecodeRequest], now_s: float) -> int | None:
        """Returns how many prompt tokens the next step may compute; None: no limit.

        The requests that have `landed` get their second token in that step and have waited for it since the first.
        """
        joining = (
            request
            for request in landed
            if request.sequence.lane is not Lane.BULK and self._scheduler.is_running(request.sequence)
        )
        waited_s = max((now_s - request.times.first_token_s for request in joining), default=0.0)
        return self._state.chunk_tokens(waited_s)

    @property
    def steps(self) -> StepCosts:
        """The learned costs of this worker's steps."""
        return self._policy.steps

    @property
    def chunk_speed(self) -> ChunkSpeed:
        """The reported costs of chunks, by which routers price a prompt that this worker computes."""
        return self._state.chunk_speed(self._policy.steps)

    def leave(self, request: DecodeRequest) -> None:
        """Gives up the prefill of a request that ends: its transfers, or its pull, whose record is complete then."""
        self._transfers.abandon(request)
        if self._pulls is not None:
            self._pulls.leave(request.sequence)

    def _compute_here(self, request: DecodeRequest, pull: common_pb2.Pull | None) -> None:
        """Queues a request beside or after its pull, unless it has ended."""
        if self._scheduler.is_tracked(request.sequence):
            request.pull = pull
            self._scheduler.compute_here(request.sequence)

    def _choose(self, request: DecodeRequest, now_s: float) -> PrefillDecision:
        sequence = request.sequence
        pull = self._pulls.predict(sequence, request.prefix_source) if self._pulls is not None else None
        pulled = (pull[0], pull[1].ready_s) if pull else (0, 0.0)
        demand = self._state.describe(sequence, *pulled)
        # A prefill worker returns only the first token, without scores of the prompt.
        options = [] if sequence.scores_prompt else [_option(candidate) for candidate in request.candidates]
        return self._policy.choose(demand, options, now_s, request.must_be_remote)

    def on_computed(self, request: DecodeRequest, first: RemoteFirstToken, now_s: float) -> None:
        """Learns how long a prefill at a prefill worker took."""
        placed = request.placed
        if placed is None or placed.option is None or placed.option.worker_id != request.prefilled_by:
            return  # it was hedged, so its starting time is unknown
        times = PrefillTimes(now_s - request.times.placed_s, first.queue_s, first.prefill_s, first.cached_tokens)
        self._policy.on_first_token(placed, len(request.sequence.token_ids), times, now_s)

    def on_slow(self, key: TransferKey) -> None:
        """Hedges a prefill that has not begun within its patience."""
        request = self._transfers.request_of(key)
        if request is None or request.hedge or not request.candidates or self._transfers.has_begun(key):
            return
        candidate: PrefillCandidate = request.candidates.popleft()
        log.info(
            "%s: %s has not begun its prefill; requesting it from %s too",
            request.sequence.request_id,
            request.prefilled_by,
            candidate.worker_id,
        )
        part = self._transfers.num_tokens(key) if self._transfers.is_part(key) else None
        key = self._transfers.begin(request, candidate, self._events, num_tokens=part)
        request.hedge = HedgeAttempt(key, WorkerId(candidate.worker_id))

    def on_begun(self, key: TransferKey) -> None:
        """Gives up the other attempt, if there is one, since this sender has asked for its destination."""
        request = self._transfers.request_of(key)
        if request is not None and request.hedge is not None:
            self._transfers.give_up(_keep_attempt(request, key))

    def on_landed(self, request: DecodeRequest, key: TransferKey, num_pages: int) -> None:
        request.transfer = None
        if request.prefilled_by is not None:
            self._policy.remote.on_landed(
                request.prefilled_by, num_pages * self._layout.page_bytes, request.times.exposed_s
            )
            self._report(request, worker_pb2.PrefillOutcome(worker_id=request.prefilled_by, epoch=key.sender_epoch))

    def on_failed(self, request: DecodeRequest, key: TransferKey, error: PenstockError | None) -> None:
        """Continues with the request's other attempt if there is one, or else places the request again."""
        hedge = request.hedge
        failed = hedge.worker_id if hedge and hedge.key == key else request.prefilled_by
        log.warning("%s: prefill by %s failed: %s", request.sequence.request_id, failed, error)
        fault = _fault_of(error)
        if failed is not None and fault is not None:
            outcome = worker_pb2.PrefillOutcome(worker_id=failed, epoch=key.sender_epoch, fault=fault)
            self._report(request, outcome)
        if hedge is not None:
            assert request.transfer is not None
            _keep_attempt(request, request.transfer if hedge.key == key else hedge.key)
            return
        self._scheduler.drop_pages(request.sequence)
        self.place(request)


def _option(candidate: PrefillCandidate) -> RemoteOption:
    return RemoteOption(candidate.worker_id, candidate.queue_s, candidate.prefill_s, candidate.cached_tokens)


def _keep_attempt(request: DecodeRequest, key: TransferKey) -> TransferKey:
    """Makes `key` the only attempt of a hedged request. Returns the other attempt's key."""
    first, hedge = request.transfer, request.hedge
    assert first is not None
    assert hedge is not None
    request.hedge = None
    if key != hedge.key:
        return hedge.key
    request.transfer, request.prefilled_by = hedge.key, hedge.worker_id
    return first


def _fault_of(error: PenstockError | None) -> worker_pb2.PrefillFault | None:
    """Returns the fault of the prefill worker or link; None if the request is at fault."""
    if isinstance(error, TransferError):
        return worker_pb2.PREFILL_FAULT_LINK
    if isinstance(error, InvalidInput | DeadlineExceeded | Cancelled | AdapterUnavailable):
        return None
    return worker_pb2.PREFILL_FAULT_WORKER
