"""The prefill worker's core: turns jobs into pages and a first token. Runs on the step loop and knows no gRPC.

A job is queued, computed chunk by chunk, pushed page by page while the next chunk computes, and closed once its last
write is over. It owns its pages from its first chunk until it is closed; its `Closed` message promises the receiver
that the destination pages are not written again.

No prompt waits for another prompt's token, so on a GPU the next step starts before the tokens of the previous one are
known. A step's results count as computed as soon as it has started, because everything that reads the pages follows it
on the device; only freeing pages has to wait for its end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

from engine.adapters.queue import AdapterQueue
from engine.engine import Engine
from engine.sampling.grammar.queue import GrammarQueue
from engine.step.compute import SampledTokens
from engine.step.isolation import IsolatedOutput, step_isolated
from engine.step.sequence import SampledToken, ScheduledSequence, Sequence
from kv_transfer.endpoints import KvSender
from kv_transfer.session.lease import Lease, Sweeper, earliest, heartbeat_s
from kv_transfer.transports.transport import ALL_LAYERS, LayerGroup
from penstock.config import PrefillConfig, WorkerConfig
from penstock.errors import Cancelled, InvalidInput, PenstockError, TransferError
from penstock.scheduling.bulk_lane import BulkStepLimit
from penstock.types import Lane, PageId, StepTotals, TransferKey, WorkerLoad
from penstock.v1 import common_pb2
from prefill_worker.job import Closed, FirstToken, Heartbeat, PrefillJob, Pushed, ReservePages
from prefill_worker.layerwise_push import LayerwisePush, LayerwiseStep
from prefill_worker.scheduler import PrefillScheduler
from worker.hints.hint_follower import HintFollower
from worker.pull.prompts import PrefixPulls
from worker.sequence_message import check_token_ids

log = logging.getLogger(__name__)

_LEAST_BULK_TOKENS = 16  # in a step of bulk prompts, so that they progress
_RATE_SMOOTHING = 0.2  # weight of the newest step in the measured rate


@dataclass(frozen=True, slots=True, eq=False)
class _StepInFlight:
    work: list[ScheduledSequence]
    complete: list[Sequence]  # prompts whose first token the step samples
    tokens: SampledTokens
    started_s: float
    num_contexts: float  # sum of `ScheduledSequence.num_contexts`
    # Returned pages that the step may still read or write, and those whose windowed parts it may.
    parked: list[tuple[list[PageId], list[PageId]]] = field(default_factory=list)

    def computes(self, sequence: Sequence) -> bool:
        return any(item.sequence is sequence for item in self.work)


class PrefillWorker:
    """Owns the jobs. Every method runs on the step loop."""

    def __init__(
        self,
        engine: Engine,
        sender: KvSender,
        config: WorkerConfig,
        context_length: int,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarQueue | None = None,
        pulls: PrefixPulls | None = None,
        adapters: AdapterQueue | None = None,
        on_step: Callable[[int, int, float], None] | None = None,
        hints: HintFollower | None = None,
        run: Callable[[Callable[[], IsolatedOutput]], IsolatedOutput] = lambda compute: compute(),
    ) -> None:
        """`context_length` is the number of tokens that both the model and the pool can hold. Jobs with a grammar are
        refused without `grammars`, and jobs with an adapter without `adapters`; without `pulls` nothing is pulled from
        other workers. `on_step` is called with the sequences, tokens and seconds of each step. Without `hints` none is
        followed. `run` computes a step, by default on the step loop.
        """
        self._engine = engine
        self._run = run
        self._grammars = grammars
        self._adapters = adapters or AdapterQueue(None, lambda call: None)
        self._pulls = pulls
        self._hints = hints
        self._context_length = context_length
        self._sender = sender
        self._checksums = config.transfer.checksums
        self._lease_s = config.transfer.timeout_s
        self._clock = clock
        self._sweeper = Sweeper(heartbeat_s(self._lease_s))
        self._page_size = engine.layout.page_size
        self.scheduler = _make_scheduler(engine, config.prefill)
        self._jobs: dict[TransferKey, PrefillJob] = {}
        self._by_sequence: dict[Sequence, PrefillJob] = {}
        self._in_flight: _StepInFlight | None = None  # only used if the engine runs ahead
        self._measured_s = 0.0
        self._tokens_per_s = 0.0
        self._bulk_limit = BulkStepLimit()
        self._totals = StepTotals()
        self._on_step = on_step
        self.load = WorkerLoad(total_pages=engine.pool.num_pages, free_pages=engine.pool.num_reported)

    # Commands of the receiver.

    def submit(self, job: PrefillJob, offer: bytes) -> None:
        """Queues a prefill. A job that cannot be queued ends with a `Closed` that holds the error."""
        try:
            check_token_ids(job.sequence.token_ids, 0, self._context_length, self._engine.model.vocab_size)
            if job.sequence.sampling.grammar is not None and self._grammars is None:
                raise InvalidInput("sampling.grammar", "is not supported by this worker; leave it out")
            job.plan = self._sender.open(job.key, offer, job.sequence.lane)
        except PenstockError as error:
            job.emit(Closed(error))
            return
        job.lease = Lease(self._lease_s, self._clock())
        self._jobs[job.key] = job
        self._by_sequence[job.sequence] = job
        self._adapters.when_ready(job.sequence, partial(self._bring, job))

    def _bring(self, job: PrefillJob, error: PenstockError | None) -> None:
        """Continues with a job whose adapter is loaded, unless the job has ended; cancels it if loading failed."""
        if job.key not in self._jobs or job.error is not None:
            return
        if error is not None:
            self.cancel(job.key, error)
        elif self._pulls is None:
            self._prepare(job, None)
        else:
            self._pulls.recall(job.sequence)
            self._pulls.bring(job.sequence, job.prefix_source, partial(self._prepare, job))

    def _prepare(self, job: PrefillJob, pull: common_pb2.Pull | None) -> None:
        """Queues a job beside or after its pull, once its grammar is compiled, unless the job has ended."""
        job.pull = pull
        if job.key not in self._jobs or job.error is not None:
            return
        if self._grammars is None:
            self._add(job)
        else:
            self._grammars.when_ready(job.sequence, partial(self._queue, job))

    def _queue(self, job: PrefillJob, error: PenstockError | None) -> None:
        """Queues a job whose grammar is compiled, unless the job has ended; cancels it if compiling failed."""
        if job.key not in self._jobs or job.error is not None:
            return
        if error is None:
            self._add(job)
        else:
            self.cancel(job.key, error)

    def _add(self, job: PrefillJob) -> None:
        # A larger page of the receiver may begin before the window.
        num_extra = 0 if job.page_size == self._page_size else job.page_size
        window, num_pages = self._engine.prefix_cache.window.wider(num_extra), self._engine.pool.num_pages
        if (needed := window.max_pages(len(job.sequence.token_ids), 1)) > num_pages:
            problem = (
                f"need {needed} pages here for a receiver whose pages hold {job.page_size} tokens, and this worker has "
                f"{num_pages}; give both workers the same engine.page_size"
            )
            self.cancel(job.key, InvalidInput("token_ids", problem))
            return
        self.scheduler.add(job.sequence, num_extra)

    def set_destination(
        self, key: TransferKey, num_pages_held: int, pages: list[PageId], window_slots: Seq[int] = ()
    ) -> None:
        """Takes the pages that the prompt's go to, and the slots of the last ones' windowed parts."""
        job = self._jobs.get(key)
        if job is None or job.error is not None:
            return
        self.on_heartbeat(key)
        if not job.started_s:
            self.cancel(key, InvalidInput("destination", "came before it was requested; send it after `reserve`"))
            return
        if job.destination is not None or num_pages_held + len(pages) != job.num_pages:
            problem = f"{num_pages_held} + {len(pages)} pages; expected {job.num_pages}"
            self.cancel(key, InvalidInput("destination", problem))
            return
        if num_pages_held * job.page_size < job.sequence.num_dropped * self._page_size:
            problem = f"begins at page {num_pages_held}, which is behind the window and was released"
            self.cancel(key, InvalidInput("destination", problem))
            return
        if not self._places_parts(job, num_pages_held, pages, window_slots):
            problem = f"gives {len(window_slots)} window_slots for {len(pages)} pages; their parts are not all here"
            self.cancel(key, InvalidInput("destination", problem))
            return
        job.destination = pages
        job.num_pages_held = job.num_pages_pushed = num_pages_held
        self._push(job)

    def _places_parts(self, job: PrefillJob, num_pages_held: int, pages: Seq[PageId], window_slots: Seq[int]) -> bool:
        """Says where the windowed parts of the last pages go. Returns False if this worker does not have them."""
        if self._engine.pool.parts is None:
            return True
        num_pages = num_pages_held + len(pages)
        if not max(num_pages_held, job.sequence.num_stripped) <= num_pages - len(window_slots) < num_pages:
            return False
        self._sender.place(job.key, num_pages_held, pages, window_slots)
        return True

    def cancel(self, key: TransferKey, error: PenstockError | None = None) -> None:
        """Stops a job; its `Closed` follows once its writes have ended."""
        job = self._jobs.get(key)
        if job is None or job.error is not None:
            return
        job.error = error or Cancelled("the decode worker cancelled the prefill")
        self.scheduler.remove(job.sequence)
        if self._pulls is not None:
            self._pulls.leave(job.sequence)
        self._sender.abort(key)

    def on_heartbeat(self, key: TransferKey) -> None:
        """Renews the receiver's lease."""
        job = self._jobs.get(key)
        if job is not None and job.lease is not None:
            job.lease.renew(self._clock())

    def is_open(self, key: TransferKey) -> bool:
        """Returns whether the transfer may still write."""
        return key in self._jobs

    # Events of the sender.

    def on_sent(self, key: TransferKey) -> None:
        """Ends a job after its last write and frees its pages."""
        job = self._jobs.pop(key, None)
        if job is None:
            return
        del self._by_sequence[job.sequence]
        self._adapters.release(job.sequence)
        if self._in_flight is not None and self._in_flight.computes(job.sequence):
            self._in_flight.parked.append((job.sequence.held_pages, job.sequence.windowed_pages))
        else:
            self._engine.pool.release(job.sequence.held_pages, job.sequence.windowed_pages)
        job.emit(Closed(job.error))

    def on_failed(self, key: TransferKey, error: PenstockError) -> None:
        self.cancel(key, error)

    def sweep(self, now_s: float) -> float | None:
        """Sends heartbeats and cancels jobs whose receivers have fallen silent. Returns when to sweep again, or to
        compute bulk prompts again.
        """
        if self._sweeper.is_due(now_s, bool(self._jobs)):
            for job in [job for job in self._jobs.values() if job.error is None]:
                assert job.lease is not None
                if job.lease.is_over(now_s):
                    problem = f"its decode worker has been silent for {self._lease_s:g} s"
                    log.warning("%s: %s; the prefill is cancelled", job.sequence.request_id, problem)
                    self.cancel(job.key, TransferError(f"transfer {job.key.transfer_id}: {problem}"))
                else:
                    job.emit(Heartbeat())
            open_jobs = (job for job in self._jobs.values() if job.error is None)
            self._sweeper.looked(now_s, (job.lease.deadline_s for job in open_jobs if job.lease))
        return earliest(self._sweeper.next_s, self._bulk_limit.sweep(now_s))

    # The step.

    def step(self) -> bool:
        """Computes a step or, if the engine runs ahead, starts one and then waits for the previous one."""
        started_s = time.monotonic()
        work = self.scheduler.schedule(self._max_bulk_tokens(started_s))
        for scheduled in work:
            job = self._by_sequence[scheduled.sequence]
            if not job.started_s:
                self._begin(job, started_s)
            job.cached_tokens = scheduled.start - job.num_computed_tokens
            job.num_computed_tokens += scheduled.num_tokens
        previous, self._in_flight = self._in_flight, None
        if work:
            pushes = self._layerwise_pushes(work)
            if not self._engine.runs_ahead:
                self._compute(work, pushes, started_s)
            elif not self._start_step(work, pushes, started_s):
                self._compute(work, {}, started_s)
        if previous is not None:
            self._finish_step(previous)
        self._refresh_load()
        return bool(work) or previous is not None

    def _max_bulk_tokens(self, now_s: float) -> int | None:
        """Returns how many tokens of bulk prompts the next step may compute; None: any number."""
        limit = self._bulk_limit
        if self.scheduler.num_bulk and not limit.may_begin(now_s):
            return 0
        if limit.rests and self._in_flight is not None:
            return 0
        longest_s = limit.step_s(now_s)
        return None if longest_s is None else max(_LEAST_BULK_TOKENS, int(longest_s * self._tokens_per_s))

    def _start_step(
        self, work: list[ScheduledSequence], pushes: dict[PrefillJob, LayerwisePush], started_s: float
    ) -> bool:
        """Starts a step on the device. Returns False if it failed and must be recomputed."""
        num_contexts = sum(scheduled.num_contexts for scheduled in work)
        try:
            tokens = LayerwiseStep(self._engine.launch, len(self._engine.layout.layers), list(pushes.values()))(work)
        except PenstockError as error:
            log.warning("a step failed and is recomputed sequence by sequence: %s", error)
            return False
        complete = self.scheduler.commit(work)
        self._push_batch(work, pushes)
        self._in_flight = _StepInFlight(work, complete, tokens, started_s, num_contexts)
        self._in_flight.parked.append(self._dropped(work))
        return True

    def _finish_step(self, step: _StepInFlight) -> None:
        """Waits for a started step and delivers its tokens."""
        tokens = step.tokens.wait()
        now_s = time.monotonic()
        elapsed_s = now_s - max(step.started_s, self._measured_s)
        self._measure(step.work, step.num_contexts, elapsed_s, now_s)
        self._measured_s = now_s
        for sequence, error in tokens.failed:
            if (job := self._by_sequence.get(sequence)) is not None:
                self.cancel(job.key, error)
        places = {scheduled.sequence: place for place, scheduled in enumerate(step.work)}
        for sequence in step.complete:
            job, token_id = self._by_sequence.get(sequence), tokens.chunks[places[sequence]]
            if job is not None and job.error is None and token_id is not None:
                self._complete(job, SampledToken(token_id, tokens.logprobs.get(places[sequence])), now_s)
                self._push(job)
        for pages, windowed in step.parked:
            self._engine.pool.release(pages, windowed)

    def _compute(
        self, work: list[ScheduledSequence], pushes: dict[PrefillJob, LayerwisePush], started_s: float
    ) -> None:
        """Computes a step and waits for it."""
        num_contexts = sum(scheduled.num_contexts for scheduled in work)
        if pushes:
            num_layers = len(self._engine.layout.layers)
            done = step_isolated(LayerwiseStep(self._engine.step, num_layers, list(pushes.values())), work)
        else:
            done = self._run(lambda: step_isolated(self._engine.step, work))
        now_s = time.monotonic()
        self._measure(work, num_contexts, now_s - started_s, now_s)
        sampled = {item.sequence: token for item, token in zip(done.work, done.output.tokens, strict=True) if token}
        for sequence in self.scheduler.commit(done.work):
            self._complete(self._by_sequence[sequence], sampled[sequence], now_s)
        for sequence, error in done.failed:
            self.cancel(self._by_sequence[sequence].key, error)
        self._push_batch(done.work, pushes)
        self._engine.pool.release(*self._dropped(done.work))

    def _dropped(self, work: list[ScheduledSequence]) -> tuple[list[PageId], list[PageId]]:
        """Takes the pages and the windowed parts behind the window from the prompts of a committed step; the caller
        releases them.
        """
        sequences = [scheduled.sequence for scheduled in work]
        return self.scheduler.drop_behind(sequences), self.scheduler.strip_behind(sequences)

    def _layerwise_pushes(self, work: list[ScheduledSequence]) -> dict[PrefillJob, LayerwisePush]:
        """Returns a layer-wise push of the pages that this step completes for each job whose destination is known and
        whose transport gains from it.
        """
        pushes: dict[PrefillJob, LayerwisePush] = {}
        for scheduled in work:
            job = self._by_sequence[scheduled.sequence]
            if job.destination is None or job.error is not None:
                continue
            num_groups = self._sender.num_layer_groups(job.key)
            ready = job.num_ready(job.sequence.num_computed_tokens + scheduled.num_tokens)
            if num_groups > 1 and ready > job.num_pages_pushed:
                pushes[job] = LayerwisePush(partial(self._push_pages, job, ready), num_groups)
        return pushes

    def _begin(self, job: PrefillJob, now_s: float) -> None:
        """Requests the destination just before the first chunk, so that the answer arrives while the chunk computes."""
        job.started_s = now_s
        job.emit(ReservePages(job.num_pages))

    def _complete(self, job: PrefillJob, token: SampledToken, now_s: float) -> None:
        job.computed = True
        if self._pulls is not None:
            self._pulls.leave(job.sequence)  # completes the record of its pull
        queue_s, prefill_s = job.started_s - job.submitted_s, now_s - job.started_s
        if job.sequence.lane is not Lane.BULK:
            self._bulk_limit.on_first_token(queue_s + prefill_s, now_s)
        hints = tuple(self._hints.follow(job.sequence, job.cached_tokens)) if self._hints is not None else ()
        job.emit(FirstToken(token, queue_s, prefill_s, job.cached_tokens, job.pull, hints))

    def _push_batch(self, work: list[ScheduledSequence], pushes: dict[PrefillJob, LayerwisePush]) -> None:
        for scheduled in work:
            job = self._by_sequence[scheduled.sequence]
            self._push(job, (job in pushes and pushes[job].last_group()) or ALL_LAYERS)

    def _push(self, job: PrefillJob, group: LayerGroup = ALL_LAYERS) -> None:
        """Sends complete, unsent pages from layer group `group` on, and after the last page the manifest."""
        if job.destination is None or job.error is not None:
            return
        assert job.plan is not None
        sequence, size = job.sequence, job.page_size
        ready = job.num_ready(sequence.num_computed_tokens)
        first, held = job.num_pages_pushed, job.num_pages_held
        if ready > first:
            tokens = range(first * size, min(ready * size, len(sequence.token_ids)))
            if self._checksums:
                job.checksums += self._sender.sent_checksums(job.key, tokens, sequence.pages)
            self._push_pages(job, ready, group)
            job.num_pages_pushed = ready
        if job.computed:
            hashes = sequence.hashes_for(size, self._page_size)[held:]
            job.emit(Pushed(len(sequence.token_ids), tuple(hashes), len(job.destination), tuple(job.checksums)))
            self._sender.finish(job.key)

    def _push_pages(self, job: PrefillJob, ready: int, group: LayerGroup) -> None:
        assert job.destination is not None
        sequence, first, held, size = job.sequence, job.num_pages_pushed, job.num_pages_held, job.page_size
        tokens = range(first * size, min(ready * size, len(sequence.token_ids)))
        destination = job.destination[first - held : ready - held]
        self._sender.push_tokens(job.key, first - held, tokens, sequence.pages, destination, group)

    def _measure(self, work: list[ScheduledSequence], num_contexts: float, elapsed_s: float, now_s: float) -> None:
        """Learns from a step that has just ended."""
        num_tokens = sum(scheduled.num_tokens for scheduled in work)
        if all(scheduled.sequence.lane is Lane.BULK for scheduled in work):
            self._bulk_limit.on_step(elapsed_s, now_s)
        self._totals = self._totals.plus(num_tokens, num_contexts, elapsed_s)
        self.scheduler.step_ends.on_step(num_tokens, num_contexts, elapsed_s)
        rate = num_tokens / max(elapsed_s, 1e-6)
        self._tokens_per_s += (rate - self._tokens_per_s) * (_RATE_SMOOTHING if self._tokens_per_s else 1.0)
        if self._on_step is not None:
            self._on_step(len(work), num_tokens, elapsed_s)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences of all open jobs. May be read from any thread."""
        return tuple(self._by_sequence)

    def _refresh_load(self) -> None:
        self.load = WorkerLoad(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_queued,
            num_bulk=self.scheduler.num_bulk,
            free_pages=self._engine.pool.num_reported,
            total_pages=self._engine.pool.num_pages,
            queued_prefill_tokens=self.scheduler.num_uncomputed_tokens,
            queued_bulk_tokens=self.scheduler.num_uncomputed_bulk_tokens,
            prefill_tokens_per_s=self._tokens_per_s,
            cache=self._engine.prefix_cache.stats,
            prefill_steps=self._totals,
            num_open=len(self._jobs),
            adapters=self._adapters.ready,
            adapter_load_s=self._adapters.load_s,
        )


def _make_scheduler(engine: Engine, config: PrefillConfig) -> PrefillScheduler:
    return PrefillScheduler(
        engine.pool,
        engine.prefix_cache,
        engine.layout.page_size,
        config.max_batch_tokens or engine.saturating_tokens,
        config.max_batch_sequences,
        config.reserved,
        max_steps_ahead=int(engine.runs_ahead),
    )
