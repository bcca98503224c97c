"""The decode worker's core: owns each request from submission to its last token. Runs on the step loop without gRPC.

A request is placed (prefill here or at a prefill worker), gets its first token and its pages, joins the running batch,
and leaves with a finish reason, an error or a cancellation. Everything it holds is then released. Pages that a transfer
may still write stay fenced until the transfer is known to be over, even if they are no longer needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from decode_worker.delivery.token_delivery import TokenDelivery, special_rows
from decode_worker.drafting.load_draft import Draft, make_speculator
from decode_worker.events import DecodeEvents
from decode_worker.prefill.client import RemoteFirstToken
from decode_worker.prefill.prefill_attempts import PrefillAttempts
from decode_worker.prefill.transfer_table import FailedTransfer, LandedTransfer, TransferTable
from decode_worker.readiness import SequenceReadiness
from decode_worker.request import DecodeRequest, RemotePart, StageTimes, TokenDelta
from decode_worker.schedule.bulk_policy import BulkLimits, BulkPolicy
from decode_worker.schedule.pace import Pace
from decode_worker.schedule.scheduler import DecodeScheduler
from decode_worker.step_measurements import StepMeasurements
from decode_worker.worker_load import measure_load
from engine.adapters.queue import AdapterQueue
from engine.engine import Engine
from engine.sampling.grammar.fast_forward import forced_tokens
from engine.sampling.grammar.queue import GrammarQueue
from engine.step.compute import StepTokens
from engine.step.finish import finish_reason
from engine.step.isolation import step_isolated
from engine.step.plan import DecodeRows, EndConditions, StepPlan
from engine.step.prompt_scores import PromptScores
from engine.step.row_table import RowTable
from engine.step.sequence import SampledToken, Sequence
from kv_transfer.session.transfer_session import Manifest
from penstock.config import DecodeConfig
from penstock.errors import Cancelled, Overloaded, PenstockError
from penstock.metrics.worker_metrics import HANDOFF_MISMATCHES
from penstock.types import FinishReason, TransferKey, WorkerId, WorkerLoad
from penstock.v1 import common_pb2, worker_pb2
from worker.hints.hint_follower import HintFollower
from worker.pull.prompts import PrefixPulls
from worker.sequence_message import check_token_ids

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


class DecodeWorker:
    """Owns the requests. Every method runs on the step loop."""

    def __init__(
        self,
        worker_id: WorkerId,
        engine: Engine,
        transfers: TransferTable,
        config: DecodeConfig,
        context_length: int,
        grammars: GrammarQueue | None = None,
        pulls: PrefixPulls | None = None,
        adapters: AdapterQueue | None = None,
        draft: Draft | None = None,
        events: DecodeEvents | None = None,
        hints: HintFollower | None = None,
    ) -> None:
        """Requests with a grammar or adapter are refused without `grammars` or `adapters`. Without `pulls` nothing is
        pulled from other workers; without `draft` only repetitions are proposed; without `hints` none is followed.
        """
        self._worker_id = worker_id
        self._engine = engine
        self._config = config
        self._context_length = context_length
        page_size, has_prompt_stream = engine.layout.page_size, config.prompt_sm_share > 0
        rows = RowTable(page_size, EndConditions(engine.model.eos_token_ids, context_length))
        speculator = make_speculator(config, draft)
        self.scheduler = DecodeScheduler(
            engine.pool, engine.prefix_cache, page_size, config, rows, speculator, has_prompt_stream=has_prompt_stream
        )
        self._transfers = transfers
        self._readiness = SequenceReadiness(grammars, adapters)
        self._events = events or DecodeEvents()
        self._hints = hints
        self._requests: dict[Sequence, DecodeRequest] = {}
        self._delivery = TokenDelivery()
        self._pace = Pace()
        self._prefills = PrefillAttempts(
            worker_id, engine.layout, self.scheduler, transfers, config, self._pace, self, self._report, pulls
        )
        self.bulk = BulkPolicy(self._prefills.steps, self._pace)
        self._measurements = StepMeasurements(self._pace, self._prefills, speculator, draft, self._events)
        self._landed: set[Sequence] = set()  # sequences that wait for their first step here
        self._refusal: PenstockError | None = None  # what every new request is refused with, once the worker pauses
        self.load = WorkerLoad(total_pages=engine.pool.num_pages, free_pages=engine.pool.num_reported)

    # Requests.

    def submit(self, request: DecodeRequest) -> None:
        """Accepts and places a request. If it cannot be served, it ends at once with an error."""
        request.times = StageTimes(submitted_s=time.monotonic())
        try:
            self.accept(request)
        except PenstockError as error:
            self._delivery.put(request, TokenDelta(request.stream_id, error=error))
            return
        if request.sequence.kv_hints.only:
            times = request.times
            times.placed_s = times.started_s = times.first_token_s = times.submitted_s
            self._end(request, None, FinishReason.STOP)
        else:
            self._when_ready(request, lambda: self._place(request))

    def _place(self, request: DecodeRequest) -> None:
        """Places a request. If it continues an output, it may continue with tokens that its grammar forces."""
        if request.sequence.matcher is not None:
            self._fast_forward(request)
        if request.sequence in self._requests:
            self._prefills.place(request)

    def refuse_new(self, error: PenstockError) -> None:
        """Refuses every request that comes from now on; the others continue."""
        self._refusal = error

    def end_all(self, error: PenstockError) -> None:
        """Ends every request with this error, and refuses later ones."""
        self._refusal = self._refusal or error
        for request in tuple(self._requests.values()):
            self._refuse(request, error)
        self._delivery.flush()

    def accept(self, request: DecodeRequest) -> None:
        """Takes ownership of a request without placing it. Raises InvalidInput, Overloaded or the error of a pause."""
        if self._refusal is not None:
            raise self._refusal
        self._check(request.sequence)
        self._requests[request.sequence] = request
        self._delivery.add(request)
        self.scheduler.track(request.sequence)
        self._readiness.prepare(request.sequence)  # while its pages are on their way

    def _when_ready(self, request: DecodeRequest, then: Callable[[], None]) -> None:
        """Calls `then` once adapter and grammar are loaded, unless the request has ended; ends it on failure."""
        self._readiness.when_ready(request.sequence, partial(self._continue, request, then))

    def _continue(self, request: DecodeRequest, then: Callable[[], None], error: PenstockError | None) -> None:
        if request.sequence not in self._requests:
            return
        if error is None:
            then()
        else:
            self._refuse(self._requests[request.sequence], error)

    def _refuse(self, request: DecodeRequest, error: PenstockError) -> None:
        """Ends a request that cannot run here; a migrating one stays at its source."""
        if request.migration is None:
            self.cancel(request, error)
        else:
            request.migration.refuse(error)
            self._release(request)

    def check_tokens(self, sequence: Sequence) -> None:
        """Raises InvalidInput unless this worker can compute the tokens and one more."""
        check_token_ids(sequence.token_ids, 1, self._context_length, self._engine.model.vocab_size)

    def _check(self, sequence: Sequence) -> None:
        self.check_tokens(sequence)
        self._readiness.check(sequence)
        if len(self._requests) >= self._config.max_batch_sequences + self._config.max_waiting:
            raise Overloaded(f"this worker holds {len(self._requests)} requests, its limit; try again", _RETRY_AFTER_S)

    def cancel(self, request: DecodeRequest, error: PenstockError | None = None) -> None:
        """Ends a request whose caller is gone or has found a stop string or, with `error`, one that cannot continue."""
        if request.sequence not in self._requests:
            return
        if error is not None:
            self._delivery.put(request, TokenDelta(request.stream_id, error=error))
        else:
            self._prefills.leave(request)
        request.follow_hints(self._hints, self.scheduler.num_cached_tokens(request.sequence))
        self._release(request)

    def timing(self, request: DecodeRequest) -> common_pb2.Timing:
        return request.timing(
            decode_worker=self._worker_id,
            cached_tokens=self.scheduler.num_cached_tokens(request.sequence),
            num_preemptions=self.scheduler.num_preemptions(request.sequence),
            now_s=time.monotonic(),
        )

    # Migrations.

    @property
    def requests(self) -> Collection[DecodeRequest]:
        return self._requests.values()

    def request_of(self, sequence: Sequence) -> DecodeRequest | None:
        return self._requests.get(sequence)

    def replace(self, old: DecodeRequest, new: DecodeRequest) -> None:
        """Continues the sequence of `old` for `new`, which inherits its state even if the sequence has ended."""
        new.inherit(old)
        if new.sequence in self._requests:
            self._requests[new.sequence] = new
            self._delivery.refresh(new)

    def release_migrated(self, request: DecodeRequest, migrated: worker_pb2.Migrated) -> None:
        """Ends a request whose sequence now runs elsewhere, and informs its reader where."""
        self._delivery.put(request, TokenDelta(request.stream_id, migrated=migrated))
        self._release(request)

    def num_tokens_left(self, sequence: Sequence) -> int:
        """Returns the most tokens that the sequence may still get."""
        return min(
            sequence.sampling.max_tokens - sequence.num_output_tokens, self._context_length - len(sequence.token_ids)
        )

    # Events of transfers (`TransferEvents`, and what the receiver reports).

    def on_slow(self, key: TransferKey) -> None:
        self._prefills.on_slow(key)

    def on_reserve(self, key: TransferKey) -> None:
        self._prefills.on_begun(key)
        self._transfers.on_reserve(key)

    def on_first_token(self, key: TransferKey, first: RemoteFirstToken) -> None:
        request, now_s = self._transfers.request_of(key), time.monotonic()
        if request is None:
            return
        self._prefills.on_computed(request, first, now_s)
        request.pull = first.pull
        request.hint_answers += first.hints
        if self._transfers.is_part(key):
            request.times.part = RemotePart(now_s, first.queue_s, first.prefill_s)
            request.cached_tokens = max(request.cached_tokens, first.cached_tokens)
            return
        if len(request.sequence.token_ids) != self._transfers.num_tokens(key):
            return  # an earlier attempt has already brought it
        request.times.on_remote_token(first.queue_s, first.prefill_s, now_s)
        request.cached_tokens = max(request.cached_tokens, first.cached_tokens)
        request.sequence.token_ids.append(first.token.token_id)
        self._on_token(request, first.token)

    def on_manifest(self, key: TransferKey, manifest: Manifest) -> None:
        self._after_progress(self._transfers.on_manifest(key, manifest))

    def on_arrival(self, key: TransferKey, first_index: int, num_pages: int) -> None:
        self._after_progress(self._transfers.on_arrival(key, first_index, num_pages))

    def _after_progress(self, outcome: LandedTransfer | FailedTransfer | None) -> None:
        """Lets the sequence join the next step if its last page is here and verified."""
        if isinstance(outcome, FailedTransfer):
            self._fall_back(outcome.key, outcome.request, outcome.error)
        elif outcome is not None:
            self._when_ready(outcome.request, partial(self._join, outcome))

    def _join(self, outcome: LandedTransfer) -> None:
        request = outcome.request
        request.pages_moved += outcome.num_pages
        self.scheduler.join(request.sequence, outcome.num_tokens)
        if request.migration is not None:
            migration, request.migration, request.transfer = request.migration, None, None
            migration.confirm()
        else:
            request.times.landed_s = time.monotonic()
            self._landed.add(request.sequence)
            self._prefills.on_landed(request, outcome.key, outcome.num_pages)

    def on_heartbeat(self, key: TransferKey) -> None:
        self._transfers.on_heartbeat(key)

    def sweep(self, now_s: float) -> float | None:
        """Ends waits for silent senders, even if there is nothing to compute. Returns when to sweep again."""
        for expired in self._transfers.sweep(now_s):
            self._fall_back(expired.key, expired.request, expired.error)
        return self._transfers.next_sweep_s

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> None:
        self._fall_back(key, self._transfers.on_closed(key, error), error)

    def on_lost(self, key: TransferKey, error: PenstockError) -> None:
        """Serves the request another way, because the call broke, the transport failed or pages never came."""
        self._fall_back(key, self._transfers.give_up(key), error)

    def on_quiesced(self, key: TransferKey) -> None:
        self._transfers.on_quiesced(key)

    def _fall_back(self, key: TransferKey, request: DecodeRequest | None, error: PenstockError | None) -> None:
        """Serves a request without its transfer: places a failed prefill again, and refuses a failed migration."""
        if request is None:
            return
        if request.migration is not None:
            self._refuse(request, error or Cancelled("its source gave up the migration"))
            return
        self._prefills.on_failed(request, key, error)

    # Steps. `StepDriver` computes what `begin_step` returns; any method above may run before the step has finished.

    def serve_during_step(self) -> None:
        """Reserves pages and sends what is ready while a step is in flight."""
        self._grant_reservations()
        self._delivery.flush()
        self._refresh_load()

    def begin_step(self) -> StepPlan:
        """Returns the next step, which is empty if there is nothing to compute."""
        self._grant_reservations()
        plan = self.scheduler.schedule(*self._limits())
        self._note_scheduled(plan, self.scheduler.preempted)
        self._delivery.flush()  # first tokens from prefill workers must not wait for this step
        if not plan:
            self._after_step()
        return plan

    def _grant_reservations(self) -> None:
        for failed in self._transfers.grant_reservations(self.scheduler):
            self._fall_back(failed.key, failed.request, failed.error)

    def begin_step_ahead(self) -> StepPlan | None:
        """Returns the step after the one in flight if it can already be scheduled."""
        plan = self.scheduler.schedule_ahead(*self._limits())
        if plan is not None:
            self._note_scheduled(plan)
        return plan

    def begin_prompt_step(self) -> StepPlan:
        """Returns the next step of the prompt stream, which has none in flight; it is empty if no prompt can begin or
        continue. `finish_step` ends it.
        """
        plan = self.scheduler.prompts.schedule()
        self._note_scheduled(plan, self.scheduler.prompts.preempted)
        return plan

    def fail_prompt_step(self, plan: StepPlan, error: PenstockError) -> None:
        """Ends a step of the prompt stream that failed as a whole, and the sequence that caused it if that is known."""
        for sequence in self.scheduler.prompts.fail(plan):
            self._fail(sequence, error)
        self._delivery.flush()
        self._after_step()

    def _limits(self) -> tuple[int | None, BulkLimits]:
        """Returns how many prompt tokens and how much of the bulk lane the next step may compute."""
        landed, now_s = [self._requests[sequence] for sequence in self._landed], time.monotonic()
        bulk = self.bulk.limits(self.scheduler.has_bulk, self.scheduler.num_running_others, now_s)
        return self._prefills.chunk_tokens(landed, now_s), bulk

    def _note_scheduled(self, plan: StepPlan, preempted: Collection[Sequence] = ()) -> None:
        for sequence in preempted:
            self._requests[sequence].times.on_preempted(time.monotonic())
        landed = self._landed & {item.sequence for item in plan} if self._landed else ()
        self._landed.difference_update(landed)
        for sequence in (*landed, *(chunk.sequence for chunk in plan.chunks)):
            self._requests[sequence].times.on_started(time.monotonic())

    def finish_step(self, plan: StepPlan, tokens: StepTokens, elapsed_s: float) -> None:
        """Records the oldest decode step in flight, or that of the prompt stream, and delivers its tokens."""
        began_s, num_further = time.monotonic(), sum(map(len, tokens.further.values()))
        if self.scheduler.has_bulk and not self.scheduler.num_running_others:
            self.bulk.on_step(elapsed_s, began_s)
        is_beside_prompts = self.scheduler.prompts.in_flight
        self._measurements.on_step(plan, elapsed_s, num_further, is_beside_prompts=is_beside_prompts)
        for sequence, error in tokens.failed:
            self._fail(sequence, error)
        discarded = self.scheduler.record(plan, tokens.rows, tokens.chunks)
        now_s = time.monotonic()
        for place, scores in tokens.scores.items():
            self._keep_scores(plan[place].sequence, scores, discarded)
        if plan.rows:
            self._deliver_rows(plan.rows, tokens, discarded, now_s)
        for place, (scheduled, token_id) in enumerate(zip(plan.chunks, tokens.chunks, strict=True), len(plan.rows)):
            if token_id is not None and scheduled.sequence not in discarded:
                further = tokens.further.get(place, [])
                self._measurements.on_verified(scheduled, len(further))
                self._on_sampled(scheduled.sequence, SampledToken(token_id, tokens.logprobs.get(place)), now_s)
                self._deliver_further(scheduled.sequence, further, now_s)
        self._delivery.flush()
        if tokens.hidden:
            self._measurements.on_hidden_states(plan, tokens.hidden, self._requests.keys() - discarded)
        self._after_step()
        # Delivery counts too, unless another step was computed meanwhile.
        finish_s = 0.0 if self.scheduler.num_in_flight else time.monotonic() - began_s
        self._measurements.on_finished(plan, elapsed_s + finish_s, num_further)

    def _deliver_further(self, sequence: Sequence, further: list[SampledToken], now_s: float) -> None:
        """Delivers the tokens that accepted proposals add after a sequence's first one, up to its end."""
        for token in further:
            if sequence not in self._requests:
                return
            self.scheduler.append_verified(sequence, token.token_id)
            self._on_sampled(sequence, token, now_s)

    def _deliver_rows(
        self, rows: DecodeRows, tokens: StepTokens, discarded: Collection[Sequence], now_s: float
    ) -> None:
        """Delivers plain tokens all at once, and tokens that may end a sequence or carry logprobs one by one."""
        is_special_R = special_rows(rows, tokens, discarded, self._engine.model.eos_token_ids)
        for row in self._delivery.put_rows(rows.items, tokens.rows, is_special_R):
            sequence = rows.items[row].sequence
            if sequence not in discarded:
                self._on_sampled(sequence, SampledToken(int(tokens.rows[row]), tokens.logprobs.get(row)), now_s)

    def recompute_step(self, plan: StepPlan) -> None:
        """Recomputes the failed step, the only one in flight, on this thread, each sequence by itself if necessary, and
        ends sequences that fail.
        """
        started_s = time.monotonic()
        work = [replace(item, proposed=()) for item in plan if item.sequence in self._requests]
        done = step_isolated(self._engine.step, work)
        self._measurements.on_recomputed(plan, time.monotonic() - started_s)
        for sequence, error in done.failed:
            self._fail(sequence, error)
        now_s = time.monotonic()
        for place, scores in done.output.scores.items():
            self._keep_scores(done.work[place].sequence, scores)
        for sequence, token in self.scheduler.commit(done.work, done.output):
            self._on_sampled(sequence, token, now_s)
        self._delivery.flush()
        self._after_step()

    def _keep_scores(self, sequence: Sequence, scores: PromptScores, discarded: Collection[Sequence] = ()) -> None:
        if (request := self._requests.get(sequence)) is not None and sequence not in discarded:
            request.add_scores(scores)

    def _fail(self, sequence: Sequence, error: PenstockError) -> None:
        if (request := self._requests.get(sequence)) is not None:
            self.cancel(request, error)

    def _after_step(self) -> None:
        self._events.after_step()
        self._refresh_load()

    # Tokens and ends.

    def _on_sampled(self, sequence: Sequence, token: SampledToken, now_s: float) -> None:
        """Delivers a token that this worker has sampled and appended."""
        request = self._requests[sequence]
        request.times.on_sampled(now_s)
        self._on_token(request, token)

    def _on_token(self, request: DecodeRequest, token: SampledToken) -> None:
        """Delivers a token that was just appended to the request's sequence, and ends the request if it is the last."""
        now_s = time.monotonic()
        request.end_pause(now_s)
        self.bulk.on_token(request.sequence, request.times.submitted_s, now_s)
        self._delivery.refresh(request)
        reason = finish_reason(request.sequence, self._engine.model.eos_token_ids, self._context_length)
        if reason is None:
            scores = request.take_prompt_logprobs()
            self._delivery.put(request, TokenDelta(request.stream_id, token, prompt_logprobs=scores))
            if request.sequence.matcher is not None:
                self._fast_forward(request)
            return
        self._end(request, token, reason)

    def _end(self, request: DecodeRequest, token: SampledToken | None, reason: FinishReason) -> None:
        """Delivers the request's last token, if there is one, with the answers to its hints, and releases it."""
        self._prefills.leave(request)
        request.follow_hints(self._hints, self.scheduler.num_cached_tokens(request.sequence))
        self._delivery.put_end(request, token, reason, self.timing(request))
        self._release(request)

    def _fast_forward(self, request: DecodeRequest) -> None:
        """Delivers the tokens that the request's grammar forces next. The next step computes their KV as one chunk."""
        sequence, ends = request.sequence, self._engine.model.eos_token_ids
        try:
            forced = forced_tokens(sequence)
        except PenstockError as error:
            self.cancel(request, error)
            return
        for token_id in forced:
            self.scheduler.extend(sequence, [token_id])
            reason = finish_reason(sequence, ends, self._context_length)
            if reason is not None:
                self._end(request, SampledToken(token_id), reason)
                return
            self._delivery.put(request, TokenDelta(request.stream_id, SampledToken(token_id)))

    def _release(self, request: DecodeRequest) -> None:
        del self._requests[request.sequence]
        self._landed.discard(request.sequence)
        self._delivery.remove(request)
        self._events.on_release(request)
        self._prefills.leave(request)
        self.scheduler.forget(request.sequence)
        self._readiness.release(request.sequence)

    def _report(self, request: DecodeRequest, outcome: worker_pb2.PrefillOutcome) -> None:
        self._delivery.put(request, TokenDelta(request.stream_id, prefill=outcome))

    def _refresh_load(self) -> None:
        cache, totals, num_open = self._engine.prefix_cache, self._delivery.totals, len(self._requests)
        load = measure_load(cache, self.scheduler, self._pace, self._readiness, totals, num_open)
        failed = {HANDOFF_MISMATCHES.name: float(self._transfers.num_mismatches)}
        self.load = replace(load, chunks=self._prefills.chunk_speed, metrics={**load.metrics, **failed})
