"""What the router counts, under the names that vLLM's dashboards know. One registry a router, no globals."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily

from penstock.types import Role, WorkerId
from router.admission_metrics import AdmissionMetrics
from router.index_metrics import IndexCollector
from router.prediction_metrics import PredictionCollector
from router.predictions import WorkerErrors
from router.prefix_index import PrefixIndex

_LABELS = ["model_name"]
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 131072)


class RouterMetrics:
    """Counters are bound to the model's name once, so that the token path does no label look-ups."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self.first_token_s = self._histogram("time_to_first_token_seconds", "Accepted to first token", _SHORT_S)
        self.inter_token_s = TokenHistogram(
            "vllm:inter_token_latency_seconds", "Between two tokens", model, self._registry
        )
        self.request_s = self._histogram("e2e_request_latency_seconds", "Accepted to last token", _LONG_S)
        self.queue_s = self._histogram(
            "request_queue_time_seconds", "Waiting, at the router and to be computed", _LONG_S
        )
        self.prompt_size = self._histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens served")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in prefix caches")
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found there")
        self.preemptions = self._counter("num_preemptions", "Sequences preempted")
        self.migrations = self._counter("request_migrations", "Times a running sequence moved to another decode worker")
        self.redispatches = self._counter("request_redispatches", "Requests moved off a lost decode worker")
        self._success = Counter(
            "vllm:request_success", "Completions ended", [*_LABELS, "finished_reason"], registry=self._registry
        )
        self.admission = AdmissionMetrics(self._registry, model)
        self._mispredicted = Histogram(
            "penstock:prediction_error_seconds",
            "How far a stage's actual time was from the one predicted",
            [*_LABELS, "stage"],
            buckets=_SHORT_S,
            registry=self._registry,
        )
        self._errors = Counter("vllm:request_errors", "Requests failed", [*_LABELS, "reason"], registry=self._registry)

    def watch(
        self,
        *,
        num_running: Callable[[], float],
        num_waiting: Callable[[], float],
        cache_usage: Callable[[], float],
        open_circuits: Callable[[], float],
        tier_hits: Callable[[str], float],
        num_workers: Callable[[Role], float],
    ) -> None:
        """Values that are asked for when somebody scrapes."""
        for name, help_text, value in (
            ("vllm:num_requests_running", "Sequences decoding, by the workers' reports", num_running),
            ("vllm:num_requests_waiting", "Sequences waiting, by the workers' reports", num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the decode workers' pages in use, 0 to 1", cache_usage),
            ("penstock:open_circuits", "Workers and links left alone because they failed of late", open_circuits),
        ):
            Gauge(name, help_text, _LABELS, registry=self._registry).labels(self._model).set_function(value)
        workers = Gauge(
            "penstock:workers", "That would serve a request now", [*_LABELS, "role"], registry=self._registry
        )
        for role in Role:
            workers.labels(self._model, role.value).set_function(functools.partial(num_workers, role))
        hits = Gauge(
            "penstock:prefix_cache_tier_hits",
            "Pages of prompts found on a tier since the workers that run now have started, by their reports",
            [*_LABELS, "tier"],
            registry=self._registry,
        )
        for tier in ("device", "host", "disk"):
            hits.labels(self._model, tier).set_function(functools.partial(tier_hits, tier))

    def watch_spares(self, count: Callable[[str], float]) -> None:
        """`count` tells a pool's warm ones."""
        spares = Gauge(
            "penstock:warm_spares",
            "Warm processes that may become workers of the pool, by the controller",
            [*_LABELS, "pool"],
            registry=self._registry,
        )
        for role in Role:
            spares.labels(self._model, role.value).set_function(functools.partial(count, role.value))

    def watch_index(self, index: PrefixIndex, num_mute: Callable[[], int]) -> None:
        self._registry.register(IndexCollector(self._model, index, num_mute))

    def watch_predictions(self, workers: Callable[[], Mapping[WorkerId, WorkerErrors]]) -> None:
        """Predicted against actual for each worker that is followed."""
        self._registry.register(PredictionCollector(self._model, workers))

    def mispredicted(self, stage: str, seconds: float) -> None:
        self._mispredicted.labels(self._model, stage).observe(seconds)

    def succeeded(self, finished_reason: str) -> None:
        self._success.labels(self._model, finished_reason).inc()

    def failed(self, reason: str) -> None:
        self._errors.labels(self._model, reason).inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", help_text, _LABELS, buckets=buckets, registry=self._registry)
        return family.labels(self._model)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"vllm:{name}", help_text, _LABELS, registry=self._registry).labels(self._model)


class TokenHistogram:
    """Observes many equal values at once: the library's own takes several microseconds for each token."""

    def __init__(self, name: str, help_text: str, model: str, registry: CollectorRegistry) -> None:
        self._name, self._help_text, self._model = name, help_text, model
        self._counts = [0] * (len(_SHORT_S) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int) -> None:
        self._counts[bisect_left(_SHORT_S, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help_text, labels=_LABELS)
        bounds = [*map(str, _SHORT_S), "+Inf"]
        family.add_metric([self._model], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family
