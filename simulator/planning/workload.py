"""Defines the traffic that a deployment is planned for: recorded requests, or ones sampled from statistics. Pure."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass, replace

from penstock.bench.traces.record import Trace, TraceRecord
from penstock.bench.traces.shape import scale_rate
from penstock.errors import InvalidInput
from simulator.traffic.reuse import ReuseReport, measure_reuse

_SAMPLED_BLOCK_TOKENS = 64
_SHARED, _OWN = 0, 1 << 20  # first block ids of the shared and of the unshared parts of sampled prompts


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request. `reusable_tokens` of its prompt hit in an unlimited cache."""

    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    reusable_tokens: float

    @property
    def num_tokens(self) -> int:
        return self.num_input_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by arrival. `reuse_curve` holds (cache tokens, share of the reusable tokens that hit), ascending."""

    name: str
    requests: tuple[PlannedRequest, ...]
    reuse_curve: tuple[tuple[float, float], ...] = ()  # empty: a cache of any size hits all
    records: tuple[TraceRecord, ...] = ()  # the same requests with their blocks, for the simulator

    @property
    def duration_s(self) -> float:
        return self.requests[-1].arrival_s

    @property
    def requests_per_s(self) -> float:
        return (len(self.requests) - 1) / self.duration_s

    @property
    def mean_input_tokens(self) -> float:
        return sum(request.num_input_tokens for request in self.requests) / len(self.requests)

    @property
    def mean_output_tokens(self) -> float:
        return sum(request.num_output_tokens for request in self.requests) / len(self.requests)

    @property
    def longest_tokens(self) -> int:
        return max(request.num_tokens for request in self.requests)

    @property
    def reusable_share(self) -> float:
        """The share of prompt tokens that an unlimited cache hits."""
        prompts = sum(request.num_input_tokens for request in self.requests)
        return sum(request.reusable_tokens for request in self.requests) / prompts

    def hit_share(self, cache_tokens: float) -> float:
        """Returns the share of the reusable tokens that caches of this size together hit."""
        if not self.reuse_curve:
            return 1.0
        index = bisect_right(self.reuse_curve, (cache_tokens, math.inf))
        return self.reuse_curve[index - 1][1] if index else 0.0

    def first(self, num_requests: int) -> Workload:
        """Returns the workload of the first requests, at least two."""
        num = max(2, num_requests)
        return replace(self, requests=self.requests[:num], records=self.records[:num])

    def varied(self, *, rate: float = 1.0, inputs: float = 1.0, outputs: float = 1.0, hits: float = 1.0) -> Workload:
        """Returns the workload with its rate, lengths or reusable tokens multiplied.

        It keeps its records, and so can be simulated, only if nothing but the rate differs.
        """
        varied = tuple(
            PlannedRequest(
                request.arrival_s / rate,
                max(1, round(request.num_input_tokens * inputs)),
                max(1, round(request.num_output_tokens * outputs)),
                min(request.reusable_tokens * hits * inputs, max(0.0, request.num_input_tokens * inputs - 1)),
            )
            for request in self.requests
        )
        curve = tuple((size * inputs, share) for size, share in self.reuse_curve)
        records = scale_rate(self.records, rate) if inputs == outputs == hits == 1.0 else ()
        return replace(self, requests=varied, reuse_curve=curve, records=records)


def workload_of(trace: Trace) -> Workload:
    """Returns the workload of a trace. Raises InvalidInput for a trace without two arrivals at different times."""
    if not trace.duration_s:
        raise InvalidInput("trace", f"{trace.name} has no two requests at different times; give a longer trace")
    reuse = measure_reuse(trace.records) if trace.has_blocks else ReuseReport((), 1, 0)
    hits = reuse.hits_by_request(len(trace.records))
    requests = tuple(
        PlannedRequest(record.arrival_s, record.num_input_tokens, record.num_output_tokens, hit)
        for record, hit in zip(trace.records, hits, strict=True)
    )
    ceiling = reuse.ceiling or 1.0
    curve = tuple((float(size), rate / ceiling) for size, rate in reuse.curve())
    return Workload(trace.name, requests, curve, trace.records)


@dataclass(frozen=True, slots=True)
class TrafficStatistics:
    """Traffic by its statistics. A `cv` is a standard deviation over its mean; `gap_cv` = 1 is a Poisson process."""

    requests_per_s: float
    input_tokens: float  # mean
    output_tokens: float
    input_cv: float = 1.0
    output_cv: float = 1.0
    gap_cv: float = 1.0
    hit_rate: float = 0.0  # share of prompt tokens that are reusable
    num_requests: int = 2000

    def __post_init__(self) -> None:
        for name in ("requests_per_s", "input_tokens", "output_tokens", "gap_cv"):
            if not getattr(self, name) > 0:
                raise InvalidInput(name, f"is {getattr(self, name):g}; give a number above 0")
        for name in ("input_cv", "output_cv"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(name, f"is {getattr(self, name):g}; give 0 or more")
        if not 0 <= self.hit_rate < 1:
            raise InvalidInput("hit_rate", f"is {self.hit_rate:g}; give a share from 0 to below 1")

    def sample(self, seed: int = 0, max_tokens: int = 1 << 20) -> Workload:
        """Samples requests: log-normal lengths up to `max_tokens`, gamma times between arrivals."""
        rng = random.Random(f"{seed}/planned traffic")
        shape = 1 / self.gap_cv**2
        records, now_s = [], 0.0
        for number in range(self.num_requests):
            num_input = min(max_tokens // 2, _lognormal(rng, self.input_tokens, self.input_cv))
            num_output = min(max_tokens // 2, _lognormal(rng, self.output_tokens, self.output_cv))
            records.append(self._record(number, now_s, num_input, num_output))
            now_s += rng.gammavariate(shape, 1 / (shape * self.requests_per_s))
        hits = [record.block_runs[0][1] if len(record.block_runs) > 1 else 0 for record in records]  # blocks
        requests = tuple(
            PlannedRequest(
                record.arrival_s, record.num_input_tokens, record.num_output_tokens, hit * _SAMPLED_BLOCK_TOKENS
            )
            for record, hit in zip(records, hits, strict=True)
        )
        return Workload("given statistics", requests, (), tuple(records))

    def _record(self, number: int, arrival_s: float, num_input: int, num_output: int) -> TraceRecord:
        num_blocks = -(-num_input // _SAMPLED_BLOCK_TOKENS)
        num_shared = min(num_blocks - 1, round(self.hit_rate * num_input / _SAMPLED_BLOCK_TOKENS))
        own = (_OWN + (number << 20), num_blocks - num_shared)
        runs = ((_SHARED, num_shared), own) if num_shared else (own,)
        return TraceRecord(arrival_s, num_input, num_output, runs, _SAMPLED_BLOCK_TOKENS)


def _lognormal(rng: random.Random, mean: float, cv: float) -> int:
    if cv == 0:
        return max(1, round(mean))
    variance = math.log(1 + cv**2)
    return max(1, round(rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))))


def longest_fitting(workload: Workload, max_tokens: int) -> tuple[Workload, int]:
    """Returns the workload without requests longer than `max_tokens`, and how many those are."""
    kept = [number for number, request in enumerate(workload.requests) if request.num_tokens <= max_tokens]
    dropped = len(workload.requests) - len(kept)
    if not dropped:
        return workload, 0
    if len(kept) < 2:
        problem = f"of {max_tokens} tokens holds {len(kept)} requests; give a model with a longer context"
        raise InvalidInput("context", problem)
    requests = tuple(workload.requests[number] for number in kept)
    records = tuple(workload.records[number] for number in kept) if workload.records else ()
    return replace(workload, requests=requests, records=records), dropped
