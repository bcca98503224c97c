"""Counts requests: their tokens, the time of each stage by lane and prompt length, and whether SLO targets were met.

Metrics with vLLM's names have vLLM's labels, so that its dashboards work. Metrics that vLLM lacks (by lane, by prompt
length, by the pool that computed the prompt) begin with `penstock:`. A histogram that exists under both names is
observed once: vLLM's is the sum of the other's series.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from penstock.config.autoscaler import SloConfig
from penstock.metrics.families import (
    BoundCounter,
    BoundHistogram,
    CounterFamily,
    Floats,
    HistogramFamily,
    HistogramTotal,
    Ints,
    observe_all,
)
from penstock.types import Lane, Role
from router.metrics.place_metrics import PlaceMetrics
from router.metrics.tenant_label import TenantLabel
from router.tracing.stages import Arithmetic, EndedCompletion, Stage, StageMoments, has_transfer, lay_out, stage_moments

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_FIRST_TOKEN_S = (*_SHORT_S, 10.0, 30.0, 60.0, 120.0, 600.0)
_STAGE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 131072)
_PROMPT_BOUNDS = (1024, 8192, 32768)  # tokens; the lower bounds of all classes but the first
_PROMPT_CLASSES = ("below 1k", "1k to 8k", "8k to 32k", "32k and more")
BATCH = 512  # events counted at a time with numpy, which takes 1 ms; in batches of 16 each takes several times as long
_ARRAYS = Arithmetic(np.maximum, np.minimum, np.where)
_TRANSFER_STAGES = (Stage.TRANSFER, Stage.DECODE_QUEUE)  # only completions with a transfer have them
_RESULTS = {True: "met", False: "missed"}
_Event = TypeVar("_Event")


class EndedRequest(NamedTuple):
    """A request that ended with an answer."""

    lane: Lane
    tenant: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    first_token_ms: float  # of the completion that ended last, as is `decode_ms`
    decode_ms: float
    elapsed_s: float  # accepted to last token


_CompletionKey = tuple[str, str, bool, str, tuple[str, ...]]  # lane, prompt class, remote, finish reason, tenant


@dataclass(frozen=True, slots=True, eq=False)
class _CompletionSeries:
    """Holds the series of completions that share lane, prompt class, pool, finish reason and tenant label."""

    stages: tuple[BoundHistogram, ...]  # one for each `Stage`
    elapsed_s: BoundHistogram
    token_s: BoundHistogram
    ended: BoundCounter


@dataclass(slots=True)
class _ReadCompletions:
    """Holds what the metrics need of completions, in the order in which they ended, until it is counted."""

    numbers: dict[_CompletionKey, int] = field(default_factory=dict)  # of the series that each kind is counted in
    which: list[int] = field(default_factory=list)  # each completion's series
    times: array[float] = field(default_factory=lambda: array("d"))  # each completion's `StageMoments`
    counts: array[float] = field(default_factory=lambda: array("d"))  # pages moved?, tokens, preemptions, migrations


class RequestMetrics:
    """Binds each series when it is first used. Use it on the router's event loop only.

    Serving a request costs only an append per event: `first_token`, `completion`, `request` and what `gaps` returns
    keep events in lists. `catch_up`, called every 100 ms, reads the completions and counts whatever has reached
    `BATCH` events; `fold` counts everything.
    """

    def __init__(self, registry: CollectorRegistry, model: str, slo: SloConfig, num_tenants: int = 0) -> None:
        """Gives the first `num_tenants` tenants their own value of the label `tenant`; 0 omits the label."""
        self._model = model
        self._slo = slo
        self._tenants = TenantLabel(num_tenants)
        self._first_tokens: list[tuple[str, int, str, float]] = []
        self._completions: list[tuple[EndedCompletion, str]] = []
        self._requests: list[EndedRequest] = []
        # Methods of lists, which cost less than methods in Python.
        # The lane's value, the number of prompt tokens, the tenant, and the seconds to a completion's first token.
        self.first_token: Callable[[tuple[str, int, str, float]], None] = self._first_tokens.append
        # An ended completion, which must not change afterwards, and its tenant.
        self.completion: Callable[[tuple[EndedCompletion, str]], None] = self._completions.append
        # A request that ended with an answer; its generated tokens are counted elsewhere.
        self.request: Callable[[EndedRequest], None] = self._requests.append
        self._read = _ReadCompletions()
        self._completion_series: dict[_CompletionKey, _CompletionSeries] = {}
        self._make_token_families(registry)
        self._make_completion_families(registry)
        self._make_request_families(registry)
        self._places = PlaceMetrics(registry, model)

    def _make_token_families(self, registry: CollectorRegistry) -> None:
        by = ("model_name", "lane", "prompt", *self._tenants.names)
        names = {"model_name": self._model}
        self._first_token_s = HistogramFamily(
            "penstock:time_to_first_token_seconds",
            "Accepted to first token, by lane and prompt length in tokens",
            by,
            _FIRST_TOKEN_S,
            registry,
        )
        HistogramTotal(
            "vllm:time_to_first_token_seconds", "Accepted to first token", names, self._first_token_s, registry
        )
        self._gap_s = HistogramFamily(
            "penstock:inter_token_latency_seconds",
            "Time between two tokens, by lane and prompt length in tokens",
            by,
            _SHORT_S,
            registry,
        )
        HistogramTotal("vllm:inter_token_latency_seconds", "Time between two tokens", names, self._gap_s, registry)

    def _make_completion_families(self, registry: CollectorRegistry) -> None:
        def family(name: str, help_text: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> HistogramFamily:
            names = ("model_name", *labels, *self._tenants.names)
            return HistogramFamily(f"penstock:{name}", help_text, names, bounds, registry)

        def total(name: str, help_text: str, parts: HistogramFamily, **where: str) -> None:
            HistogramTotal(f"vllm:{name}", help_text, {"model_name": self._model}, parts, registry, where)

        def counter(name: str, help_text: str, *labels: str) -> CounterFamily:
            return CounterFamily(f"vllm:{name}", help_text, ("model_name", *labels), registry)

        self._stage_s = family(
            "stage_seconds",
            "Duration of a completion's stages, by the pool that computed its prompt",
            ("lane", "stage", "prompt", "pool"),
            _STAGE_S,
        )
        total("request_prefill_time_seconds", "First chunk scheduled to first token", self._stage_s, stage="prefill")
        total("request_decode_time_seconds", "First token sent to last token sent", self._stage_s, stage="decode")
        labels = ("lane", "prompt", "pool", "finished_reason")
        self._completion_s = family("completion_seconds", "Accepted to a completion's last token", labels, _STAGE_S)
        help_text = "Mean time between two tokens of a completion"
        self._token_s = family("time_per_output_token_seconds", help_text, labels, _TOKEN_S)
        total("request_time_per_output_token_seconds", help_text, self._token_s)
        self._ended = counter("request_success", "Completions ended", "finished_reason")
        self._preemptions = counter("num_preemptions", "Sequences preempted").bind(self._model)
        self._migrations = counter("request_migrations", "Migrations of running sequences between decode workers").bind(
            self._model
        )
        self._redispatches = counter(
            "request_redispatches", "Requests dispatched again after losing their worker"
        ).bind(self._model)

    def _make_request_families(self, registry: CollectorRegistry) -> None:
        def series(name: str, help_text: str, bounds: tuple[float, ...]) -> BoundHistogram:
            return HistogramFamily(f"vllm:{name}", help_text, ("model_name",), bounds, registry).bind(self._model)

        def counter(name: str, help_text: str) -> BoundCounter:
            return CounterFamily(f"vllm:{name}", help_text, ("model_name",), registry).bind(self._model)

        self._queue_s = series("request_queue_time_seconds", "Waiting at the router and for a prefill worker", _STAGE_S)
        self._request_s = series("e2e_request_latency_seconds", "Accepted to last token", _LONG_S)
        self._prompt_size = series("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._output_size = series("request_generation_tokens", "Tokens generated for a request", _TOKENS)
        self.generation_tokens = counter("generation_tokens", "Tokens generated")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens served")
        self._cached_tokens = counter("prompt_tokens_cached", "Prompt tokens whose pages a prefix cache held")
        self._cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in prefix caches")
        self._cache_hits = counter("prefix_cache_hits", "Prompt tokens found in prefix caches")
        self._targets = CounterFamily(
            "penstock:request_targets",
            "Requests that ended with an answer, by whether they met the targets of the SLO",
            ("model_name", "lane", "result", *self._tenants.names),
            registry,
        )
        if not self._tenants.names:  # create the series before the first request, so that rates begin at 0
            for lane in Lane:
                for result in _RESULTS.values():
                    self._targets.bind(self._model, lane.value, result)

    def gaps(self, lane: Lane, num_prompt_tokens: int, tenant: str) -> BoundHistogram:
        """Returns the histogram, in seconds, in which the stream of such a request observes its inter-token gaps."""
        prompt = prompt_class(num_prompt_tokens)
        return self._gap_s.bind(self._model, lane.value, prompt, *self._tenants.values(tenant))

    def catch_up(self) -> None:
        """Reads the completions that have ended, and counts the events if they are many."""
        self._read_completions()
        self._gap_s.fold(BATCH)
        if max(len(self._first_tokens), len(self._read.which), len(self._requests)) >= BATCH:
            self.fold()

    def fold(self) -> None:
        """Counts all events that have not been counted yet. Call it before rendering the metrics."""
        self._read_completions()
        self._gap_s.fold()
        if self._first_tokens:
            self._count_first_tokens(_taken(self._first_tokens))
        if self._read.which:
            read, self._read = self._read, _ReadCompletions()
            self._count_completions(read)
        if self._requests:
            self._count_requests(_taken(self._requests))

    def _count_first_tokens(self, waiting: Sequence[tuple[str, int, str, float]]) -> None:
        numbers: dict[tuple[str, str, tuple[str, ...]], int] = {}  # index in `series` below
        which = [
            numbers.setdefault((lane, prompt_class(num_tokens), self._tenants.values(tenant)), len(numbers))
            for lane, num_tokens, tenant, _ in waiting
        ]
        series = [self._first_token_s.bind(self._model, lane, prompt, *labels) for lane, prompt, labels in numbers]
        observe_all(series, np.array(which), np.array([ttft_s for *_, ttft_s in waiting]))

    def _read_completions(self) -> None:
        """Reads what the metrics need of the ended completions, which the metrics then no longer keep alive."""
        read = self._read
        numbers, labels_of, count_place = read.numbers, self._tenants.values, self._places.count
        for ended, tenant in _taken(self._completions):
            timing, num_prompt_tokens, choices = ended.timing, ended.num_prompt_tokens, ended.choices
            is_remote = timing.prefill_worker not in ("", timing.decode_worker)
            lane, reason = ended.lane._value_, ended.finish_reason._value_  # enums are slow to hash
            key = (lane, prompt_class(num_prompt_tokens), is_remote, reason, labels_of(tenant))
            read.which.append(numbers.setdefault(key, len(numbers)))
            read.times.extend(stage_moments(ended, timing))
            read.counts.extend((has_transfer(timing), ended.num_tokens, timing.num_preemptions, timing.num_migrations))
            count_place(num_prompt_tokens, timing, is_remote, choices[-1] if choices else None)

    def _count_completions(self, read: _ReadCompletions) -> None:
        times = np.frombuffer(read.times).reshape(-1, len(StageMoments._fields)).T
        moved, num_tokens, num_preemptions, num_migrations = np.frombuffer(read.counts).reshape(-1, 4).T
        self._preemptions.inc(float(num_preemptions.sum()))
        self._migrations.inc(float(num_migrations.sum()))
        self._redispatches.inc(float(StageMoments(*times).redispatched.sum()))
        self._places.add_up()
        series = [self._series_of(key) for key in read.numbers]
        self._observe_completions(series, np.array(read.which), times, moved > 0, num_tokens)

    def _observe_completions(
        self,
        series: Sequence[_CompletionSeries],
        which: Ints,
        times: Floats,
        moved: NDArray[np.bool_],
        num_tokens: Floats,
    ) -> None:
        """Observes a batch of completions; the last axis of each array is the completion.

        `which` holds each completion's index in `series`, `times` its `StageMoments`, and `moved` whether its pages
        were transferred.
        """
        for each, count in zip(series, np.bincount(which).tolist(), strict=True):
            each.ended.inc(count)
        moments = StageMoments(*times)
        durations_ms = np.array([end - start for start, end in lay_out(times, _ARRAYS)])
        stage_numbers = which * len(Stage) + np.arange(len(Stage))[:, None]
        has_stage = np.array([moved if stage in _TRANSFER_STAGES else np.ones_like(moved) for stage in Stage])
        bound = [*(stage_s for each in series for stage_s in each.stages), self._queue_s]
        numbers = [stage_numbers[has_stage], np.full_like(which, len(bound) - 1), which + len(bound)]
        values_ms = [durations_ms[has_stage], moments.queue, moments.first_token + moments.decode]
        bound += [each.elapsed_s for each in series]
        observe_all(bound, np.concatenate(numbers), np.concatenate(values_ms) / 1e3)
        several = num_tokens > 1
        token_s = moments.decode[several] / 1e3 / (num_tokens[several] - 1)
        observe_all([each.token_s for each in series], which[several], token_s)

    def _series_of(self, key: _CompletionKey) -> _CompletionSeries:
        series = self._completion_series.get(key)
        if series is None:
            series = self._completion_series[key] = self._bind_completion(*key)
        return series

    def _bind_completion(
        self, lane: str, prompt: str, is_remote: bool, reason: str, tenant: tuple[str, ...]
    ) -> _CompletionSeries:
        pool = (Role.PREFILL if is_remote else Role.DECODE).value
        labels = (self._model, lane, prompt, pool, reason, *tenant)
        return _CompletionSeries(
            tuple(self._stage_s.bind(self._model, lane, stage.value, prompt, pool, *tenant) for stage in Stage),
            self._completion_s.bind(*labels),
            self._token_s.bind(*labels),
            self._ended.bind(self._model, reason),
        )

    def _count_requests(self, waiting: Sequence[EndedRequest]) -> None:
        _, _, *columns = zip(*waiting, strict=True)
        num_prompt, num_cached, num_tokens, first_token_ms, decode_ms, elapsed_s = np.array(columns, float)
        zeros = np.zeros(len(waiting), np.int64)
        observe_all([self._request_s], zeros, elapsed_s)
        sizes, which = np.concatenate((num_prompt, num_tokens)), np.concatenate((zeros, zeros + 1))
        observe_all([self._prompt_size, self._output_size], which, sizes)
        prompt_tokens, cached_tokens = float(num_prompt.sum()), float(num_cached.sum())
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._cache_queries.inc(prompt_tokens)
        self._cache_hits.inc(cached_tokens)
        target_s = np.array([self._slo.first_token_s(each.num_prompt_tokens) for each in waiting])
        in_time = first_token_ms / 1e3 <= target_s
        steady = (num_tokens <= 1) | (decode_ms / 1e3 <= self._slo.itl_s * (num_tokens - 1))
        labels_of = self._tenants.values
        results = Counter(
            (each.lane._value_, met, labels_of(each.tenant))
            for each, met in zip(waiting, (in_time & steady).tolist(), strict=True)
        )
        for (lane, met, labels), count in results.items():
            self._targets.bind(self._model, lane, _RESULTS[met], *labels).inc(count)


def _taken(events: list[_Event]) -> list[_Event]:
    """Returns the events of a list, which it empties."""
    taken = events[:]
    events.clear()
    return taken


def prompt_class(num_tokens: int) -> str:
    """Returns the value of the label `prompt` for a prompt of this length."""
    return _PROMPT_CLASSES[bisect_right(_PROMPT_BOUNDS, num_tokens)]
