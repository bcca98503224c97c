"""Provides recorded traffic (`penstock.bench.traces`) and synthetic traffic as `TraceRequest`s."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.bench.traces.read import read_trace
from penstock.bench.traces.record import TraceRecord
from penstock.types import Lane
from simulator.request import TraceRequest


def load_trace(file: str | Path, seed: int = 0, limit: int | None = None) -> list[TraceRequest]:
    """Returns the requests of a trace file by arrival, the first at 0. Raises InvalidInput that names the line."""
    return [to_trace_request(number, record) for number, record in enumerate(read_trace(file, seed, limit).records)]


def to_trace_request(number: int, record: TraceRecord) -> TraceRequest:
    """Returns a recorded request as the simulator takes it; one without a lane is standard."""
    return TraceRequest(
        number=number,
        arrival_s=record.arrival_s,
        num_input_tokens=record.num_input_tokens,
        num_output_tokens=record.num_output_tokens,
        block_ids=tuple(record.block_ids()),
        block_tokens=record.block_tokens,
        lane=record.lane or Lane.STANDARD,
        tenant=record.tenant,
    )


def in_order(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Sorts by arrival and renumbers, with the first arrival at 0."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    start_s = ordered[0].arrival_s if ordered else 0.0
    return [
        replace(request, number=number, arrival_s=request.arrival_s - start_s) for number, request in enumerate(ordered)
    ]


def scale_arrivals(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Multiplies the arrival rate by `factor`."""
    return [replace(request, arrival_s=request.arrival_s / factor) for request in requests]


def vary_rate(requests: Sequence[TraceRequest], period_s: float, depth: float) -> list[TraceRequest]:
    """Keeps the requests and the duration, with a rate that oscillates around the mean by `depth`, starting low."""
    wave = period_s / (2 * math.pi)
    varied = []
    for request in requests:
        low, high = 0.0, request.arrival_s + depth * 2 * wave
        while high - low > 1e-3:  # bisects for the time by which as many arrivals are expected as at an even rate
            middle = (low + high) / 2
            if middle - depth * wave * math.sin(middle / wave) < request.arrival_s:
                low = middle
            else:
                high = middle
        varied.append(replace(request, arrival_s=high))
    return varied


def drop_longer(requests: Sequence[TraceRequest], max_tokens: int) -> list[TraceRequest]:
    """Drops requests longer than any worker can hold."""
    kept = [request for request in requests if request.num_input_tokens + request.num_output_tokens <= max_tokens]
    return in_order(kept)


@dataclass(frozen=True, slots=True)
class SharedPrefixMix:
    """Conversations over a few long system prompts of uneven popularity, mixed with single requests.

    Each turn's prompt extends the previous one by an answer and a question, so that most arriving tokens were seen.
    """

    num_requests: int = 1000
    requests_per_s: float = 4.0
    num_systems: int = 24
    system_tokens: int = 2048
    turn_tokens: int = 512  # mean tokens of a question and its answer
    turns: int = 6  # mean turns of a conversation
    think_s: float = 20.0  # mean time between two turns
    single_share: float = 0.15  # share of requests without a shared prefix
    output_tokens: int = 200  # mean
    block_tokens: int = 64

    def make(self, seed: int) -> list[TraceRequest]:
        """Generates the requests."""
        rng = random.Random(f"{seed}/shared prefixes")
        next_block = self.num_systems * self._system_blocks
        requests: list[TraceRequest] = []
        start_s = 0.0
        while len(requests) < 2 * self.num_requests:
            turns = 1 + int(rng.expovariate(1 / (self.turns - 1))) if self.turns > 1 else 1
            single = rng.random() < self.single_share * self.turns
            turns = 1 if single else turns
            start_s += rng.expovariate(1.0) * turns / self.requests_per_s
            system = min(self.num_systems - 1, int(rng.paretovariate(1.0)) - 1)
            blocks = [] if single else list(range(system * self._system_blocks, (system + 1) * self._system_blocks))
            arrival_s = start_s
            for _ in range(turns):
                num_new = max(1, round(rng.expovariate(1 / self.turn_tokens) / self.block_tokens))
                blocks += range(next_block, next_block + num_new)
                next_block += num_new
                requests.append(self._request(rng, arrival_s, blocks))
                arrival_s += rng.expovariate(1 / self.think_s)
        return in_order(sorted(requests, key=lambda request: request.arrival_s)[: self.num_requests])

    def stream(self, seed: int) -> Iterator[TraceRequest]:
        """Generates such requests lazily, in order of arrival. Keeps only open conversations.

        The requests differ from those of `make`, as they take their random numbers in another order.
        """
        rng = random.Random(f"{seed}/stream of shared prefixes")
        next_block, start_s = self.num_systems * self._system_blocks, 0.0
        open_turns: list[tuple[float, int, int, tuple[int, ...]]] = []  # heap: arrival, tie-breaker, turns left, blocks
        for number in range(self.num_requests):
            while not open_turns or start_s <= open_turns[0][0]:
                turns, blocks = self._begin(rng)
                start_s += rng.expovariate(1.0) * turns / self.requests_per_s
                heapq.heappush(open_turns, (start_s, next_block, turns, blocks))
                next_block += 1
            arrival_s, _, turns, blocks = heapq.heappop(open_turns)
            num_new = max(1, round(rng.expovariate(1 / self.turn_tokens) / self.block_tokens))
            blocks = (*blocks, *range(next_block, next_block + num_new))
            next_block += num_new
            yield replace(self._request(rng, arrival_s, blocks), number=number)
            if turns > 1:
                heapq.heappush(
                    open_turns, (arrival_s + rng.expovariate(1 / self.think_s), next_block, turns - 1, blocks)
                )

    def _begin(self, rng: random.Random) -> tuple[int, tuple[int, ...]]:
        """Returns the number of turns of a new conversation, and the blocks of its system prompt."""
        if rng.random() < self.single_share * self.turns:
            return 1, ()
        turns = 1 + int(rng.expovariate(1 / (self.turns - 1))) if self.turns > 1 else 1
        system = min(self.num_systems, int(rng.paretovariate(1.0))) - 1
        return turns, tuple(range(system * self._system_blocks, (system + 1) * self._system_blocks))

    @property
    def _system_blocks(self) -> int:
        return self.system_tokens // self.block_tokens

    def _request(self, rng: random.Random, arrival_s: float, blocks: Sequence[int]) -> TraceRequest:
        num_input = len(blocks) * self.block_tokens - rng.randrange(self.block_tokens)
        num_output = 1 + int(rng.expovariate(1 / self.output_tokens))
        return TraceRequest(0, arrival_s, num_input, num_output, tuple(blocks), self.block_tokens)
