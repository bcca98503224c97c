"""The decode worker's core: it owns each request from submission to its last token. Runs on the step loop, no gRPC.

A request is placed (prefill here or by a prefill worker), gets its first token and its pages, joins the running batch,
and leaves with a finish reason, an error or a cancellation; whatever it holds is then released. Pages that a transfer
may still write stay fenced until the transfer is known to be over, whoever has lost interest in it meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

import numpy as np

from decode_worker.attempts import PrefillAttempts
from decode_worker.audience import Audience
from decode_worker.outbox import Outbox
from decode_worker.pace import Pace
from decode_worker.prefill_client import RemoteFirstToken
from decode_worker.request import DecodeRequest, Moved, PrefillOutcome, RequestTiming, StageTimes, TokenDelta
from decode_worker.scheduler import DecodeScheduler
from decode_worker.transfer import Landed, Mismatch
from decode_worker.transfers import Transfers
from engine.drawing import StepTokens
from engine.engine import Engine
from engine.finish import finish_reason
from engine.isolation import step_isolated
from engine.roster import DecodeRows, Ends
from engine.row_table import RowTable
from engine.sequence import SampledToken, Sequence
from engine.step_plan import StepPlan
from engine.token_check import check_token_ids
from kv_transfer.session import Manifest
from penstock.config import DecodeConfig
from penstock.errors import Cancelled, Overloaded, PenstockError
from penstock.types import TransferKey, WorkerId, WorkerLoad

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


class DecodeWorker:
    """Owns the requests. Every method runs on the step loop."""

    def __init__(
        self, worker_id: WorkerId, engine: Engine, transfers: Transfers, config: DecodeConfig, context_length: int
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._config = config
        self._context_length = context_length
        rows = RowTable(engine.layout.page_size, Ends(engine.model.eos_token_ids, context_length))
        self.scheduler = DecodeScheduler(engine.pool, engine.prefix_cache, engine.layout.page_size, config, rows)
        self._transfers = transfers
        self._requests: dict[Sequence, DecodeRequest] = {}
        self._audience = Audience()
        self._outbox = Outbox()
        self._pace = Pace()
        self._attempts = PrefillAttempts(
            worker_id, engine.layout, self.scheduler, transfers, config, self._pace, self._tell
        )
        self.after_step: list[Callable[[], None]] = []  # called between two steps, also where there was nothing to do
        self.on_release: list[Callable[[DecodeRequest], None]] = []  # a request ends here, or goes on elsewhere
        self.load = WorkerLoad(total_pages=engine.pool.num_pages, free_pages=engine.pool.num_available)

    # What the service tells us.

    def submit(self, request: DecodeRequest) -> None:
        """Takes a request on; one that cannot be served ends at once with an error."""
        request.times = StageTimes(submitted_s=time.monotonic())
        try:
            self.take_on(request)
        except PenstockError as error:
            self._outbox.put(request, TokenDelta(request.stream_id, error=error))
            return
        self._attempts.place(request)

    def take_on(self, request: DecodeRequest) -> None:
        """From now on the request is ours, though nothing is done for it yet. Raises what speaks against it."""
        self._check(request.sequence)
        self._requests[request.sequence] = request
        self._audience.add(request)
        self.scheduler.track(request.sequence)

    def _check(self, sequence: Sequence) -> None:
        check_token_ids(sequence.token_ids, 1, self._context_length, self._engine.model.vocab_size)
        if len(self._requests) >= self._config.max_batch_sequences + self._config.max_waiting:
            raise Overloaded(f"this worker holds {len(self._requests)} requests, its limit; try again", _RETRY_AFTER_S)

    def cancel(self, request: DecodeRequest, error: PenstockError | None = None) -> None:
        """Ends a request whose caller has gone, or with `error` one that cannot go on."""
        if request.sequence not in self._requests:
            return
        if error is not None:
            self._outbox.put(request, TokenDelta(request.stream_id, error=error))
        self._release(request)

    # What becomes of sequences that move.

    @property
    def requests(self) -> Collection[DecodeRequest]:
        return self._requests.values()

    def request_of(self, sequence: Sequence) -> DecodeRequest | None:
        return self._requests.get(sequence)

    def replace(self, old: DecodeRequest, new: DecodeRequest) -> None:
        """The sequence of `old` goes on for `new`; where it has ended already, only its account does."""
        new.take_over(old)
        if new.sequence in self._requests:
            self._requests[new.sequence] = new
            self._audience.told(new)

    def hand_over(self, request: DecodeRequest, moved: Moved) -> None:
        """The sequence runs elsewhere now: whoever listens here is told where."""
        self._outbox.put(request, TokenDelta(request.stream_id, moved=moved))
        self._release(request)

    def num_tokens_left(self, sequence: Sequence) -> int:
        """To its end, at most."""
        return min(
            sequence.sampling.max_tokens - sequence.num_output_tokens, self._context_length - len(sequence.token_ids)
        )

    def timing(self, request: DecodeRequest) -> RequestTiming:
        return request.timing(
            decode_worker=self._worker_id,
            cached_tokens=self.scheduler.num_cached_tokens(request.sequence),
            num_preemptions=self.scheduler.num_preemptions(request.sequence),
            now_s=time.monotonic(),
        )

    # What happens to transfers.

    def on_slow(self, key: TransferKey) -> None:
        self._attempts.on_slow(key)

    def on_reserve(self, key: TransferKey) -> None:
        self._attempts.on_begun(key)
        self._transfers.on_reserve(key)

    def on_first_token(self, key: TransferKey, first: RemoteFirstToken) -> None:
        request = self._transfers.request_of(key)
        if request is None or len(request.sequence.token_ids) != self._transfers.num_tokens(key):
            return  # told before
        request.times.on_brought(first.queue_s, first.prefill_s, time.monotonic())
        request.cached_tokens = max(request.cached_tokens, first.cached_tokens)
        request.sequence.token_ids.append(first.token.token_id)
        self._on_token(request, first.token)

    def on_manifest(self, key: TransferKey, manifest: Manifest) -> None:
        self._after_progress(self._transfers.on_manifest(key, manifest))

    def on_arrival(self, key: TransferKey, first_index: int, num_pages: int) -> None:
        self._after_progress(self._transfers.on_arrival(key, first_index, num_pages))

    def _after_progress(self, landed: Landed | Mismatch | None) -> None:
        """The last page of a transfer is here and verified: its sequence joins the next step."""
        if landed is None:
            return
        if isinstance(landed, Mismatch):
            self._fall_back(landed.key, landed.request, landed.error)
            return
        request = landed.request
        request.pages_moved += landed.num_pages
        self.scheduler.join(request.sequence, landed.num_tokens)
        if request.adopter is not None:
            adopter, request.adopter, request.transfer = request.adopter, None, None
            adopter.confirm()
        else:
            request.times.landed_s = time.monotonic()
            self._attempts.on_landed(request, landed.key)

    def on_heartbeat(self, key: TransferKey) -> None:
        self._transfers.on_heartbeat(key)

    def sweep(self, now_s: float) -> float | None:
        """Looks after leases, whether or not there is anything to compute; when to come again."""
        for lapsed in self._transfers.sweep(now_s):
            self._fall_back(lapsed.key, lapsed.request, lapsed.error)
        return self._transfers.next_sweep_s

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> None:
        self._fall_back(key, self._transfers.on_closed(key, error), error)

    def on_lost(self, key: TransferKey, error: PenstockError) -> None:
        self._fall_back(key, self._transfers.give_up(key), error)

    def on_stalled(self, key: TransferKey, error: PenstockError) -> None:
        self._fall_back(key, self._transfers.give_up(key), error)

    def on_quiesced(self, key: TransferKey) -> None:
        self._transfers.on_quiesced(key)

    def _fall_back(self, key: TransferKey, request: DecodeRequest | None, error: PenstockError | None) -> None:
        """A prefill that failed costs the request time and nothing else; a sequence that could not come stays away."""
        if request is None:
            return
        if request.adopter is not None:
            request.adopter.refuse(error or Cancelled("its source gave the move up"))
            self._release(request)
            return
        self._attempts.on_failed(request, key, error)

    # The step: scheduled, computed by whoever drives this worker, and dealt out. Anything above may come meanwhile.

    def take_in(self) -> None:
        """Beside a step under way: pages for those who have asked, and out with what there is to tell."""
        self._transfers.grant_reservations(self.scheduler)
        self._outbox.flush()
        self._refresh_load()

    def begin(self) -> StepPlan[DecodeRows]:
        """The next step; empty where there is nothing to compute."""
        self._transfers.grant_reservations(self.scheduler)
        plan = self.scheduler.schedule(self._pace.chunk_tokens_within(self._config.itl_target_s))
        self._note_started(plan)
        self._outbox.flush()  # first tokens from prefill workers do not wait for this step
        if not plan:
            self._rest()
        return plan

    def begin_ahead(self) -> StepPlan[DecodeRows] | None:
        """The step after the one under way, where it can be scheduled already."""
        plan = self.scheduler.schedule_ahead(self._pace.chunk_tokens_within(self._config.itl_target_s))
        if plan is not None:
            self._note_started(plan)
        return plan

    def _note_started(self, plan: StepPlan[DecodeRows]) -> None:
        started_s = time.monotonic()
        for scheduled in plan.chunks:
            times = self._requests[scheduled.sequence].times
            times.started_s = times.started_s or started_s

    def finish(self, plan: StepPlan[DecodeRows], drawn: StepTokens, elapsed_s: float) -> None:
        """The oldest step under way is over."""
        self._pace.on_step(len(plan), plan.num_tokens, plan.num_contexts, elapsed_s)
        for sequence, error in drawn.failed:
            self._fail(sequence, error)
        void = self.scheduler.record(plan, drawn.rows, drawn.others)
        now_s = time.monotonic()
        self._deal_rows(plan.rows, drawn, void, now_s)
        for place, (scheduled, token_id) in enumerate(zip(plan.chunks, drawn.others, strict=True), len(plan.rows)):
            if token_id is not None and scheduled.sequence not in void:
                self._on_draw(scheduled.sequence, SampledToken(token_id, drawn.logprobs.get(place)), now_s)
        self._outbox.flush()
        self._rest()

    def _deal_rows(self, rows: DecodeRows, drawn: StepTokens, void: Collection[Sequence], now_s: float) -> None:
        """Most have a token and nothing more to say: those of one router travel together."""
        listeners_R, token_ids_R = rows.roster.listeners_R, drawn.rows
        apart_R = self._audience.apart(listeners_R) | rows.may_end(token_ids_R, self._engine.model.eos_token_ids)
        if drawn.logprobs:
            apart_R[[place for place in drawn.logprobs if place < len(rows)]] = True
        if void:
            apart_R |= np.array([item.sequence in void for item in rows.items], np.bool_)  # of no rows, too
        apart = apart_R.nonzero()[0].tolist()
        if apart:
            listeners_R, token_ids_R = listeners_R[~apart_R], token_ids_R[~apart_R]
        for send, run in self._audience.runs(listeners_R, token_ids_R):
            self._outbox.put_run(send, run)
        for place in apart:
            sequence = rows.items[place].sequence
            if sequence not in void:
                self._on_draw(sequence, SampledToken(int(drawn.rows[place]), drawn.logprobs.get(place)), now_s)

    def finish_alone(self, plan: StepPlan[DecodeRows]) -> None:
        """The only step under way has failed: computes it again on this thread, each sequence by itself where need be,
        and ends those that fail."""
        started_s = time.monotonic()
        done = step_isolated(self._engine.step, [item for item in plan if item.sequence in self._requests])
        self._pace.on_step(len(plan), plan.num_tokens, plan.num_contexts, time.monotonic() - started_s)
        for sequence, error in done.failed:
            self._fail(sequence, error)
        now_s = time.monotonic()
        for sequence, token in self.scheduler.commit(done.work, done.output):
            self._on_draw(sequence, token, now_s)
        self._outbox.flush()
        self._rest()

    def _fail(self, sequence: Sequence, error: PenstockError) -> None:
        request = self._requests.get(sequence)
        if request is not None:
            self.cancel(request, error)

    def _rest(self) -> None:
        """Between two steps, also where there was nothing to do."""
        for call in self.after_step:
            call()
        self._refresh_load()

    def _on_draw(self, sequence: Sequence, token: SampledToken, now_s: float) -> None:
        """A token that this worker has drawn and appended."""
        request = self._requests[sequence]
        request.times.on_drawn(now_s)
        self._on_token(request, token)

    def _on_token(self, request: DecodeRequest, token: SampledToken) -> None:
        """A token that has just been appended to the request's sequence."""
        request.end_pause(time.monotonic())
        self._audience.told(request)
        reason = finish_reason(request.sequence, self._engine.model.eos_token_ids, self._context_length)
        if reason is None:
            self._outbox.put(request, TokenDelta(request.stream_id, token))
            return
        self._outbox.put_end(request, token, reason, self.timing(request))
        self._release(request)

    def _release(self, request: DecodeRequest) -> None:
        del self._requests[request.sequence]
        self._audience.remove(request)
        for call in self.on_release:
            call(request)
        self._transfers.abandon(request)
        self.scheduler.forget(request.sequence)

    def _tell(self, request: DecodeRequest, outcome: PrefillOutcome) -> None:
        self._outbox.put(request, TokenDelta(request.stream_id, prefill=outcome))

    def _refresh_load(self) -> None:
        self.load = WorkerLoad(
            num_running=self.scheduler.num_running,
            num_waiting=len(self._requests) - self.scheduler.num_running,
            free_pages=self._engine.pool.num_available,
            total_pages=self._engine.pool.num_pages,
            queued_prefill_tokens=self.scheduler.num_uncomputed_tokens,
            prefill_tokens_per_s=self._pace.chunk_tokens_per_s,
            step_s=self._pace.step_s,
            cache=self._engine.prefix_cache.stats,
            prefill_steps=self._pace.prefill_steps,
            decode_steps=self._pace.decode_steps,
            num_open=len(self._requests),
            requests=self._outbox.totals,
        )
