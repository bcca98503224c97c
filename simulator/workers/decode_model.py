"""Models a decode worker in virtual time: the real scheduler, placement, page pool and prefix cache with modelled
costs.

Follows `decode_worker.worker`: it owns a request from submission to its last token, has its prompt computed remotely
or locally, and sends one frame a step to each router.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from decode_worker.schedule.pace import Pace
from decode_worker.schedule.scheduler import DecodeScheduler
from engine.step.plan import DecodeRows, StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import Sequence
from penstock.config import DecodeConfig
from penstock.errors import DeadlineExceeded, Overloaded, PenstockError, Unavailable
from penstock.types import Role, StepTotals, TransferKey, WorkerId, WorkerLoad
from simulator.costs.machine import StepKind
from simulator.costs.step_costs import DecodeCosts, LinkCosts
from simulator.request import RequestTokens
from simulator.workers.host_memory import WorkerMemory
from simulator.workers.migrations import MigrationModel
from simulator.workers.prefill_model import ComputedPrompt
from simulator.workers.prompt_placement import PromptPlacement
from simulator.workers.step_loop import VirtualStepLoop
from simulator.workers.submission import Delta, MigratedTo, Submission
from simulator.workers.transfers import Sender, TransferModel, TransferOwner
from simulator.world.kv_links import KvLinks
from simulator.world.machine_model import MachineModel
from simulator.world.network import Network, Node, State

_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class _StepRun:
    """The steps in flight: one, or several that are simulated at once because nothing happens between them."""

    plan: StepPlan | None = None  # None once its first step is committed
    kind: StepKind = StepKind.DECODE
    steps_s: list[float] = field(default_factory=list)  # times of the steps that are not measured
    rows: DecodeRows | None = None  # None until the first step is committed, or if no more follow
    num_committed: int = 0
    num_measured: int = 0  # steps measured but not committed
    num_contexts: int = 0  # context of the first step that is not committed, if any is measured


class DecodeModel(TransferOwner):
    """A decode worker."""

    role = Role.DECODE

    def __init__(
        self,
        node: Node,
        network: Network,
        links: KvLinks,
        costs: DecodeCosts,
        link: LinkCosts,
        config: DecodeConfig,
        memory: WorkerMemory,
        machine: MachineModel,
        find_sender: Callable[[str], Sender | None],
        max_run: int = 1,
    ) -> None:
        """`max_run` is the most steps that are simulated at once if nothing happens between them.

        Above 1, routers receive a sequence's first token and its end; they receive the tokens between only before a
        fault.
        """
        self.node = node
        self.worker_id = WorkerId(node.name)
        self.page_size = page_size = memory.page_size
        self.events, self.host = memory.events, memory.host
        self.cache, self.pool = memory.cache, memory.pool
        self.scheduler = DecodeScheduler(self.pool, self.cache, page_size, config, RowTable(page_size))
        self.transfers = TransferModel(node, network, self.pool, self.scheduler, page_size, find_sender, self)
        self.migrations = MigrationModel(self, network, links)
        self.loop = VirtualStepLoop(
            node,
            self._begin_step,
            self._end_steps,
            lambda: self.before_change(),
            self._serve_during_step,
            machine.step_starter(lambda: self._run.kind),
        )
        self.on_change: Callable[[], None] = lambda: None
        self.before_change: Callable[[], None] = lambda: None
        self.num_computed_tokens = 0  # tokens of prompts computed here
        self.num_output_tokens = 0
        self._costs = costs
        self._machine = machine
        self._link = link
        self._config = config
        self._max_run = max_run
        self._submissions: dict[Sequence, Submission] = {}
        self._computed_here: set[Sequence] = set()  # prompts without a first token
        self._outbox: dict[Callable[[list[Delta]], None], list[Delta]] = {}
        self._run = _StepRun()
        self._pace = Pace()
        self._placement = PromptPlacement(
            self.scheduler, self.transfers, config, self._pace, page_size, link.token_bytes
        )
        if max_run > 1:
            network.before_fault.append(self._send_all)

    @property
    def num_held(self) -> int:
        """Number of requests held."""
        return len(self._submissions)

    @property
    def running(self) -> list[Submission]:
        """The requests that get a token in every step and have had their first."""
        submissions = self._submissions.values()
        return [each for each in submissions if each.has_first and self.scheduler.is_running(each.sequence)]

    def load(self) -> WorkerLoad:
        self.before_change()
        return self.load_at(self.node.sim.now_s)

    def totals_at(self, at_s: float) -> tuple[StepTotals, StepTotals]:
        """Returns the totals of steps that have ended by `at_s`. Of a run's steps, it commits only the first."""
        if num_ended := self.loop.catch_up(at_s):
            if self._run.plan is not None:
                self._commit(num_ended, goes_on=True)
            else:
                self._measure(num_ended)
        return self._pace.prefill_steps, self._pace.decode_steps

    def load_at(self, at_s: float) -> WorkerLoad:
        self.catch_up(at_s)
        return WorkerLoad(
            num_running=self.scheduler.num_running,
            num_waiting=len(self._submissions) - self.scheduler.num_running,
            free_pages=self.pool.num_available,
            total_pages=self.pool.num_pages,
            queued_prefill_tokens=self.scheduler.num_uncomputed_tokens,
            prefill_tokens_per_s=self._pace.chunk_tokens_per_s,
            step_s=self._pace.step_s,
            cache=self.cache.stats,
            prefill_steps=self._pace.prefill_steps,
            decode_steps=self._pace.decode_steps,
            chunks=self._placement.chunk_speed,
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

    def attach(self, ticket: TransferKey, submission: Submission) -> None:
        """Continues a sequence that has migrated here, for its router."""
        self.post(lambda: self._attach(ticket, submission))

    def _attach(self, ticket: TransferKey, submission: Submission) -> None:
        found = self.migrations.attach(ticket, len(submission.tokens))
        if found is None:
            gone = Unavailable(f"{self.worker_id} has no sequence for this ticket", _RETRY_AFTER_S)
            self._emit(submission, Delta(submission.stream, error=gone))
            return
        kept, deltas = found
        submission.sequence, submission.tokens, submission.num_sent = kept.sequence, kept.tokens, kept.num_sent
        submission.has_first, submission.computed_by = True, kept.computed_by
        submission.cached_tokens, submission.pull = kept.cached_tokens, kept.pull
        for delta in deltas:
            delta.stream = submission.stream
            self._emit(submission, delta)
        if self._submissions.get(kept.sequence) is kept:
            submission.timer, self._submissions[kept.sequence] = kept.timer, submission

    # `MigrationOwner`

    def holds(self, submission: Submission) -> bool:
        return self._submissions.get(submission.sequence) is submission

    def take(self, submission: Submission) -> bool:
        num_tokens = submission.sequence.num_prompt_tokens + submission.sequence.sampling.max_tokens
        if self._is_full or -(-num_tokens // self.page_size) > self.pool.num_pages:
            return False
        self._track(submission)
        return True

    def leave(self, submission: Submission, to: MigratedTo) -> None:
        first, submission.num_sent = submission.num_sent, len(submission.tokens)
        number, num_tokens = submission.tokens.request.number, submission.num_sent - first
        self.num_output_tokens += num_tokens
        self._emit(submission, Delta(submission.stream, number, first, num_tokens, migrated=to))
        self._release(submission)

    def drop(self, submission: Submission) -> None:
        self._release(submission)

    def is_open(self, key: TransferKey) -> bool:
        """Returns whether this worker may still write pages of a sequence that migrates from here."""
        return self.migrations.is_open(key)

    def cancel_transfer(self, key: TransferKey) -> None:
        self.migrations.cancel(key)

    def post(self, call: Callable[[], None]) -> None:
        self.loop.post(call)

    def _accept(self, submission: Submission) -> None:
        if self._is_full:
            held = len(self._submissions)
            refusal = Overloaded(f"{self.worker_id} holds {held} requests, its limit; try again", _RETRY_AFTER_S)
            self._emit(submission, Delta(submission.stream, error=refusal))
            return
        num_tokens = len(submission.sequence.token_ids) + submission.sequence.sampling.max_tokens
        if -(-num_tokens // self.page_size) > self.pool.num_pages:
            refusal = Overloaded(f"{num_tokens} tokens do not fit into {self.worker_id}'s pool", None)
            self._emit(submission, Delta(submission.stream, error=refusal))
            return
        self._track(submission)
        self._place(submission)

    @property
    def _is_full(self) -> bool:
        return len(self._submissions) >= self._config.max_batch_sequences + self._config.max_waiting

    def _track(self, submission: Submission) -> None:
        sequence = submission.sequence
        late = DeadlineExceeded(f"request {sequence.request_id} did not end within {submission.timeout_s} s")
        submission.timer = self.node.after(submission.timeout_s, lambda: self._end_late(sequence, late))
        self._submissions[sequence] = submission
        self.scheduler.track(sequence)

    def _end_late(self, sequence: Sequence, late: PenstockError) -> None:
        submission = self._submissions.get(sequence)
        if submission is not None:
            self.cancel(submission, late)

    def _cancel(self, submission: Submission, error: PenstockError | None) -> None:
        if not self.holds(submission):
            return
        if error is not None:
            self._emit(submission, Delta(submission.stream, error=error))
        self._release(submission)

    # Placement of prompts.

    def _place(self, submission: Submission) -> None:
        now_s = self.node.sim.now_s
        placed = self._placement.choose(submission, now_s).chosen
        submission.placed, submission.placed_s = placed, now_s
        if placed.option is None:
            submission.computed_by = self.worker_id
            self._computed_here.add(submission.sequence)
            self.scheduler.compute_here(submission.sequence)
            return
        candidate = next(each for each in submission.candidates if each.worker_id == placed.option.worker_id)
        submission.candidates.remove(candidate)
        submission.computed_by = candidate.worker_id
        self.transfers.begin(submission.sequence, candidate, placed.num_remote)

    # `TransferOwner`

    def on_first_token(self, sequence: Sequence, first: ComputedPrompt) -> None:
        submission, now_s = self._submissions.get(sequence), self.node.sim.now_s
        if submission is None:
            return
        self._placement.on_computed(submission, first, now_s)
        submission.pull = first.pull
        if submission.is_split:
            submission.computed_s, submission.cached_tokens = now_s, first.cached_tokens
            return
        if not submission.has_first:  # a retried prefill returns the next token
            submission.cached_tokens = first.cached_tokens
        submission.tokens.extend_by(1)
        self._on_tokens(submission)

    def on_landed(self, sequence: Sequence, num_tokens: int) -> None:
        self.scheduler.join(sequence, num_tokens)
        if self.migrations.on_joined(sequence):
            return
        submission = self._submissions.get(sequence)
        if submission is not None:
            submission.landed_s = self.node.sim.now_s
            num_bytes = (num_tokens - self.scheduler.num_cached_tokens(sequence)) * self._link.token_bytes
            self._placement.on_landed(submission, num_bytes)

    def on_failed(self, sequence: Sequence, error: PenstockError | None) -> None:
        """Places the prompt again: a failed prefill costs only time."""
        if self.migrations.on_transfer_failed(sequence, error):
            return
        submission = self._submissions.get(sequence)
        if submission is not None:
            self.scheduler.drop_pages(sequence)
            self._place(submission)

    # The step.

    def _begin_step(self) -> list[float]:
        self.transfers.grant_reservations()
        plan = self.scheduler.schedule(self._placement.chunk_tokens(self.node.sim.now_s))
        self._flush()
        self.on_change()
        if not plan:
            return []
        self._run.plan, now_s, ends_s = plan, self.node.sim.now_s, []
        self._run.kind = StepKind.CHUNK if plan.chunks else StepKind.DECODE
        num_steps, awaits_pages = 1, self.transfers.awaits_pages
        if not self._awaits_first_token(plan):
            num_steps = self.scheduler.num_steps_alike(plan, self._max_run, awaits_pages=awaits_pages)
        waiting_s = self.host.take_waiting_s() if self.host is not None else 0.0
        if num_steps == 1:
            slowness = self._machine.slowness(self.worker_id, self._run.kind, now_s)
            self._run.steps_s = [(self._costs.work_s(plan) + waiting_s) * slowness]
            return [now_s + self._run.steps_s[0]]
        costs, num_rows, contexts = self._costs, len(plan.rows), int(plan.rows.positions_R.sum())
        self._run.steps_s = costs.decode_each_s(num_rows, contexts, num_steps)
        self._run.steps_s[0] += waiting_s
        if not self._machine.is_steady:
            self._run.steps_s = self._machine.slowed(self.worker_id, StepKind.DECODE, now_s, self._run.steps_s)
        for step_s in self._run.steps_s:
            now_s += step_s
            ends_s.append(now_s)
        return ends_s

    def _awaits_first_token(self, plan: StepPlan) -> bool:
        """Returns whether a row is a prompt of which all but the last token was cached, so that its first token is
        due.
        """
        firsts = self._computed_here
        return bool(firsts) and any(item.sequence in firsts for item in plan.rows.items)

    def _serve_during_step(self, call: Callable[[], None]) -> None:
        """Takes a call while a step computes."""
        self.catch_up(self.node.sim.now_s)
        if self._run.rows is not None:  # several steps were begun at once, and those before the one in flight are over
            self._run.plan, self._run.rows = self.scheduler.schedule(0), None
        call()
        self.transfers.grant_reservations()
        self._flush()
        self.on_change()

    def catch_up(self, until_s: float) -> None:
        """Commits the steps that have ended by `until_s`."""
        self.totals_at(until_s)
        if self._run.num_measured:
            self._advance(goes_on=True)

    def _end_steps(self, num_ended: int) -> None:
        if self._machine.cores is not None:
            self._run.steps_s = [self.loop.elapsed_s]
        self._commit(num_ended, goes_on=False)
        self._run.steps_s = []
        self.migrations.advance_all()
        self._flush()
        self.on_change()

    def _commit(self, num_ended: int, goes_on: bool) -> None:
        """Commits the first steps of those in flight, of which only the last of a run can end a sequence."""
        plan, self._run.plan = self._run.plan, None
        if plan is None:  # its first step is committed
            self._measure(num_ended)
            self._advance(goes_on)
            return
        first_s = self._run.steps_s.pop(0)
        if plan.chunks:
            self.num_computed_tokens += sum(item.num_tokens for item in plan.chunks if item.num_tokens > 1)
        self._pace.on_step(len(plan), plan.num_tokens, plan.num_contexts, first_s)
        self._placement.on_step(plan, first_s)
        sampled = [item.sequence if item.is_sampled else None for item in plan.chunks]
        chunk_tokens = [None if sequence is None else 0 for sequence in sampled]
        rows = plan.rows
        discarded = self.scheduler.record(plan, np.zeros(len(rows), np.int64), chunk_tokens)
        if self._max_run == 1:
            got: Iterable[Sequence | None] = (*(item.sequence for item in rows.items), *sampled)
            self._on_step(sequence for sequence in got if sequence is not None and sequence not in discarded)
            return
        self._run.rows, self._run.num_committed = rows, 1
        if num_ended > 1 or goes_on:
            if num_ended > 1:
                self._measure(num_ended - 1)
            self._advance(goes_on, discarded)
        else:
            self._end_run(discarded)
        self._on_step(sequence for sequence in sampled if sequence is not None and sequence not in discarded)

    def _measure(self, num_steps: int) -> None:
        """Measures the next steps of a run, which `_advance` will commit."""
        assert self._run.rows is not None
        run, items = self._run, self._run.rows.items
        num_rows = len(items)
        if not run.num_measured:
            run.num_contexts = sum([len(item.sequence.token_ids) - 1 for item in items])
        num_contexts = run.num_contexts + num_rows * run.num_measured + num_rows / 2
        self._pace.on_decode_steps(num_rows, num_contexts, run.steps_s[:num_steps])
        self._placement.on_decode_steps(num_rows, num_contexts, run.steps_s[:num_steps])
        del run.steps_s[:num_steps]
        run.num_measured += num_steps

    def _advance(self, goes_on: bool, discarded: Collection[Sequence] = ()) -> None:
        """Commits the steps that are measured."""
        assert self._run.rows is not None
        num_steps, self._run.num_measured = self._run.num_measured, 0
        texts = [cast(RequestTokens, text) for text in self._run.rows.members.texts]

        def append(num_tokens: int) -> None:
            for text in texts:
                text.extend_by(num_tokens)

        self.scheduler.advance(num_steps, append, goes_on=goes_on)
        self._run.num_committed += num_steps
        if not goes_on:
            self._end_run(discarded)

    def _end_run(self, discarded: Collection[Sequence]) -> None:
        rows, self._run.rows = self._run.rows, None
        assert rows is not None
        self._end_rows(rows, self._run.num_committed, discarded)

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
        self.catch_up(self.node.sim.now_s)
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
            delta.pull = submission.pull
            if submission.landed_s is not None:
                delta.transfer_s = submission.exposed_s
            self._release(submission)
        self._emit(submission, delta)

    def _release(self, submission: Submission) -> None:
        del self._submissions[submission.sequence]
        self._computed_here.discard(submission.sequence)
        if submission.timer is not None:
            submission.timer.cancel()
        self.migrations.abandon(submission)
        self.transfers.abandon(submission.sequence)
        self.scheduler.forget(submission.sequence)

    def _emit(self, submission: Submission, delta: Delta) -> None:
        self._outbox.setdefault(submission.send, []).append(delta)

    def _flush(self) -> None:
        """Sends one frame to each router."""
        outbox, self._outbox = self._outbox, {}
        for send, deltas in outbox.items():
            send(deltas)
            if self._machine.cores is not None:
                self._machine.cores.handle_frame(len(deltas))
