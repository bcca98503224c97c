"""Who computes a prompt: this worker, or one prefill worker after the other. Runs on the step loop.

A request that holds no pages is placed: here, or with its next candidate. An attempt that fails costs time and nothing
else. Where hedging is on, a prefill that has not begun in time is asked of the next candidate too; whichever asks for
its destination first computes it, so that pages are reserved once and the other attempt costs a place in a queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from decode_worker.pace import Pace
from decode_worker.placement import PlacementCosts, prefill_here
from decode_worker.prefill_client import PrefillCandidate
from decode_worker.request import Attempt, DecodeRequest, PrefillFault, PrefillOutcome
from decode_worker.scheduler import DecodeScheduler
from decode_worker.transfers import Transfers
from engine.kv_layout import KVLayout
from penstock.config import DecodeConfig
from penstock.errors import Cancelled, DeadlineExceeded, InvalidInput, PenstockError, TransferError
from penstock.types import TransferKey, WorkerId

log = logging.getLogger(__name__)

_TRANSFER_BYTES_PER_S = 1e9  # prior for the choice between here and there


class PrefillAttempts:
    """Owns each request's attempt at its prefill, and the hedge of it."""

    def __init__(
        self,
        worker_id: WorkerId,
        layout: KVLayout,
        scheduler: DecodeScheduler,
        transfers: Transfers,
        config: DecodeConfig,
        pace: Pace,
        tell: Callable[[DecodeRequest, PrefillOutcome], None],
    ) -> None:
        """`tell` hears how each remote attempt ended."""
        self._worker_id = worker_id
        self._layout = layout
        self._scheduler = scheduler
        self._transfers = transfers
        self._config = config
        self._pace = pace
        self._tell = tell

    def place(self, request: DecodeRequest) -> None:
        """Starts the missing KV of a request that holds no pages: with the next candidate, or here."""
        request.transfer = None
        if self._prefill_here(request):
            request.prefilled_by = self._worker_id
            self._scheduler.compute_here(request.sequence)
            return
        candidate = request.candidates.popleft()
        patience_s = self._config.hedge_after_s if self._config.hedge_after_s and request.candidates else None
        request.prefilled_by = WorkerId(candidate.worker_id)
        request.transfer = self._transfers.begin(request, candidate, patience_s)

    def _prefill_here(self, request: DecodeRequest) -> bool:
        sequence = request.sequence
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
        """The prefill has not begun within its patience."""
        request = self._transfers.request_of(key)
        if request is None or request.hedge or not request.candidates or self._transfers.has_begun(key):
            return
        candidate: PrefillCandidate = request.candidates.popleft()
        log.info(
            "%s: %s has not begun its prefill; %s is asked too",
            request.sequence.request_id,
            request.prefilled_by,
            candidate.worker_id,
        )
        request.hedge = Attempt(self._transfers.begin(request, candidate), WorkerId(candidate.worker_id))

    def on_begun(self, key: TransferKey) -> None:
        """The sender asks where to write: the other attempt, if there is one, is given up."""
        request = self._transfers.request_of(key)
        if request is not None and request.hedge is not None:
            self._transfers.give_up(_go_on_with(request, key))

    def on_landed(self, request: DecodeRequest, key: TransferKey) -> None:
        request.transfer = None
        if request.prefilled_by is not None:
            self._tell(request, PrefillOutcome(request.prefilled_by, key.sender_epoch))

    def on_failed(self, request: DecodeRequest, key: TransferKey, error: PenstockError | None) -> None:
        """The hedge of it goes on, if there is one; else the request is placed anew."""
        hedge = request.hedge
        failed = hedge.worker_id if hedge and hedge.key == key else request.prefilled_by
        log.warning("%s: prefill by %s failed: %s", request.sequence.request_id, failed, error)
        fault = _fault_of(error)
        if failed is not None and fault is not None:
            self._tell(request, PrefillOutcome(failed, key.sender_epoch, fault))
        if hedge is not None:
            assert request.transfer is not None
            _go_on_with(request, request.transfer if hedge.key == key else hedge.key)
            return
        self._scheduler.drop_pages(request.sequence)
        self.place(request)


def _go_on_with(request: DecodeRequest, key: TransferKey) -> TransferKey:
    """Of a hedged request's two attempts `key` is the one now; returns the other."""
    first, hedge = request.transfer, request.hedge
    assert first is not None
    assert hedge is not None
    request.hedge = None
    if key != hedge.key:
        return hedge.key
    request.transfer, request.prefilled_by = hedge.key, hedge.worker_id
    return first


def _fault_of(error: PenstockError | None) -> PrefillFault | None:
    """Whom to blame; nobody where it is the request's own fault."""
    if isinstance(error, TransferError):
        return PrefillFault.LINK
    if isinstance(error, InvalidInput | DeadlineExceeded | Cancelled):
        return None
    return PrefillFault.WORKER
