"""Simulates a prefill worker by the arithmetic of its steps, without pages: chunks by rank over a cache of blocks."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

from benchmarks.autoscale.coarse_decode import CoarseSequence
from penstock.types import Role, StepTotals, WorkerId, WorkerLoad
from prefill_worker.scheduler import AGING, HANDICAP_STEPS
from simulator.costs.step_costs import PrefillCosts
from simulator.world.virtual_time import Simulation


class CoarsePrefill:
    """Computes chunks in the order of `prefill_worker.scheduler`, over a cache that evicts the least recently used."""

    role = Role.PREFILL

    def __init__(self, sim: Simulation, name: str, costs: PrefillCosts, chunk_tokens: int, cache_tokens: int) -> None:
        self.worker_id = WorkerId(name)
        self.on_begun: Callable[[CoarseSequence], None] = lambda sequence: None
        self.on_computed: Callable[[CoarseSequence], None] = lambda sequence: None
        self._sim = sim
        self._costs = costs
        self._chunk = chunk_tokens
        self._cache_tokens = cache_tokens
        self._blocks: OrderedDict[int, int] = OrderedDict()  # tokens of each, the most recently used last
        self._cached = 0
        self._queue: list[tuple[float, int, CoarseSequence]] = []
        self._number = 0
        self._advanced = 0.0
        self._busy = False
        self._totals = StepTotals()
        self.queued_tokens = 0

    @property
    def num_open(self) -> int:
        return len(self._queue)

    def load(self) -> WorkerLoad:
        running = sum(sequence.begun for _, _, sequence in self._queue)
        return WorkerLoad(
            num_running=running,
            num_waiting=len(self._queue) - running,
            total_pages=1,
            free_pages=1,
            queued_prefill_tokens=self.queued_tokens,
            prefill_steps=self._totals,
        )

    def cached_tokens(self, sequence: CoarseSequence) -> int:
        """Returns the cached tokens at the start of the prompt, whose last token is always computed."""
        request, found = sequence.outcome.request, 0
        for block in request.block_ids:
            if block not in self._blocks:
                break
            found += request.block_tokens
        return min(found, (request.num_input_tokens - 1) // request.block_tokens * request.block_tokens)

    def wait_s(self, sequence: CoarseSequence) -> float:
        """Returns the seconds to the first token if this worker got the prompt."""
        uncached = sequence.num_input - self.cached_tokens(sequence)
        return self.queued_tokens * self._costs.token_s + self._costs.chunk_s(uncached, sequence.num_input - uncached)

    def submit(self, sequence: CoarseSequence) -> None:
        cached = self.cached_tokens(sequence)
        sequence.rank = (
            self._advanced + HANDICAP_STEPS[sequence.outcome.request.lane] * self._chunk + sequence.num_input
        )
        self._number += 1
        self.queued_tokens += sequence.num_input - cached
        sequence.num_computed = cached
        heapq.heappush(self._queue, (sequence.rank, self._number, sequence))
        if not self._busy:
            self._step()

    def _step(self) -> None:
        work: list[tuple[CoarseSequence, int]] = []
        budget, taken = self._chunk, []
        while self._queue and budget:
            entry = heapq.heappop(self._queue)
            taken.append(entry)
            sequence = entry[2]
            if not sequence.begun:
                sequence.begun = True
                cached = self.cached_tokens(sequence)
                self.queued_tokens += sequence.num_computed - cached
                sequence.num_computed = sequence.outcome.cached_tokens = cached
                self.on_begun(sequence)
            num_tokens = min(budget, sequence.num_input - sequence.num_computed)
            work.append((sequence, num_tokens))
            budget -= num_tokens
        for entry in taken:
            heapq.heappush(self._queue, entry)
        self._busy = bool(work)
        if work:
            seconds = self._costs.step_s + sum(
                self._costs.chunk_s(count, sequence.num_computed) for sequence, count in work
            )
            self._sim.after(seconds, lambda: self._finish(work, seconds))

    def _finish(self, work: list[tuple[CoarseSequence, int]], seconds: float) -> None:
        total = sum(count for _, count in work)
        contexts = sum(count * (sequence.num_computed + count / 2) for sequence, count in work)
        self._totals = self._totals.plus(total, contexts, seconds)
        self._advanced += total / AGING
        self.queued_tokens -= total
        done = []
        for sequence, count in work:
            sequence.num_computed += count
            if sequence.num_computed == sequence.num_input:
                done.append(sequence)
        if done:
            self._queue = [entry for entry in self._queue if entry[2] not in done]
            heapq.heapify(self._queue)
        for sequence in done:
            self._keep(sequence)
            self.on_computed(sequence)
        self._step()

    def _keep(self, sequence: CoarseSequence) -> None:
        request = sequence.outcome.request
        for block in request.block_ids:
            if block in self._blocks:
                self._blocks.move_to_end(block)
            else:
                self._blocks[block] = request.block_tokens
                self._cached += request.block_tokens
        while self._cached > self._cache_tokens:
            _, tokens = self._blocks.popitem(last=False)
            self._cached -= tokens
