"""Metrics of requests: their tokens, the time of each stage by lane and prompt length, and whether targets were met.

vLLM's names carry vLLM's labels, so that its dashboards work. Metrics that vLLM lacks (lanes, prompt lengths, the place
that computed a prompt) are under `penstock:`. Where both have a histogram, vLLM's is the sum of the other's series.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from penstock.types import FinishReason, Lane, Role
from router.metrics.families import BoundCounter, BoundHistogram, CounterFamily, HistogramFamily, HistogramTotal
from router.metrics.place_metrics import PlaceMetrics
from router.metrics.tenant_label import TenantLabel
from router.tracing.stages import EndedCompletion, Stage, stage_intervals

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_FIRST_TOKEN_S = (*_SHORT_S, 10.0, 30.0, 60.0, 120.0, 600.0)
_STAGE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 131072)
_PROMPT_BOUNDS = (1024, 8192, 32768)  # tokens: a prompt below the first has the first class
_PROMPT_CLASSES = ("below 1k", "1k to 8k", "8k to 32k", "32k and more")
_BATCH = 64  # completions that are counted at a time: in a loop each takes a third of what it would take by itself
_RESULTS = {True: "met", False: "missed"}


class EndedRequest(NamedTuple):
    """A request that ended with an answer."""

    lane: Lane
    tenant: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    elapsed_s: float  # accepted to last token
    met: bool  # the targets of the SLO


_CompletionKey = tuple[str, str, bool, str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _CompletionSeries:
    """The series of completions that share lane, prompt class, pool and finish reason."""

    stages: tuple[BoundHistogram, ...]  # of each `Stage`
    elapsed_s: BoundHistogram
    token_s: BoundHistogram
    ended: BoundCounter


class RequestMetrics:
    """Binds each series with its first use. Called on the router's event loop.

    Ended requests and completions wait in lists, at most `_BATCH` of each kind, until `fold` counts them: while a
    request is served, it costs only an append.
    """

    def __init__(self, registry: CollectorRegistry, model: str, num_tenants: int = 0) -> None:
        """`num_tenants` tenants get their own value of the label `tenant`; 0: there is no such label."""
        self._model = model
        self._tenants = TenantLabel(num_tenants)
        self._completions: list[tuple[EndedCompletion, str]] = []
        self._requests: list[EndedRequest] = []
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
            "Between two tokens, by lane and prompt length in tokens",
            by,
            _SHORT_S,
            registry,
        )
        HistogramTotal("vllm:inter_token_latency_seconds", "Between two tokens", names, self._gap_s, registry)

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
            "Time of a completion's stages, by the pool that computed its prompt",
            ("lane", "stage", "prompt", "pool"),
            _STAGE_S,
        )
        total("request_prefill_time_seconds", "First chunk scheduled to first token", self._stage_s, stage="prefill")
        total("request_decode_time_seconds", "First token sent to last token sent", self._stage_s, stage="decode")
        of_ended = ("lane", "prompt", "pool", "finished_reason")
        self._completion_s = family("completion_seconds", "Accepted to a completion's last token", of_ended, _STAGE_S)
        between = "Mean time between two tokens of a completion"
        self._token_s = family("time_per_output_token_seconds", between, of_ended, _TOKEN_S)
        total("request_time_per_output_token_seconds", between, self._token_s)
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
        if not self._tenants.names:  # creates the series before the first request, so that rates begin at 0
            for lane in Lane:
                for result in _RESULTS.values():
                    self._targets.bind(self._model, lane.value, result)

    def first_token(self, lane: Lane, num_prompt_tokens: int, tenant: str, ttft_s: float) -> None:
        """Observes the time to a completion's first token."""
        prompt = prompt_class(num_prompt_tokens)
        self._first_token_s.bind(self._model, lane.value, prompt, *self._tenants.values(tenant)).observe(ttft_s)

    def gaps(self, lane: Lane, num_prompt_tokens: int, tenant: str) -> BoundHistogram:
        """Returns the histogram of the seconds between two tokens of such a request, for its stream to keep."""
        prompt = prompt_class(num_prompt_tokens)
        return self._gap_s.bind(self._model, lane.value, prompt, *self._tenants.values(tenant))

    def completion(self, ended: EndedCompletion, tenant: str) -> None:
        """Counts a completion that has ended and no longer changes: its stages and times, where its prompt was
        computed, and what the router's last choice of a pair promised of caches.
        """
        self._completions.append((ended, tenant))
        if len(self._completions) >= _BATCH:
            self.fold()

    def request(self, ended: EndedRequest) -> None:
        """Counts a request that ended with an answer, except for its generated tokens."""
        self._requests.append(ended)
        if len(self._requests) >= _BATCH:
            self.fold()

    def fold(self) -> None:
        """Counts what waits. Call it before rendering the metrics."""
        completions, self._completions = self._completions, []
        requests, self._requests = self._requests, []
        for completion, tenant in completions:
            self._count_completion(completion, self._tenants.values(tenant))
        for request in requests:
            self._count_request(request)

    def _count_completion(self, ended: EndedCompletion, tenant: tuple[str, ...]) -> None:
        timing, decode_worker = ended.timing, ended.timing.decode_worker
        pool = Role.DECODE if timing.prefill_worker in ("", decode_worker) else Role.PREFILL
        prompt, reason = prompt_class(ended.num_prompt_tokens), ended.finish_reason
        key = (ended.lane._value_, prompt, pool is Role.PREFILL, reason._value_, tenant)  # enums are slow to hash
        series = self._completion_series.get(key)
        if series is None:
            series = self._completion_series[key] = self._bind_completion(ended.lane, prompt, pool, reason, tenant)
        for stage_s, interval in zip(series.stages, stage_intervals(ended), strict=True):
            if interval is not None:
                stage_s.observe((interval[1] - interval[0]) / 1e3)
        self._queue_s.observe(timing.queue_ms / 1e3)
        decode_s = timing.decode_ms / 1e3
        series.elapsed_s.observe(timing.first_token_ms / 1e3 + decode_s)
        if ended.num_tokens > 1:
            series.token_s.observe(decode_s / (ended.num_tokens - 1))
        series.ended.inc()
        self._preemptions.inc(timing.num_preemptions)
        self._migrations.inc(timing.num_migrations)
        self._redispatches.inc(timing.num_redispatches)
        self._places.count(ended.num_prompt_tokens, timing, pool, ended.choices[-1] if ended.choices else None)

    def _bind_completion(
        self, lane: Lane, prompt: str, pool: Role, reason: FinishReason, tenant: tuple[str, ...]
    ) -> _CompletionSeries:
        of_ended = (self._model, lane.value, prompt, pool.value, reason.value, *tenant)
        return _CompletionSeries(
            tuple(
                self._stage_s.bind(self._model, lane.value, stage.value, prompt, pool.value, *tenant) for stage in Stage
            ),
            self._completion_s.bind(*of_ended),
            self._token_s.bind(*of_ended),
            self._ended.bind(self._model, reason.value),
        )

    def _count_request(self, ended: EndedRequest) -> None:
        self._request_s.observe(ended.elapsed_s)
        self._prompt_size.observe(ended.num_prompt_tokens)
        self._output_size.observe(ended.num_tokens)
        self._prompt_tokens.inc(ended.num_prompt_tokens)
        self._cached_tokens.inc(ended.num_cached_tokens)
        self._cache_queries.inc(ended.num_prompt_tokens)
        self._cache_hits.inc(ended.num_cached_tokens)
        tenant = self._tenants.values(ended.tenant)
        self._targets.bind(self._model, ended.lane.value, _RESULTS[ended.met], *tenant).inc()


def prompt_class(num_tokens: int) -> str:
    """Returns the length class of a prompt, as the label `prompt` names it."""
    return _PROMPT_CLASSES[bisect_right(_PROMPT_BOUNDS, num_tokens)]
