"""Runs each request's prefill: on this worker, or on one prefill worker after the other. Runs on the step loop.

A request that holds no pages is placed: here, or with its next candidate. A failed attempt costs time and nothing else.
With hedging, a prefill that has not begun in time is requested from the next candidate too; whichever asks for its
destination first computes it, so that pages are reserved once and the other attempt costs a place in a queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from decode_worker.prefill.client import PrefillCandidate, TransferEvents
from decode_worker.prefill.placement_policy import PlacementCosts, prefill_here
from decode_worker.prefill.transfer_table import TransferTable
from decode_worker.request import DecodeRequest, HedgeAttempt
from decode_worker.schedule.pace import Pace
from decode_worker.schedule.scheduler import DecodeScheduler
from engine.cache.kv_layout import KVLayout
from penstock.config import DecodeConfig
from penstock.errors import Cancelled, DeadlineExceeded, InvalidInput, PenstockError, TransferError
from penstock.types import TransferKey, WorkerId
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)

_TRANSFER_BYTES_PER_S = 1e9  # prior, for the placement


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
    ) -> None:
        """`events` receives what prefill workers answer; `report` is called with each remote attempt's outcome."""
        self._worker_id = worker_id
        self._layout = layout
        self._scheduler = scheduler
        self._transfers = transfers
        self._config = config
        self._pace = pace
        self._events = events
        self._report = report

    def place(self, request: DecodeRequest) -> None:
        """Starts the prefill of a request that holds no pages: with the next candidate, or here."""
        request.transfer = None
        if self._prefill_here(request):
            request.prefilled_by = self._worker_id
            self._scheduler.compute_here(request.sequence)
            return
        candidate = request.candidates.popleft()
        patience_s = self._config.hedge_after_s if self._config.hedge_after_s and request.candidates else None
        request.prefilled_by = WorkerId(candidate.worker_id)
        request.transfer = self._transfers.begin(request, candidate, self._events, patience_s)

    def _prefill_here(self, request: DecodeRequest) -> bool:
        sequence = request.sequence
        if sequence.scores_prompt:  # a prefill worker returns the first token alone
            return True
        uncached = len(sequence.token_ids) - self._scheduler.peek_cached_tokens(sequence)
        best = request.candidates[0] if request.candidates else None
        costs = PlacementCosts(
            uncached_tokens=uncached,
            queued_tokens=self._scheduler.num_uncomputed_tokens,
            num_running=self._scheduler.num_running,
            tokens_per_s=self._pace.chunk_tokens_per_s,
            remote_queue_s=best.queue_s if best else 0.0,
            remote_prefill_s=best.prefill_s if best else 0.0,
            transfer_s=uncached / self._layout.page_size * self._layout.page_bytes / _TRANSFER_BYTES_PER_S,
        )
        return prefill_here(self._config.placement, self._config.max_local_tokens, best is not None, costs)

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
        key = self._transfers.begin(request, candidate, self._events)
        request.hedge = HedgeAttempt(key, WorkerId(candidate.worker_id))

    def on_begun(self, key: TransferKey) -> None:
        """Gives up the other attempt, if there is one: this sender has asked for its destination."""
        request = self._transfers.request_of(key)
        if request is not None and request.hedge is not None:
            self._transfers.give_up(_keep_attempt(request, key))

    def on_landed(self, request: DecodeRequest, key: TransferKey) -> None:
        request.transfer = None
        if request.prefilled_by is not None:
            self._report(request, worker_pb2.PrefillOutcome(worker_id=request.prefilled_by, epoch=key.sender_epoch))

    def on_failed(self, request: DecodeRequest, key: TransferKey, error: PenstockError | None) -> None:
        """Continues with the request's other attempt, if there is one; else places the request again."""
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


def _keep_attempt(request: DecodeRequest, key: TransferKey) -> TransferKey:
    """Makes `key` the only attempt of a hedged request; returns the other attempt's key."""
    first, hedge = request.transfer, request.hedge
    assert first is not None
    assert hedge is not None
    request.hedge = None
    if key != hedge.key:
        return hedge.key
    request.transfer, request.prefilled_by = hedge.key, hedge.worker_id
    return first


def _fault_of(error: PenstockError | None) -> worker_pb2.PrefillFault | None:
    """Returns what to blame for the failure; None if it is the request's own fault."""
    if isinstance(error, TransferError):
        return worker_pb2.PREFILL_FAULT_LINK
    if isinstance(error, InvalidInput | DeadlineExceeded | Cancelled):
        return None
    return worker_pb2.PREFILL_FAULT_WORKER
