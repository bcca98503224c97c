"""A decode worker in virtual time: the real scheduler, placement, page pool and prefix cache around a cost model.

Follows `decode_worker.worker`: it owns a request from submission to its last token, has its prompt computed elsewhere
or here, and sends one frame a step to each router.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from decode_worker.pace import Pace
from decode_worker.placement import PlacementCosts, prefill_here
from decode_worker.scheduler import DecodeScheduler
from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput
from penstock.config import DecodeConfig
from penstock.errors import DeadlineExceeded, Overloaded, PenstockError
from penstock.kv_events import KvEventLog
from penstock.types import Role, WorkerId, WorkerLoad
from simulator.costs import DecodeCosts, LinkCosts
from simulator.events import Timer
from simulator.network import Network, Node
from simulator.prefill_model import PrefillModel
from simulator.rows import PlainRows
from simulator.step_loop import StepLoop
from simulator.transfers import Candidate, Owner, Transfers

_SMOOTHING = 0.2
_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class Delta:
    """News of one request for its router. `error` and `ended` are final."""

    stream: int
    token_ids: list[int]
    ended: bool = False
    error: PenstockError | None = None
    cached_tokens: int = 0
    computed_by: WorkerId | None = None
    transfer_s: float | None = None  # after the first token; None where no pages came


@dataclass(slots=True, eq=False)
class Submission:
    """A request as a router sends it; `send` takes the deltas of one step."""

    stream: int
    sequence: Sequence
    candidates: deque[Candidate]
    draw: Callable[[int], int]  # the token at a position
    send: Callable[[list[Delta]], None]
    timeout_s: float
    caller: object  # the link that it came over: the request's lease
    has_first: bool = False
    cached_tokens: int = 0
    computed_by: WorkerId | None = None
    first_token_s: float = 0.0
    landed_s: float | None = None
    timer: Timer | None = None


class DecodeModel(Owner):
    role = Role.DECODE

    def __init__(
        self,
        node: Node,
        network: Network,
        costs: DecodeCosts,
        link: LinkCosts,
        config: DecodeConfig,
        page_size: int,
        num_pages: int,
        find_prefill: Callable[[str], PrefillModel | None],
        stride: int = 1,
    ) -> None:
        """`stride` decode steps are computed as one, of as many times the length: a quicker, coarser picture."""
        self.node = node
        self.worker_id = WorkerId(node.name)
        self.page_size = page_size
        self.events = KvEventLog()
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, page_size, self.events)
        self.scheduler = DecodeScheduler(self.pool, self.cache, page_size, config, PlainRows(page_size))
        self.transfers = Transfers(node, network, self.pool, self.scheduler, page_size, find_prefill, self)
        self.loop = StepLoop(node, self._begin_step, self._end_step)
        self.on_change: Callable[[], None] = lambda: None
        self.num_computed_tokens = 0  # of prompts
        self.num_drawn_tokens = 0
        self._costs = costs
        self._link = link
        self._config = config
        self._stride = stride
        self._submissions: dict[Sequence, Submission] = {}
        self._outbox: dict[Callable[[list[Delta]], None], list[Delta]] = {}
        self._work: Seq[ScheduledSequence] = ()
        self._work_s = 0.0
        self._contexts = 0.0
        self._pace = Pace()

    @property
    def num_held(self) -> int:
        """Requests."""
        return len(self._submissions)

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            num_running=self.scheduler.num_running,
            num_waiting=len(self._submissions) - self.scheduler.num_running,
            free_pages=self.pool.num_available,
            total_pages=self.pool.num_pages,
            queued_prefill_tokens=self.scheduler.num_uncomputed_tokens,
            prefill_tokens_per_s=self._pace.chunk_tokens_per_s,
            step_s=self._pace.step_s,
            prefill_steps=self._pace.prefill_steps,
            decode_steps=self._pace.decode_steps,
        )

    # What routers say.

    def submit(self, submission: Submission) -> None:
        self.post(lambda: self._take_on(submission))

    def cancel(self, submission: Submission, error: PenstockError | None = None) -> None:
        """Ends a request whose caller has gone, or with `error` one that cannot go on."""
        self.post(lambda: self._cancel(submission, error))

    def on_caller_lost(self, caller: object) -> None:
        for submission in [one for one in self._submissions.values() if one.caller is caller]:
            self.cancel(submission)

    def post(self, call: Callable[[], None]) -> None:
        self.loop.post(call)

    def _take_on(self, submission: Submission) -> None:
        limit = self._config.max_batch_sequences + self._config.max_waiting
        if len(self._submissions) >= limit:
            refusal = Overloaded(f"{self.worker_id} holds {limit} requests, its limit; try again", _RETRY_AFTER_S)
            self._emit(submission, Delta(submission.stream, [], error=refusal))
            return
        num_tokens = len(submission.sequence.token_ids) + submission.sequence.sampling.max_tokens
        if -(-num_tokens // self.page_size) > self.pool.num_pages:
            refusal = Overloaded(f"{num_tokens} tokens do not fit into {self.worker_id}'s pool", None)
            self._emit(submission, Delta(submission.stream, [], error=refusal))
            return
        late = DeadlineExceeded(f"request {submission.sequence.request_id} did not end within {submission.timeout_s} s")
        submission.timer = self.node.after(submission.timeout_s, lambda: self.cancel(submission, late))
        self._submissions[submission.sequence] = submission
        self.scheduler.track(submission.sequence)
        self._place(submission)

    def _cancel(self, submission: Submission, error: PenstockError | None) -> None:
        if submission.sequence not in self._submissions:
            return
        if error is not None:
            self._emit(submission, Delta(submission.stream, [], error=error))
        self._release(submission)

    # Where a prompt is computed.

    def _place(self, submission: Submission) -> None:
        if self._prefill_here(submission):
            submission.computed_by = self.worker_id
            self.scheduler.compute_here(submission.sequence)
            return
        candidate = submission.candidates.popleft()
        submission.computed_by = candidate.worker_id
        self.transfers.begin(submission.sequence, candidate)

    def _prefill_here(self, submission: Submission) -> bool:
        sequence = submission.sequence
        uncached = len(sequence.token_ids) - self.scheduler.peek_cached_tokens(sequence)
        best = submission.candidates[0] if submission.candidates else None
        costs = PlacementCosts(
            uncached_tokens=uncached,
            queued_tokens=self.scheduler.num_uncomputed_tokens,
            num_running=self.scheduler.num_running,
            tokens_per_s=self._pace.chunk_tokens_per_s,
            remote_queue_s=best.queue_s if best else 0.0,
            remote_prefill_s=best.prefill_s if best else 0.0,
            transfer_s=uncached * self._link.token_bytes / self._link.bytes_per_s,
        )
        return prefill_here(self._config.placement, self._config.max_local_tokens, best is not None, costs)

    # What transfers say.

    def on_first_token(self, sequence: Sequence, cached_tokens: int) -> None:
        submission = self._submissions.get(sequence)
        if submission is None:
            return
        if not submission.has_first:  # an attempt after one that failed only then brings the next token
            submission.cached_tokens = cached_tokens
        token = submission.draw(len(sequence.token_ids))
        sequence.token_ids.append(token)
        self._on_tokens(submission, [token])

    def on_landed(self, sequence: Sequence, num_tokens: int) -> None:
        self.scheduler.join(sequence, num_tokens)
        submission = self._submissions.get(sequence)
        if submission is not None:
            submission.landed_s = self.node.sim.now_s

    def on_failed(self, sequence: Sequence, error: PenstockError | None) -> None:
        """A prefill that failed costs the request time and nothing else."""
        submission = self._submissions.get(sequence)
        if submission is not None:
            self.scheduler.drop_pages(sequence)
            self._place(submission)

    # The step.

    def _begin_step(self) -> float | None:
        self.transfers.grant_reservations()
        self._work = self.scheduler.schedule()
        self._flush()
        self.on_change()
        if not self._work:
            return None
        self._work_s = self._costs.work_s(self._work, self._stride)
        self._contexts = sum(item.num_contexts for item in self._work)
        return self._work_s

    def _end_step(self) -> None:
        work, self._work = self._work, ()
        self._measure(work)
        tokens = [
            SampledToken(self._submissions[item.sequence].draw(len(item.sequence.token_ids))) if item.draws else None
            for item in work
        ]
        for sequence, token in self.scheduler.commit(work, StepOutput(tuple(tokens))):
            submission, token_ids = self._submissions[sequence], [token.token_id]
            if submission.has_first:
                self._draw_more(submission, token_ids)
            self._on_tokens(submission, token_ids)
        self._flush()
        self.on_change()

    def _measure(self, work: Seq[ScheduledSequence]) -> None:
        num_tokens = sum(item.num_tokens for item in work)
        if num_tokens > len(work) * self._stride:
            self.num_computed_tokens += sum(item.num_tokens for item in work if item.num_tokens > self._stride)
            self._pace.on_step(len(work), num_tokens, self._contexts, self._work_s)
        else:  # one of the steps that were computed together stands for all
            contexts = sum(item.sequence.num_computed_tokens for item in work)
            self._pace.on_step(len(work), len(work), contexts, self._work_s / self._stride)

    def _on_tokens(self, submission: Submission, token_ids: list[int]) -> None:
        """The first of them has just been appended to the sequence."""
        sequence = submission.sequence
        if not submission.has_first and submission.computed_by == self.worker_id:
            submission.cached_tokens = self.scheduler.num_cached_tokens(sequence)
        if not submission.has_first:
            submission.first_token_s = self.node.sim.now_s
        submission.has_first = True
        self.num_drawn_tokens += len(token_ids)
        delta = Delta(submission.stream, token_ids)
        if sequence.num_output_tokens >= sequence.sampling.max_tokens:
            delta.ended, delta.computed_by = True, submission.computed_by
            delta.cached_tokens = min(submission.cached_tokens, sequence.num_prompt_tokens)
            if submission.landed_s is not None:
                delta.transfer_s = max(0.0, submission.landed_s - submission.first_token_s)
            self._release(submission)
        self._emit(submission, delta)

    def _draw_more(self, submission: Submission, token_ids: list[int]) -> None:
        """The tokens of the steps that were computed together with this one; their KV follows with the next."""
        sequence = submission.sequence
        left = sequence.sampling.max_tokens - sequence.num_output_tokens
        first = len(sequence.token_ids)
        more = [submission.draw(position) for position in range(first, first + min(self._stride - 1, left))]
        token_ids += more
        self.scheduler.extend(sequence, more)

    def _release(self, submission: Submission) -> None:
        del self._submissions[submission.sequence]
        if submission.timer is not None:
            submission.timer.cancel()
        self.transfers.abandon(submission.sequence)
        self.scheduler.forget(submission.sequence)

    def _emit(self, submission: Submission, delta: Delta) -> None:
        self._outbox.setdefault(submission.send, []).append(delta)

    def _flush(self) -> None:
        """One frame for each router."""
        outbox, self._outbox = self._outbox, {}
        for send, deltas in outbox.items():
            send(deltas)
