"""Simulates a decode worker with arithmetic over its steps: no pages, no tokens, and one event per change of the batch.

The costs are those of the detailed worker (`simulator.costs.step_costs`); steps between two changes are summed in
closed form.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.lifecycle.migrate.migration_policy import MigratableSequence
from penstock.config import DecodeConfig
from penstock.types import RequestId, Role, StepTotals, WorkerId, WorkerLoad
from simulator.costs.step_costs import DecodeCosts
from simulator.request import Outcome
from simulator.world.virtual_time import Simulation, Timer

_ALMOST = 1e-6  # share of a step that counts as none


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through both workers."""

    outcome: Outcome
    target: CoarseDecode | None = None
    rank: float = 0.0
    begun: bool = False
    num_computed: int = 0
    context: int = 0  # tokens when it joined the batch last
    has_pages: bool = False
    is_computed: bool = False
    stopped: bool = False  # preempted: its KV will be recomputed
    joined_at: float = 0.0  # in steps of the worker
    num_generated: float = 0.0

    @property
    def num_input(self) -> int:
        return self.outcome.request.num_input_tokens

    @property
    def left(self) -> float:
        return self.outcome.request.num_output_tokens - 1 - self.num_generated


class CoarseDecode:
    """Runs a batch whose steps grow with its context; grants pages in order, and preempts if they run out."""

    role = Role.DECODE

    def __init__(
        self, sim: Simulation, name: str, costs: DecodeCosts, config: DecodeConfig, page_size: int, num_pages: int
    ) -> None:
        self.worker_id = WorkerId(name)
        self.on_end: Callable[[Job], None] = lambda job: None
        self._sim = sim
        self._costs = costs
        self._config = config
        self._page_size = page_size
        self._pages = num_pages
        self._held: set[Job] = set()
        self._waiting: deque[Job] = deque()  # for pages
        self._running: dict[Job, None] = {}  # in the order of arrival
        self._ends: list[tuple[float, int, Job]] = []
        self._number = 0
        self._steps = 0.0
        self._context = 0.0  # tokens of all running jobs
        self._reserved = 0.0  # pages of jobs that have them and do not run yet
        self._stall_s = 0.0  # time left for recomputing KV
        self._totals = (0.0, 0.0, 0.0, 0.0)  # steps, tokens, contexts, seconds
        self._since_s = 0.0
        self._timer: Timer | None = None

    @property
    def num_open(self) -> int:
        return len(self._held)

    def price(self, num_tokens: int) -> tuple[bool, float]:
        """Returns whether another request would wait for pages, and how long steps would be with it."""
        self._advance()
        tokens = sum(job.num_input for job in self._held if job not in self._running) + self._context + num_tokens
        step_s = self._costs.step_s + (len(self._held) + 1) * self._costs.sequence_s + tokens * self._costs.kv_token_s
        room = (1 - self._config.watermark) * self._pages * self._page_size
        return tokens > room or len(self._held) >= self._config.max_batch_sequences, step_s

    def load(self) -> WorkerLoad:
        self._advance()
        steps, tokens, contexts, seconds = self._totals
        return WorkerLoad(
            num_running=len(self._running),
            num_waiting=len(self._held) - len(self._running),
            free_pages=max(0, int(self._pages - self._used())),
            total_pages=self._pages,
            step_s=self._step_s() if self._running else 0.0,
            decode_steps=StepTotals(int(steps), int(tokens), contexts, seconds),
        )

    def expect(self, job: Job) -> None:
        """Accepts a job whose prompt a prefill worker will compute."""
        self._held.add(job)

    def reserve(self, job: Job) -> None:
        """Queues the job for pages: its first chunk is about to be computed."""
        self._waiting.append(job)
        self._change()

    def join(self, job: Job) -> None:
        """Marks the job's prompt as computed."""
        job.is_computed, job.context = True, job.num_input
        if job.left <= 0:
            self._forget(job)
        self._change()

    def movable(self) -> list[tuple[Job, MigratableSequence]]:
        """Returns the running jobs as a worker reports them for migration."""
        self._advance()
        found = []
        for index, job in enumerate(self._running):
            generated = job.num_generated + self._steps - job.joined_at
            left = job.outcome.request.num_output_tokens - 1 - generated
            found.append((job, MigratableSequence(RequestId(str(index)), int(job.num_input + generated), int(left))))
        return found

    def migrate(self, job: Job, target: CoarseDecode) -> None:
        """Migrates a running sequence with its KV to another worker, without the pause for its last pages."""
        self._advance()
        generated = job.num_generated + self._steps - job.joined_at
        self._leave(job)
        job.num_generated = generated
        self._held.discard(job)
        self._change()
        job.target = target
        target.expect(job)
        target.reserve(job)

    def _forget(self, job: Job) -> None:
        self._held.discard(job)
        if job.has_pages and job not in self._running:
            self._reserved -= self._need(job)
        if job in self._waiting:
            self._waiting.remove(job)
        self.on_end(job)

    def _need(self, job: Job) -> float:
        return math.ceil((job.num_input + job.num_generated) / self._page_size)

    def _used(self) -> float:
        return self._reserved + self._context / self._page_size + len(self._running) / 2

    def _step_s(self) -> float:
        costs = self._costs
        return costs.step_s + len(self._running) * costs.sequence_s + self._context * costs.kv_token_s

    def _advance(self) -> None:
        """Accounts for the steps since the last call, in which each sequence's context grew by a token per step."""
        now_s = self._sim.now_s
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        lost_s = min(self._stall_s, elapsed_s)
        self._stall_s -= lost_s
        elapsed_s -= lost_s
        batch = len(self._running)
        if not batch or elapsed_s <= 0:
            return
        first_s, grow_s = self._step_s(), self._costs.kv_token_s * batch
        num_steps = (math.sqrt(first_s * first_s + 2 * grow_s * elapsed_s) - first_s) / grow_s
        contexts = num_steps * self._context + batch * num_steps * num_steps / 2
        steps, tokens, before, seconds = self._totals
        self._totals = (steps + num_steps, tokens + num_steps * batch, before + contexts, seconds + elapsed_s)
        self._steps += num_steps
        self._context += num_steps * batch

    def _change(self) -> None:
        """Ends, preempts and starts sequences, then waits for the next such change."""
        self._advance()
        self._end_finished()
        self._make_room()
        self._grant()
        for job in [each for each in self._held if each.is_computed and each.has_pages and each not in self._running]:
            self._start(job)
        self._wait()

    def _end_finished(self) -> None:
        while self._ends and (self._ends[0][2].stopped or self._ends[0][0] <= self._steps + _ALMOST):
            at, _, job = heapq.heappop(self._ends)
            if job in self._running and at == job.joined_at + job.left:
                self._leave(job)
                self._forget(job)

    def _leave(self, job: Job) -> None:
        del self._running[job]
        self._context -= job.num_input + job.num_generated + self._steps - job.joined_at
        job.has_pages = False

    def _make_room(self) -> None:
        while self._used() > self._pages and len(self._running) > 1:
            job = next(reversed(self._running))
            generated = job.num_generated + self._steps - job.joined_at
            self._leave(job)
            job.num_generated, job.stopped = generated, True
            self._waiting.appendleft(job)

    def _grant(self) -> None:
        watermark = self._config.watermark * self._pages
        while self._waiting:
            job = self._waiting[0]
            keep = watermark if self._running else 0.0
            holding = sum(each.has_pages for each in self._held)
            if self._used() + self._need(job) + keep > self._pages or holding >= self._config.max_batch_sequences:
                return
            self._waiting.popleft()
            job.has_pages = True
            self._reserved += self._need(job)

    def _start(self, job: Job) -> None:
        self._reserved -= self._need(job)
        if job.stopped:
            self._stall_s += self._costs.chunk.chunk_s(job.num_input + int(job.num_generated), 0)
            job.stopped = False
        self._running[job] = None
        self._context += job.num_input + job.num_generated
        job.joined_at = self._steps
        self._number += 1
        heapq.heappush(self._ends, (job.joined_at + job.left, self._number, job))

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = len(self._running)
        if not batch:
            return
        steps = max(0.0, self._ends[0][0] - self._steps) if self._ends else math.inf
        if batch > 1:
            steps = min(steps, max(1.0, (self._pages - self._used()) * self._page_size / batch))
        seconds = steps * self._step_s() + self._costs.kv_token_s * batch * steps * steps / 2
        self._timer = self._sim.after(self._stall_s + seconds, self._change)
