"""A decode worker in virtual time: the real scheduler, placement, page pool and prefix cache around a cost model.

Follows `decode_worker.worker`: it owns a request from submission to its last token, has its prompt computed remotely
or locally, and sends one frame a step to each router.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from decode_worker.prefill.placement_policy import (
    PrefillDecision,
    PrefillPlace,
    PrefillPlacement,
    PricedPlace,
    PromptDemand,
    RemoteOption,
)
from decode_worker.prefill.step_costs import StepWork
from decode_worker.schedule.pace import Pace
from decode_worker.schedule.scheduler import DecodeScheduler
from engine.cache.page_pool import PagePool
from engine.cache.prefix_cache import PrefixCache
from engine.step.row_table import RowTable
from engine.step.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput
from penstock.config import DecodeConfig
from penstock.errors import DeadlineExceeded, Overloaded, PenstockError
from penstock.kv.events import KvEventLog
from penstock.types import Role, WorkerId, WorkerLoad
from simulator.workers.prefill_model import PrefillModel
from simulator.workers.step_loop import VirtualStepLoop
from simulator.workers.transfers import PrefillOption, TransferModel, TransferOwner
from simulator.world.costs import DecodeCosts, LinkCosts
from simulator.world.network import Network, Node
from simulator.world.virtual_time import Timer

_SMOOTHING = 0.2
_RETRY_AFTER_S = 1.0
_STRIDED_LOCAL_TOKENS = 32  # chunks between strided steps would come too late


@dataclass(slots=True)
class Delta:
    """An update of one request for its router. `error` and `ended` are final."""

    stream: int
    token_ids: list[int]
    ended: bool = False
    error: PenstockError | None = None
    cached_tokens: int = 0
    computed_by: WorkerId | None = None
    transfer_s: float | None = None  # after the first token; None if no pages were transferred


@dataclass(slots=True, eq=False)
class Submission:
    """A request as a router submits it; `send` takes the deltas of one step."""

    stream: int
    sequence: Sequence
    candidates: deque[PrefillOption]
    sample: Callable[[int], int]  # returns the token at a position
    send: Callable[[list[Delta]], None]
    timeout_s: float
    caller: object  # the link that it arrived on: the request's lease
    has_first: bool = False
    cached_tokens: int = 0
    computed_by: WorkerId | None = None
    first_token_s: float = 0.0
    landed_s: float | None = None
    timer: Timer | None = None
    placed: PricedPlace | None = None
    placed_s: float = 0.0
    computed_s: float = 0.0  # when a prefill worker had computed the first part of a split prompt

    @property
    def is_split(self) -> bool:
        return self.placed is not None and self.placed.place is PrefillPlace.SPLIT

    @property
    def exposed_s(self) -> float:
        """Returns the part of the transfer that followed the prefill worker's computation."""
        computed_s = self.computed_s if self.is_split else self.first_token_s
        return max(0.0, self.landed_s - computed_s) if self.landed_s is not None else 0.0


def decode_config(config: DecodeConfig, stride: int) -> DecodeConfig:
    """Returns the configuration of a worker whose decode steps are simulated `stride` at a time."""
    if stride == 1:
        return config
    most = _STRIDED_LOCAL_TOKENS if config.max_local_tokens is None else config.max_local_tokens
    return config.model_copy(update={"max_local_tokens": min(_STRIDED_LOCAL_TOKENS, most)})


class DecodeModel(TransferOwner):
    """One decode worker."""

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
        """`stride` decode steps are simulated as one of that many times the length: faster and coarser. Where there
        are prefill workers, these then compute all but short prompts."""
        self.node = node
        self.worker_id = WorkerId(node.name)
        self.page_size = page_size
        self.events = KvEventLog()
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, page_size, self.events)
        self.scheduler = DecodeScheduler(self.pool, self.cache, page_size, config, RowTable(page_size))
        self.transfers = TransferModel(node, network, self.pool, self.scheduler, page_size, find_prefill, self)
        self.loop = VirtualStepLoop(node, self._begin_step, self._end_step)
        self.on_change: Callable[[], None] = lambda: None
        self.num_computed_tokens = 0  # of prompts
        self.num_output_tokens = 0
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
        self._policy = PrefillPlacement(decode_config(config, stride))

    @property
    def num_held(self) -> int:
        """Number of requests held."""
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

    # Calls of routers.

    def submit(self, submission: Submission) -> None:
        self.post(lambda: self._accept(submission))

    def cancel(self, submission: Submission, error: PenstockError | None = None) -> None:
        """Ends a request whose caller has left, or with `error` one that cannot continue."""
        self.post(lambda: self._cancel(submission, error))

    def on_caller_lost(self, caller: object) -> None:
        for submission in [held for held in self._submissions.values() if held.caller is caller]:
            self.cancel(submission)

    def post(self, call: Callable[[], None]) -> None:
        self.loop.post(call)

    def _accept(self, submission: Submission) -> None:
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

    # Placement of prompts.

    def _place(self, submission: Submission) -> None:
        now_s = self.node.sim.now_s
        placed = self._choose(submission, now_s).chosen
        submission.placed, submission.placed_s = placed, now_s
        if placed.option is None:
            submission.computed_by = self.worker_id
            self.scheduler.compute_here(submission.sequence)
            return
        candidate = next(one for one in submission.candidates if one.worker_id == placed.option.worker_id)
        submission.candidates.remove(candidate)
        submission.computed_by = candidate.worker_id
        self.transfers.begin(submission.sequence, candidate, placed.num_remote)

    def _choose(self, submission: Submission, now_s: float) -> PrefillDecision:
        sequence, scheduler = submission.sequence, self.scheduler
        demand = PromptDemand(
            num_tokens=len(sequence.token_ids),
            cached_tokens=scheduler.peek_cached_tokens(sequence),
            queued_tokens=scheduler.num_uncomputed_tokens,
            num_running=scheduler.num_running,
            step_tokens=max(1, self._config.max_batch_tokens - scheduler.num_running),
            page_size=self.page_size,
            token_bytes=self._link.token_bytes,
        )
        options = [
            RemoteOption(one.worker_id, one.queue_s, one.prefill_s, one.cached_tokens) for one in submission.candidates
        ]
        return self._policy.choose(demand, options, now_s)

    # `TransferOwner`

    def on_first_token(self, sequence: Sequence, cached_tokens: int) -> None:
        submission = self._submissions.get(sequence)
        if submission is None:
            return
        if submission.is_split:
            submission.computed_s, submission.cached_tokens = self.node.sim.now_s, cached_tokens
            return
        if not submission.has_first:  # a retried prefill returns the next token
            submission.cached_tokens = cached_tokens
        token = submission.sample(len(sequence.token_ids))
        sequence.token_ids.append(token)
        self._on_tokens(submission, [token])

    def on_landed(self, sequence: Sequence, num_tokens: int) -> None:
        self.scheduler.join(sequence, num_tokens)
        submission = self._submissions.get(sequence)
        if submission is not None:
            submission.landed_s = self.node.sim.now_s
            placed = submission.placed
            if placed is not None and placed.option is not None:
                num_bytes = (num_tokens - self.scheduler.num_cached_tokens(sequence)) * self._link.token_bytes
                self._policy.remote.on_landed(placed.option.worker_id, num_bytes, submission.exposed_s)

    def on_failed(self, sequence: Sequence, error: PenstockError | None) -> None:
        """Places the prompt again: a failed prefill costs only time."""
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
            SampledToken(self._submissions[item.sequence].sample(len(item.sequence.token_ids)))
            if item.is_sampled
            else None
            for item in work
        ]
        for sequence, token in self.scheduler.commit(work, StepOutput(tuple(tokens))):
            submission, token_ids = self._submissions[sequence], [token.token_id]
            if submission.has_first:
                self._sample_stride(submission, token_ids)
            self._on_tokens(submission, token_ids)
        self._flush()
        self.on_change()

    def _learn_step(self, work: Seq[ScheduledSequence]) -> None:
        chunks = [item for item in work if item.num_tokens > self._stride]
        chunk_tokens = sum(item.num_tokens for item in chunks)
        if self._policy.steps.skips(chunk_tokens):
            return
        pairs, num_rows = sum(item.num_contexts for item in chunks), len(work) - len(chunks)
        step_s = self._work_s if chunks else self._work_s / self._stride
        self._policy.steps.on_step(StepWork(chunk_tokens, pairs, num_rows, self._contexts - pairs), step_s)

    def _measure(self, work: Seq[ScheduledSequence]) -> None:
        self._learn_step(work)
        num_tokens = sum(item.num_tokens for item in work)
        if num_tokens > len(work) * self._stride:
            self.num_computed_tokens += sum(item.num_tokens for item in work if item.num_tokens > self._stride)
            self._pace.on_step(len(work), num_tokens, self._contexts, self._work_s)
        else:  # one of the steps simulated together stands for all
            contexts = sum(item.sequence.num_computed_tokens for item in work)
            self._pace.on_step(len(work), len(work), contexts, self._work_s / self._stride)

    def _on_tokens(self, submission: Submission, token_ids: list[int]) -> None:
        """Emits tokens, the first of which has just been appended to the sequence."""
        sequence = submission.sequence
        if not submission.has_first and submission.computed_by == self.worker_id:
            submission.cached_tokens = self.scheduler.num_cached_tokens(sequence)
        if not submission.has_first:
            submission.first_token_s = self.node.sim.now_s
        submission.has_first = True
        self.num_output_tokens += len(token_ids)
        delta = Delta(submission.stream, token_ids)
        if sequence.num_output_tokens >= sequence.sampling.max_tokens:
            delta.ended, delta.computed_by = True, submission.computed_by
            delta.cached_tokens = min(submission.cached_tokens, sequence.num_prompt_tokens)
            if submission.landed_s is not None:
                delta.transfer_s = submission.exposed_s
            self._release(submission)
        self._emit(submission, delta)

    def _sample_stride(self, submission: Submission, token_ids: list[int]) -> None:
        """Appends the tokens of the steps simulated together with this one; their KV follows with the next."""
        sequence = submission.sequence
        left = sequence.sampling.max_tokens - sequence.num_output_tokens
        first = len(sequence.token_ids)
        more = [submission.sample(position) for position in range(first, first + min(self._stride - 1, left))]
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
        """Sends one frame to each router."""
        outbox, self._outbox = self._outbox, {}
        for send, deltas in outbox.items():
            send(deltas)
