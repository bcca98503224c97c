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
class CoarseSequence:
    """A request that passes through a prefill and a decode worker."""

    outcome: Outcome
    target: CoarseDecode | None = None
    rank: float = 0.0
    begun: bool = False
    num_computed: int = 0
    context: int = 0  # tokens when it joined the batch last
    has_pages: bool = False
    is_computed: bool = False
    stopped: bool = False  # preempted: its KV will be recomputed
    joined_at: float = 0.0  # counted in steps of the worker
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
        self.on_end: Callable[[CoarseSequence], None] = lambda sequence: None
        self._sim = sim
        self._costs = costs
        self._config = config
        self._page_size = page_size
        self._pages = num_pages
        self._held: set[CoarseSequence] = set()
        self._waiting: deque[CoarseSequence] = deque()  # wait for pages
        self._running: dict[CoarseSequence, None] = {}  # in the order of arrival
        self._ends: list[tuple[float, int, CoarseSequence]] = []
        self._number = 0
        self._steps = 0.0
        self._context = 0.0  # tokens of all running sequences
        self._reserved = 0.0  # pages of sequences that have them and do not run yet
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
        tokens = (
            sum(sequence.num_input for sequence in self._held if sequence not in self._running)
            + self._context
            + num_tokens
        )
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

    def expect(self, sequence: CoarseSequence) -> None:
        """Accepts a sequence whose prompt a prefill worker will compute."""
        self._held.add(sequence)

    def reserve(self, sequence: CoarseSequence) -> None:
        """Queues the sequence for pages: its first chunk is about to be computed."""
        self._waiting.append(sequence)
        self._change()

    def join(self, sequence: CoarseSequence) -> None:
        """Marks the sequence's prompt as computed."""
        sequence.is_computed, sequence.context = True, sequence.num_input
        if sequence.left <= 0:
            self._forget(sequence)
        self._change()

    def movable(self) -> list[tuple[CoarseSequence, MigratableSequence]]:
        """Returns the running sequences as a worker reports them for migration."""
        self._advance()
        found = []
        for index, sequence in enumerate(self._running):
            generated = sequence.num_generated + self._steps - sequence.joined_at
            left = sequence.outcome.request.num_output_tokens - 1 - generated
            found.append(
                (sequence, MigratableSequence(RequestId(str(index)), int(sequence.num_input + generated), int(left)))
            )
        return found

    def migrate(self, sequence: CoarseSequence, target: CoarseDecode) -> None:
        """Migrates a running sequence with its KV to another worker, without the pause for its last pages."""
        self._advance()
        generated = sequence.num_generated + self._steps - sequence.joined_at
        self._leave(sequence)
        sequence.num_generated = generated
        self._held.discard(sequence)
        self._change()
        sequence.target = target
        target.expect(sequence)
        target.reserve(sequence)

    def _forget(self, sequence: CoarseSequence) -> None:
        self._held.discard(sequence)
        if sequence.has_pages and sequence not in self._running:
            self._reserved -= self._need(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self.on_end(sequence)

    def _need(self, sequence: CoarseSequence) -> float:
        return math.ceil((sequence.num_input + sequence.num_generated) / self._page_size)

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
        for sequence in [
            each for each in self._held if each.is_computed and each.has_pages and each not in self._running
        ]:
            self._start(sequence)
        self._wait()

    def _end_finished(self) -> None:
        while self._ends and (self._ends[0][2].stopped or self._ends[0][0] <= self._steps + _ALMOST):
            at, _, sequence = heapq.heappop(self._ends)
            if sequence in self._running and at == sequence.joined_at + sequence.left:
                self._leave(sequence)
                self._forget(sequence)

    def _leave(self, sequence: CoarseSequence) -> None:
        del self._running[sequence]
        self._context -= sequence.num_input + sequence.num_generated + self._steps - sequence.joined_at
        sequence.has_pages = False

    def _make_room(self) -> None:
        while self._used() > self._pages and len(self._running) > 1:
            sequence = next(reversed(self._running))
            generated = sequence.num_generated + self._steps - sequence.joined_at
            self._leave(sequence)
            sequence.num_generated, sequence.stopped = generated, True
            self._waiting.appendleft(sequence)

    def _grant(self) -> None:
        watermark = self._config.watermark * self._pages
        while self._waiting:
            sequence = self._waiting[0]
            keep = watermark if self._running else 0.0
            holding = sum(each.has_pages for each in self._held)
            if self._used() + self._need(sequence) + keep > self._pages or holding >= self._config.max_batch_sequences:
                return
            self._waiting.popleft()
            sequence.has_pages = True
            self._reserved += self._need(sequence)

    def _start(self, sequence: CoarseSequence) -> None:
        self._reserved -= self._need(sequence)
        if sequence.stopped:
            self._stall_s += self._costs.chunk.chunk_s(sequence.num_input + int(sequence.num_generated), 0)
            sequence.stopped = False
        self._running[sequence] = None
        self._context += sequence.num_input + sequence.num_generated
        sequence.joined_at = self._steps
        self._number += 1
        heapq.heappush(self._ends, (sequence.joined_at + sequence.left, self._number, sequence))

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
