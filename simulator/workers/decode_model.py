"""A decode worker in virtual time: the real scheduler, placement, page pool and prefix cache around a cost model.

Follows `decode_worker.worker`: it owns a request from submission to its last token, has its prompt computed remotely
or locally, and sends one frame a step to each router.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import cast

import numpy as np

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
from engine.cache.prefix_cache import PrefixCache
from engine.step.plan import DecodeRows, StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import DecodeConfig
from penstock.errors import DeadlineExceeded, Overloaded, PenstockError
from penstock.kv.events import KvEventLog
from penstock.types import Role, WorkerId, WorkerLoad
from simulator.costs.step_costs import DecodeCosts, LinkCosts
from simulator.request import RequestTokens
from simulator.workers.prefill_model import PrefillModel
from simulator.workers.step_loop import VirtualStepLoop
from simulator.workers.transfers import PrefillOption, TransferModel, TransferOwner
from simulator.world.network import Network, Node, State
from simulator.world.virtual_time import Timer

_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class Delta:
    """An update of one request for its router. `error` and `ended` are final.

    Its tokens are identified by the request that they were computed for and the first one's position.
    """

    stream: int
    number: int = 0  # of the request
    position: int = 0
    num_tokens: int = 0
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
    tokens: RequestTokens  # the sequence's
    candidates: deque[PrefillOption]
    send: Callable[[list[Delta]], None]
    timeout_s: float
    caller: object  # the link that it arrived on: the request's lease
    has_first: bool = False
    num_sent: int = 0  # tokens, prompt included
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


class DecodeModel(TransferOwner):
    """A decode worker."""

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
        max_run: int = 1,
    ) -> None:
        """`max_run` is how many steps are simulated at once where nothing happens between them.

        Above 1, routers receive a sequence's first token and its end; they receive the tokens between only before a
        fault.
        """
        self.node = node
        self.worker_id = WorkerId(node.name)
        self.page_size = page_size
        self.events = KvEventLog()
        self.cache = PrefixCache(num_pages, page_size, self.events)
        self.pool = self.cache.pool
        self.scheduler = DecodeScheduler(self.pool, self.cache, page_size, config, RowTable(page_size))
        self.transfers = TransferModel(node, network, self.pool, self.scheduler, page_size, find_prefill, self)
        self.loop = VirtualStepLoop(node, self._begin_step, self._end_steps)
        self.on_change: Callable[[], None] = lambda: None
        self.num_computed_tokens = 0  # of prompts
        self.num_output_tokens = 0
        self._costs = costs
        self._link = link
        self._config = config
        self._max_run = max_run
        self._submissions: dict[Sequence, Submission] = {}
        self._computed_here: set[Sequence] = set()  # prompts without a first token
        self._outbox: dict[Callable[[list[Delta]], None], list[Delta]] = {}
        self._plan: StepPlan | None = None  # in flight, until it is committed
        self._steps_s: list[float] = []  # of the run in flight; only those that are not committed
        self._run_rows: DecodeRows | None = None  # of a run whose first steps are committed
        self._num_run = 0  # how many of its steps are committed
        self._pace = Pace()
        self._policy = PrefillPlacement(config)
        if max_run > 1:
            network.before_fault.append(self._send_all)

    @property
    def num_held(self) -> int:
        """Number of requests held."""
        return len(self._submissions)

    def load(self) -> WorkerLoad:
        self.catch_up()
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
            self._emit(submission, Delta(submission.stream, error=refusal))
            return
        num_tokens = len(submission.sequence.token_ids) + submission.sequence.sampling.max_tokens
        if -(-num_tokens // self.page_size) > self.pool.num_pages:
            refusal = Overloaded(f"{num_tokens} tokens do not fit into {self.worker_id}'s pool", None)
            self._emit(submission, Delta(submission.stream, error=refusal))
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
            self._emit(submission, Delta(submission.stream, error=error))
        self._release(submission)

    # Placement of prompts.

    def _place(self, submission: Submission) -> None:
        now_s = self.node.sim.now_s
        placed = self._choose(submission, now_s).chosen
        submission.placed, submission.placed_s = placed, now_s
        if placed.option is None:
            submission.computed_by = self.worker_id
            self._computed_here.add(submission.sequence)
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
        submission.tokens.extend_by(1)
        self._on_tokens(submission)

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

    def _begin_step(self) -> list[float]:
        self.transfers.grant_reservations()
        plan = self.scheduler.schedule()
        self._flush()
        self.on_change()
        if not plan:
            return []
        self._plan, now_s, ends_s = plan, self.node.sim.now_s, []
        num_steps = 1 if self._awaits_first_token(plan) else self.scheduler.num_steps_alike(plan, self._max_run)
        if num_steps == 1:
            self._steps_s = [self._costs.work_s(plan)]
            return [now_s + self._steps_s[0]]
        costs, num_rows, contexts = self._costs, len(plan.rows), int(plan.rows.positions_R.sum())
        self._steps_s = costs.decode_each_s(num_rows, contexts, num_steps)
        for step_s in self._steps_s:
            now_s += step_s
            ends_s.append(now_s)
        return ends_s

    def _awaits_first_token(self, plan: StepPlan) -> bool:
        """Returns whether a row is a prompt whose tokens but the last were cached, so that its first token is due."""
        firsts = self._computed_here
        return bool(firsts) and any(item.sequence in firsts for item in plan.rows.items)

    def catch_up(self) -> None:
        """Commits the steps that have ended by now."""
        if num_ended := self.loop.catch_up():
            self._commit(num_ended, goes_on=True)

    def _end_steps(self, num_ended: int) -> None:
        self._commit(num_ended, goes_on=False)
        self._steps_s = []
        self._flush()
        self.on_change()

    def _learn_step(self, plan: StepPlan, step_s: float) -> None:
        num_rows = len(plan.rows)
        chunk_tokens = plan.num_tokens - num_rows
        if self._policy.steps.skips(chunk_tokens):
            return
        pairs = sum(item.num_contexts for item in plan.chunks)
        self._policy.steps.on_step(StepWork(chunk_tokens, pairs, num_rows, plan.rows.num_contexts), step_s)

    def _commit(self, num_ended: int, goes_on: bool) -> None:
        """Commits the first steps of those in flight, of which only the last of a run can end a sequence."""
        steps_s, self._steps_s = self._steps_s[:num_ended], self._steps_s[num_ended:]
        plan, self._plan = self._plan, None
        if plan is None:  # its first step is committed
            self._advance(num_ended, goes_on, steps_s)
            return
        if plan.chunks:
            self.num_computed_tokens += sum(item.num_tokens for item in plan.chunks if item.num_tokens > 1)
        self._pace.on_step(len(plan), plan.num_tokens, plan.num_contexts, steps_s[0])
        self._learn_step(plan, steps_s[0])
        sampled = [item.sequence if item.is_sampled else None for item in plan.chunks]
        chunk_tokens = [None if sequence is None else 0 for sequence in sampled]
        rows = plan.rows
        discarded = self.scheduler.record(plan, np.zeros(len(rows), np.int64), chunk_tokens)
        if self._max_run == 1:
            got: Iterable[Sequence | None] = (*(item.sequence for item in rows.items), *sampled)
            self._on_step(sequence for sequence in got if sequence is not None and sequence not in discarded)
            return
        if num_ended > 1 or goes_on:
            self._advance(num_ended - 1, goes_on, steps_s[1:], rows.items)
        if not goes_on:
            self._end_rows(rows, num_ended, discarded)
        self._on_step(sequence for sequence in sampled if sequence is not None and sequence not in discarded)
        self._run_rows = rows if goes_on else None
        self._num_run = num_ended

    def _advance(
        self,
        num_steps: int,
        goes_on: bool,
        steps_s: Seq[float],
        items: Seq[ScheduledSequence] | None = None,
    ) -> None:
        """Commits further steps of a run."""
        rows = self._run_rows
        if items is None:
            assert rows is not None
            items = rows.items
        contexts = sum(len(item.sequence.token_ids) - 1 for item in items) + len(items) / 2
        self._pace.on_decode_steps(len(items), contexts, steps_s)
        for item in items:
            cast(RequestTokens, item.sequence.token_ids).extend_by(num_steps)
        self.scheduler.advance(num_steps, goes_on=goes_on)
        if rows is not None:
            self._num_run += num_steps
            if not goes_on:
                self._run_rows = None
                self._end_rows(rows, self._num_run, ())

    def _end_rows(self, rows: DecodeRows, num_steps: int, discarded: Collection[Sequence]) -> None:
        """Emits the tokens of rows that end with the last of the run's steps, and first tokens."""
        ended = (rows.positions_R + (num_steps - 1) >= rows.members.last_R).nonzero()[0].tolist()
        items = rows.items
        sequences = [items[row].sequence for row in ended]
        if firsts := self._computed_here:
            sequences = [item.sequence for item in items if item.sequence in firsts or item.sequence in sequences]
        self._on_step(sequence for sequence in sequences if sequence not in discarded)

    def _on_step(self, sequences: Iterable[Sequence]) -> None:
        for sequence in list(sequences):
            self._on_tokens(self._submissions[sequence])

    def _send_all(self) -> None:
        """Sends every token that routers have not received, because a fault is about to happen."""
        if self.node.state is not State.ALIVE:
            return
        self.catch_up()
        self.loop.cut()
        for submission in list(self._submissions.values()):
            if submission.has_first and submission.num_sent < len(submission.tokens):
                self._on_tokens(submission)
        self._flush()

    def _on_tokens(self, submission: Submission) -> None:
        """Emits the tokens that the request's router has not received."""
        sequence = submission.sequence
        if not submission.has_first and submission.computed_by == self.worker_id:
            submission.cached_tokens = self.scheduler.num_cached_tokens(sequence)
        if not submission.has_first:
            submission.first_token_s = self.node.sim.now_s
            self._computed_here.discard(sequence)
        submission.has_first = True
        first, submission.num_sent = submission.num_sent, len(submission.tokens)
        delta = Delta(submission.stream, submission.tokens.request.number, first, submission.num_sent - first)
        self.num_output_tokens += delta.num_tokens
        if sequence.num_output_tokens >= sequence.sampling.max_tokens:
            delta.ended, delta.computed_by = True, submission.computed_by
            delta.cached_tokens = min(submission.cached_tokens, sequence.num_prompt_tokens)
            if submission.landed_s is not None:
                delta.transfer_s = submission.exposed_s
            self._release(submission)
        self._emit(submission, delta)

    def _release(self, submission: Submission) -> None:
        del self._submissions[submission.sequence]
        self._computed_here.discard(submission.sequence)
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
