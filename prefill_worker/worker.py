"""The prefill worker's core: jobs in, pages and a first token out. Runs on the step loop, knows no gRPC.

A job is queued, computed chunk by chunk, pushed page by page while the next chunk computes, and closed once nothing
of it can be written any more. It owns its pages from the first chunk until it is closed; the `closed` event is the
promise to the receiver that its destination pages are quiet.

What is said to the receiver counts in its pages, which may be of another size than ours: what is sent is a range of
tokens, from a plan that the sender makes of both layouts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from engine.engine import Engine
from engine.isolation import step_isolated
from engine.sequence import SampledToken, ScheduledSequence, Sequence
from engine.token_check import check_token_ids
from kv_transfer.group_sender import GroupSender
from kv_transfer.lease import Lease, Sweeper, heartbeat_s
from kv_transfer.transport import WHOLE, Part
from penstock.config import WorkerConfig
from penstock.errors import Cancelled, InvalidInput, PenstockError, TransferError
from penstock.page_hash import hash_pages
from penstock.types import PageHash, PageId, StepTotals, TransferKey, WorkerLoad
from prefill_worker.job import Closed, FirstToken, Heartbeat, PrefillJob, Pushed, ReservePages
from prefill_worker.layers_ahead import PushAhead, StepAhead, last_part
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.under_way import StepUnderWay

log = logging.getLogger(__name__)

_RATE_SMOOTHING = 0.2  # weight of the newest step in the measured rate


class PrefillWorker:
    """Owns the jobs. Every method runs on the step loop."""

    def __init__(
        self,
        engine: Engine,
        sender: GroupSender,
        config: WorkerConfig,
        context_length: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`context_length` is what both the model and the pool hold, in tokens."""
        self._engine = engine
        self._context_length = context_length
        self._sender = sender
        self._checksums = config.transfer.checksums
        self._lease_s = config.transfer.timeout_s
        self._clock = clock
        self._sweeper = Sweeper(heartbeat_s(self._lease_s))
        self._page_size = engine.layout.page_size
        max_batch_tokens = config.prefill.max_batch_tokens or engine.saturating_tokens
        self.scheduler = PrefillScheduler(
            engine.pool,
            engine.prefix_cache,
            self._page_size,
            max_batch_tokens,
            config.prefill.max_batch_sequences,
            config.prefill.reserved,
        )
        self._jobs: dict[TransferKey, PrefillJob] = {}
        self._by_sequence: dict[Sequence, PrefillJob] = {}
        self._under_way: StepUnderWay | None = None  # where the engine runs ahead
        self._measured_s = 0.0
        self._tokens_per_s = 0.0
        self._totals = StepTotals()
        self.load = WorkerLoad(total_pages=engine.pool.num_pages, free_pages=engine.pool.num_available)

    # What the service tells us.

    def submit(self, job: PrefillJob, offer: bytes) -> None:
        """Queues a prefill. Problems end it with a `Closed` that holds the error."""
        try:
            check_token_ids(job.sequence.token_ids, 0, self._context_length, self._engine.model.vocab_size)
            job.plan = self._sender.open(job.key, offer, job.sequence.lane)
        except PenstockError as error:
            job.emit(Closed(error))
            return
        job.lease = Lease(self._lease_s, self._clock())
        self._jobs[job.key] = job
        self._by_sequence[job.sequence] = job
        self.scheduler.add(job.sequence)

    def set_destination(self, key: TransferKey, num_pages_held: int, pages: list[PageId]) -> None:
        job = self._jobs.get(key)
        if job is None or job.error is not None:
            return
        self.on_heartbeat(key)
        if job.destination is not None or num_pages_held + len(pages) != job.num_pages:
            self.cancel(
                key, InvalidInput("destination", f"{num_pages_held} + {len(pages)} pages; expected {job.num_pages}")
            )
            return
        job.destination = pages
        job.num_pages_held = job.num_pages_pushed = num_pages_held
        self._push(job)

    def cancel(self, key: TransferKey, error: PenstockError | None = None) -> None:
        """Stops a job; its `Closed` follows once its writes are quiet."""
        job = self._jobs.get(key)
        if job is None or job.error is not None:
            return
        job.error = error or Cancelled("the decode worker cancelled the prefill")
        self.scheduler.remove(job.sequence)
        self._sender.abort(key)

    def on_heartbeat(self, key: TransferKey) -> None:
        """The receiver still wants it."""
        job = self._jobs.get(key)
        if job is not None and job.lease is not None:
            job.lease.renew(self._clock())

    def is_open(self, key: TransferKey) -> bool:
        """Whether anything of the transfer may still be written."""
        return key in self._jobs

    # What the sender tells us.

    def on_sent(self, key: TransferKey) -> None:
        """Every write is complete, or none will follow: the job ends and its pages go back."""
        job = self._jobs.pop(key, None)
        if job is None:
            return
        del self._by_sequence[job.sequence]
        if self._under_way is not None and self._under_way.computes(job.sequence):
            self._under_way.parked.append(job.sequence.pages)
        else:
            self._engine.pool.release(job.sequence.pages)
        job.emit(Closed(job.error))

    def on_send_failure(self, key: TransferKey, error: PenstockError) -> None:
        self.cancel(key, error)

    # Leases: looked after whether or not there is anything to compute.

    def sweep(self, now_s: float) -> float | None:
        """Gives heartbeats, and takes the pages back from receivers that have fallen silent; when to come again."""
        if self._sweeper.is_due(now_s, bool(self._jobs)):
            for job in [job for job in self._jobs.values() if job.error is None]:
                assert job.lease is not None
                if job.lease.is_over(now_s):
                    silent = f"its decode worker has been silent for {self._lease_s:g} s"
                    log.warning("%s: %s; the prefill is given up", job.sequence.request_id, silent)
                    self.cancel(job.key, TransferError(f"transfer {job.key.transfer_id}: {silent}"))
                else:
                    job.emit(Heartbeat())
            open_jobs = (job for job in self._jobs.values() if job.error is None)
            self._sweeper.looked(now_s, (job.lease.deadline_s for job in open_jobs if job.lease))
        return self._sweeper.next_s

    # The step.

    def step(self) -> bool:
        """Where the engine runs ahead, gives the device a step and then waits for the one before it."""
        work = self.scheduler.schedule()
        started_s = time.monotonic()
        for scheduled in work:
            job = self._by_sequence[scheduled.sequence]
            if not job.started_s:
                self._begin(job, started_s)
        before, self._under_way = self._under_way, None
        if work:
            ahead = self._find_ahead(work)
            if not self._engine.runs_ahead:
                self._compute(work, ahead, started_s)
            elif not self._give(work, ahead, started_s):
                self._compute(work, {}, started_s)
        if before is not None:
            self._end(before)
        self._refresh_load()
        return bool(work) or before is not None

    def _give(self, work: list[ScheduledSequence], ahead: dict[PrefillJob, PushAhead], started_s: float) -> bool:
        """False where it has failed, and must be computed again."""
        contexts = sum(scheduled.num_contexts for scheduled in work)
        try:
            tokens = StepAhead(self._engine.give, len(self._engine.layout.layers), list(ahead.values()))(work)
        except PenstockError as error:
            log.warning("a step failed, and is computed again sequence by sequence: %s", error)
            return False
        complete = self.scheduler.commit(work)
        for scheduled in work:
            job = self._by_sequence[scheduled.sequence]
            self._push(job, last_part(ahead.get(job)) or WHOLE)
        self._under_way = StepUnderWay(work, complete, tokens, started_s, contexts)
        return True

    def _end(self, step: StepUnderWay) -> None:
        """Waits for a step that was given."""
        tokens = step.tokens.wait()
        now_s = time.monotonic()
        num_tokens = sum(scheduled.num_tokens for scheduled in step.work)
        self._measure(num_tokens, step.contexts, now_s - max(step.started_s, self._measured_s))
        self._measured_s = now_s
        for sequence, error in tokens.failed:
            if (job := self._by_sequence.get(sequence)) is not None:
                self.cancel(job.key, error)
        places = {scheduled.sequence: place for place, scheduled in enumerate(step.work)}
        for sequence in step.complete:
            job, token_id = self._by_sequence.get(sequence), tokens.others[places[sequence]]
            if job is not None and job.error is None and token_id is not None:
                self._complete(job, SampledToken(token_id, tokens.logprobs.get(places[sequence])), now_s)
                self._push(job)
        for pages in step.parked:
            self._engine.pool.release(pages)

    def _compute(self, work: list[ScheduledSequence], ahead: dict[PrefillJob, PushAhead], started_s: float) -> None:
        """A whole step, waited for."""
        contexts = sum(scheduled.num_contexts for scheduled in work)
        if ahead:
            num_layers = len(self._engine.layout.layers)
            done = step_isolated(StepAhead(self._engine.step, num_layers, list(ahead.values())), work)
        else:
            done = step_isolated(self._engine.step, work)
        now_s = time.monotonic()
        self._measure(sum(scheduled.num_tokens for scheduled in work), contexts, now_s - started_s)
        drawn = {item.sequence: token for item, token in zip(done.work, done.output.tokens, strict=True) if token}
        for sequence in self.scheduler.commit(done.work):
            self._complete(self._by_sequence[sequence], drawn[sequence], now_s)
        for sequence, error in done.failed:
            self.cancel(self._by_sequence[sequence].key, error)
        for scheduled in done.work:
            job = self._by_sequence[scheduled.sequence]
            self._push(job, last_part(ahead.get(job)) or WHOLE)

    def _find_ahead(self, work: list[ScheduledSequence]) -> dict[PrefillJob, PushAhead]:
        """Of jobs whose place is known, on links that gain from it: how the pages that this step completes can go out
        before it ends."""
        found: dict[PrefillJob, PushAhead] = {}
        for scheduled in work:
            job = self._by_sequence[scheduled.sequence]
            if job.destination is None or job.error is not None:
                continue
            num_parts = self._sender.num_parts(job.key)
            ready = job.num_ready(job.sequence.num_computed_tokens + scheduled.num_tokens)
            if num_parts > 1 and ready > job.num_pages_pushed:
                found[job] = PushAhead(partial(self._push_pages, job, ready), num_parts)
        return found

    def _begin(self, job: PrefillJob, now_s: float) -> None:
        """The first chunk is about to compute: ask for the destination, which arrives meanwhile."""
        job.started_s = now_s
        job.cached_tokens = job.sequence.num_computed_tokens
        job.emit(ReservePages(job.num_pages))

    def _complete(self, job: PrefillJob, token: SampledToken, now_s: float) -> None:
        job.computed = True
        job.emit(FirstToken(token, job.started_s - job.submitted_s, now_s - job.started_s, job.cached_tokens))

    def _push(self, job: PrefillJob, part: Part = WHOLE) -> None:
        """Sends pages that are complete and not sent yet, from `part` of each on; after the last, the manifest."""
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
            self._push_pages(job, ready, part)
            job.num_pages_pushed = ready
        if job.computed:
            hashes = self._hashes(sequence, size)[held:]
            job.emit(Pushed(len(sequence.token_ids), tuple(hashes), len(job.destination), tuple(job.checksums)))
            self._sender.finish(job.key)

    def _push_pages(self, job: PrefillJob, ready: int, part: Part) -> None:
        assert job.destination is not None
        sequence, first, held, size = job.sequence, job.num_pages_pushed, job.num_pages_held, job.page_size
        tokens = range(first * size, min(ready * size, len(sequence.token_ids)))
        self._sender.push_tokens(
            job.key, first - held, tokens, sequence.pages, job.destination[first - held : ready - held], part
        )

    def _hashes(self, sequence: Sequence, page_size: int) -> list[PageHash]:
        if page_size == self._page_size:
            return sequence.hash_full_pages(page_size)
        return hash_pages(sequence.token_ids, page_size, sequence.salt)

    def _measure(self, num_tokens: int, contexts: float, elapsed_s: float) -> None:
        self._totals = self._totals.plus(num_tokens, contexts, elapsed_s)
        rate = num_tokens / max(elapsed_s, 1e-6)
        self._tokens_per_s += (rate - self._tokens_per_s) * (_RATE_SMOOTHING if self._tokens_per_s else 1.0)

    def _refresh_load(self) -> None:
        self.load = WorkerLoad(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_queued,
            free_pages=self._engine.pool.num_available,
            total_pages=self._engine.pool.num_pages,
            queued_prefill_tokens=self.scheduler.num_uncomputed_tokens,
            prefill_tokens_per_s=self._tokens_per_s,
            cache=self._engine.prefix_cache.stats,
            prefill_steps=self._totals,
            num_open=len(self._jobs),
        )
