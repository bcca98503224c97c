"""Implements the flow model: queues the workload's own requests at workers with the costs of their steps. Pure.

It screens hundreds of deployments, so it knows queues and batches, but no pages, routers or messages. A prefill worker
computes one prompt after the other; the pool is one queue. A decode worker gives all its sequences a token a step,
whose time follows from the batch and its contexts (processor sharing), and holds as many sequences as its KV has room
for. A colocated worker does both: while prompts wait, every step also computes a chunk. Requests arrive as
recorded, so bursts need no assumption, unlike in formulas for M/G/k queues.

It is optimistic because it pools workers: real routers trade balance for cache hits. It is pessimistic because real
prefill workers compute several short prompts in a step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.costs.step_costs import DecodeCosts, PrefillCosts
from simulator.planning.workload import PlannedRequest

_MOST_EVENTS_PER_REQUEST = 64


@dataclass(frozen=True, slots=True)
class FlowTimes:
    """The latencies of the requests, in their order, and how busy the workers were."""

    ttft_s: list[float]
    tpot_s: list[float]  # 0 for a single token
    utilization: float  # busy share of the workers that compute prompts
    mean_batch: float  # sequences of a decode worker, over its busy time
    peak_batch: int


def prefill_times(
    requests: Sequence[PlannedRequest], cached_share: float, costs: PrefillCosts, chunk_tokens: int
) -> list[float]:
    """Returns the time that each prompt takes a worker if `cached_share` of its reusable tokens hit."""
    return [
        prompt_s(request.num_input_tokens, cached_share * request.reusable_tokens, costs, chunk_tokens)
        for request in requests
    ]


def prompt_s(num_tokens: int, num_cached: float, costs: PrefillCosts, chunk_tokens: int) -> float:
    """Returns the time of a prompt on an idle worker. At least the last token is computed."""
    cached = int(min(num_cached, num_tokens - 1))
    computed = num_tokens - cached
    return costs.prompt_s(computed, chunk_tokens) + costs.context_s * computed * cached


def queue_prompts(requests: Sequence[PlannedRequest], times_s: Sequence[float], num_workers: int) -> list[float]:
    """Returns when each prompt is done, in one queue before `num_workers` workers."""
    free_s = [0.0] * num_workers
    done = []
    for request, time_s in zip(requests, times_s, strict=True):
        end_s = max(request.arrival_s, heapq.heappop(free_s)) + time_s
        heapq.heappush(free_s, end_s)
        done.append(end_s)
    return done


@dataclass(frozen=True, slots=True)
class Patience:
    """The numbers of requests that may miss their limit of TTFT, or of the time per token."""

    ttft_s: Sequence[float]  # the limit of each request
    tpot_s: float
    num_late: int


@dataclass(slots=True)
class _Worker:
    """A decode worker. `progress` counts the tokens that each of its sequences would have had since the start."""

    now_s: float = 0.0
    progress: float = 0.0
    step_s: float = 0.0
    contexts: float = 0.0  # tokens of KV that a step reads
    reserved: int = 0  # tokens that its sequences may eventually hold
    prompt_left: float = 0.0  # tokens of the first waiting prompt
    prompt_rate: float = 0.0  # tokens of that prompt per second
    queued_tokens: float = 0.0
    busy_s: float = 0.0
    batch_s: float = 0.0  # the integral of the batch over time
    version: int = 0
    running: list[tuple[float, int]] = field(default_factory=list)  # heap of (progress at the end, request)
    prompts: deque[int] = field(default_factory=deque)
    waiting: deque[int] = field(default_factory=deque)  # for room


@dataclass(frozen=True, slots=True)
class DecodeFlow:
    """Identical decode workers. With `chunk_tokens` they compute prompts themselves."""

    costs: DecodeCosts
    num_workers: int
    kv_tokens: int
    max_batch: int
    chunk_tokens: int = 0

    def run(
        self,
        requests: Sequence[PlannedRequest],
        ready_s: Sequence[float],
        cached_share: float = 0.0,
        patience: Patience | None = None,
    ) -> FlowTimes | None:
        """Serves each request from the moment that it is ready: when it has its first token or, colocated, its prompt.

        Returns None as soon as more requests are late than `patience` allows.
        """
        try:
            return _Run(self, requests, ready_s, cached_share, patience).finish()
        except _TooLate:
            return None


class _TooLate(Exception):
    pass


class _Run:
    """The events of one run, in order of time."""

    def __init__(
        self,
        flow: DecodeFlow,
        requests: Sequence[PlannedRequest],
        ready_s: Sequence[float],
        cached_share: float,
        patience: Patience | None,
    ) -> None:
        self.flow, self.requests, self.ready_s, self.patience = flow, requests, ready_s, patience
        self.num_late = 0
        self.computed = [
            max(1.0, request.num_input_tokens - cached_share * request.reusable_tokens) for request in requests
        ]
        self.workers = [_Worker() for _ in range(flow.num_workers)]
        self.first_s = [0.0] * len(requests)
        self.end_s = [0.0] * len(requests)
        self.peak = 0
        self.events: list[tuple[float, int, int]] = []  # (time, worker, version)

    def finish(self) -> FlowTimes:
        order = sorted(range(len(self.requests)), key=lambda number: self.ready_s[number])
        for number in order:
            self._advance_to(self.ready_s[number])
            index = self._choose()
            self._move(self.workers[index], self.ready_s[number])
            self._arrive(self.workers[index], number)
            self._plan(index)
        self._advance_to(float("inf"))
        busy_s = sum(worker.busy_s for worker in self.workers)
        last_s = max((worker.now_s for worker in self.workers), default=0.0)
        return FlowTimes(
            [first - request.arrival_s for first, request in zip(self.first_s, self.requests, strict=True)],
            [
                (end - first) / (request.num_output_tokens - 1) if request.num_output_tokens > 1 else 0.0
                for first, end, request in zip(self.first_s, self.end_s, self.requests, strict=True)
            ],
            busy_s / (last_s * len(self.workers)) if last_s else 0.0,
            sum(worker.batch_s for worker in self.workers) / busy_s if busy_s else 0.0,
            self.peak,
        )

    def _choose(self) -> int:
        costs = self.flow.costs
        return min(
            range(len(self.workers)),
            key=lambda index: (
                self.workers[index].queued_tokens * costs.chunk.token_s,
                len(self.workers[index].running) + len(self.workers[index].waiting),
            ),
        )

    def _arrive(self, worker: _Worker, number: int) -> None:
        if self.flow.chunk_tokens:
            worker.prompts.append(number)
            worker.queued_tokens += self.computed[number]
            if len(worker.prompts) == 1:
                worker.prompt_left = self.computed[number]
        else:
            self._admit(worker, number)

    def _admit(self, worker: _Worker, number: int) -> None:
        """Lets a request with its prompt computed join the batch, or wait for room."""
        if worker.waiting or not self._has_room(worker, number):
            worker.waiting.append(number)
        else:
            self._start(worker, number)

    def _has_room(self, worker: _Worker, number: int) -> bool:
        if not worker.running:
            return True  # longer than the whole pool; planning has dropped such requests before
        is_below = len(worker.running) < self.flow.max_batch
        return is_below and worker.reserved + self.requests[number].num_tokens <= self.flow.kv_tokens

    def _start(self, worker: _Worker, number: int) -> None:
        request = self.requests[number]
        self.first_s[number] = worker.now_s
        if self.patience and worker.now_s - request.arrival_s > self.patience.ttft_s[number]:
            self._count_late(self.patience)
        if request.num_output_tokens < 2:
            self.end_s[number] = worker.now_s
            return
        worker.reserved += request.num_tokens
        worker.contexts += request.num_input_tokens + request.num_output_tokens / 2
        heapq.heappush(worker.running, (worker.progress + request.num_output_tokens - 1, number))
        self.peak = max(self.peak, len(worker.running))

    def _advance_to(self, time_s: float) -> None:
        """Ends the sequences and prompts that end before `time_s`."""
        budget = _MOST_EVENTS_PER_REQUEST * (len(self.requests) + 1)
        while self.events and self.events[0][0] <= time_s:
            at_s, index, version = heapq.heappop(self.events)
            worker = self.workers[index]
            if version != worker.version:
                continue
            budget -= 1
            assert budget > 0, "events do not end"
            self._move(worker, at_s)
            self._end_due(worker)
            self._plan(index)

    def _move(self, worker: _Worker, time_s: float) -> None:
        passed_s = time_s - worker.now_s
        if worker.running or worker.prompts:
            worker.busy_s += passed_s
            worker.batch_s += passed_s * len(worker.running)
            worker.progress += passed_s / worker.step_s
            done = passed_s * worker.prompt_rate
            worker.prompt_left -= done
            worker.queued_tokens -= done
        worker.now_s = time_s

    def _end_due(self, worker: _Worker) -> None:
        while worker.running and worker.running[0][0] <= worker.progress + 1e-6:
            _, number = heapq.heappop(worker.running)
            request = self.requests[number]
            self.end_s[number] = worker.now_s
            self._check_pace(number)
            worker.reserved -= request.num_tokens
            worker.contexts -= request.num_input_tokens + request.num_output_tokens / 2
        if worker.prompts and worker.prompt_left <= 1e-6:
            number = worker.prompts.popleft()
            worker.queued_tokens = worker.queued_tokens - worker.prompt_left if worker.prompts else 0.0
            worker.prompt_left = self.computed[worker.prompts[0]] if worker.prompts else 0.0
            self._admit(worker, number)
        while worker.waiting and self._has_room(worker, worker.waiting[0]):
            self._start(worker, worker.waiting.popleft())

    def _check_pace(self, number: int) -> None:
        """Counts a request as late if its tokens came too slowly, unless its first token was late already."""
        patience, request = self.patience, self.requests[number]
        if patience is None or self.first_s[number] - request.arrival_s > patience.ttft_s[number]:
            return
        if self.end_s[number] - self.first_s[number] > patience.tpot_s * (request.num_output_tokens - 1):
            self._count_late(patience)

    def _count_late(self, patience: Patience) -> None:
        self.num_late += 1
        if self.num_late > patience.num_late:
            raise _TooLate

    def _plan(self, index: int) -> None:
        """Finds the worker's next event, given its batch."""
        worker = self.workers[index]
        worker.version += 1
        worker.prompt_rate = 0.0
        if not worker.running and not worker.prompts:
            return
        batch, costs = len(worker.running), self.flow.costs
        worker.step_s = costs.batch_s(batch) + costs.kv_token_s * max(0.0, worker.contexts)
        next_s = float("inf")
        if worker.prompts:
            request = self.requests[worker.prompts[0]]
            chunk = max(1, int(min(self.flow.chunk_tokens, worker.queued_tokens)))
            chunk_s = costs.batch_s(batch, chunk) - costs.batch_s(batch) if batch else 0.0
            if not batch:
                worker.step_s, chunk_s = costs.batch_s(0, chunk), 0.0
            attention_s = (
                costs.chunk.context_s * chunk * (request.num_input_tokens - self.computed[worker.prompts[0]] / 2)
            )
            worker.step_s += chunk_s + costs.mixed_s + attention_s
            worker.prompt_rate = chunk / worker.step_s
            next_s = worker.now_s + max(0.0, worker.prompt_left) / worker.prompt_rate
        if worker.running:
            left = max(0.0, worker.running[0][0] - worker.progress)
            next_s = min(next_s, worker.now_s + left * worker.step_s)
        heapq.heappush(self.events, (next_s, index, worker.version))
