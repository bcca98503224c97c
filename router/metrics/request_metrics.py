"""Metrics of requests that have ended: the time of each stage by lane and prompt length, and whether targets were met.

vLLM's names carry vLLM's labels, so that its dashboards work. What they lack (lanes, prompt lengths, the place that
computed a prompt) is under `penstock:`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter

from penstock.types import FinishReason, Lane, Role
from penstock.v1 import common_pb2
from router.metrics.histograms import BoundHistogram, HistogramFamily
from router.routing.policy.interface import PairChoice

_LABELS = ["model_name"]
_STAGE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 131072)
_PROMPT_BOUNDS = (1024, 8192, 32768)  # tokens: a prompt below the first has the first class
_COMPUTING = ("prefill worker", "decode worker")
_PROMPT_CLASSES = ("below 1k", "1k to 8k", "8k to 32k", "32k and more")
STAGES: Mapping[str, str] = MappingProxyType(
    {"queue": "queue_ms", "prefill": "prefill_ms", "transfer": "transfer_ms", "decode": "decode_ms"}
)
"""Each stage of a completion and the field of `Timing` that holds its milliseconds."""


class RequestMetrics:
    """Binds each series with its first use. Called on the router's event loop."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def series(name: str, help_text: str, bounds: tuple[float, ...]) -> BoundHistogram:
            return HistogramFamily(f"vllm:{name}", help_text, _LABELS, bounds, registry).bind(model)

        def family(name: str, help_text: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> HistogramFamily:
            return HistogramFamily(f"penstock:{name}", help_text, [*_LABELS, *labels], bounds, registry)

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"penstock:{name}", help_text, [*_LABELS, *labels], registry=registry)

        self._model = model
        self._prefill_s = series("request_prefill_time_seconds", "First chunk scheduled to first token", _STAGE_S)
        self._decode_s = series("request_decode_time_seconds", "First token sent to last token sent", _STAGE_S)
        self._token_s = series(
            "request_time_per_output_token_seconds", "Mean time between two tokens of a completion", _TOKEN_S
        )
        self._output_size = series("request_generation_tokens", "Tokens generated for a request", _TOKENS)
        self._stage_s = family(
            "stage_seconds",
            "Time of a completion's stages, by the pool that computed its prompt",
            ("lane", "stage", "prompt", "pool"),
            _STAGE_S,
        )
        self._first_token_s = family(
            "time_to_first_token_seconds",
            "Accepted to first token, by lane and prompt length in tokens",
            ("lane", "prompt"),
            _STAGE_S,
        )
        of_ended = ("lane", "prompt", "pool", "finished_reason")
        self._completion_s = family("completion_seconds", "Accepted to a completion's last token", of_ended, _STAGE_S)
        self._completion_token_s = family(
            "time_per_output_token_seconds", "Mean time between two tokens of a completion", of_ended, _TOKEN_S
        )
        targets = counter(
            "request_targets",
            "Requests that ended with an answer, by whether they met the targets of the SLO",
            "lane",
            "result",
        )
        self._targets = {
            (lane, met): targets.labels(model, lane.value, "met" if met else "missed")
            for lane in Lane
            for met in (True, False)
        }
        tokens = counter("prompt_tokens_by_place", "Prompt tokens by where their KV came from", "place")
        self._tokens = {place: tokens.labels(model, place) for place in ("cached", *_COMPUTING)}
        planned = counter(
            "prompt_tokens_planned",
            "Uncached prompt tokens by where the decode workers decided that they be computed",
            "place",
        )
        self._planned = {place: planned.labels(model, place) for place in _COMPUTING}
        routed = counter(
            "routed_prompt_tokens",
            "Prompt tokens by the pool that the router chose to compute them: all, those that its index promised to be "
            "cached there, and those that were",
            "pool",
            "kind",
        )
        self._routed = {
            (pool, kind): routed.labels(model, pool.value, kind)
            for pool in Role
            for kind in ("all", "predicted cached", "cached")
        }

    def first_token(self, lane: Lane, num_prompt_tokens: int, ttft_s: float) -> None:
        """Observes the time to a completion's first token."""
        self._first_token_s.bind(self._model, lane.value, prompt_class(num_prompt_tokens)).observe(ttft_s)

    def completion(
        self,
        lane: Lane,
        num_prompt_tokens: int,
        timing: common_pb2.Timing,
        reason: FinishReason,
        num_tokens: int,
        choice: PairChoice | None,
    ) -> None:
        """Observes a completion that has ended with `num_tokens`: its stages and times, where its prompt was computed,
        and what the router's last `choice` of a pair promised of caches; None: the router made none."""
        model, prompt = self._model, prompt_class(num_prompt_tokens)
        pool = Role.DECODE if timing.prefill_worker in ("", timing.decode_worker) else Role.PREFILL
        for stage, field in STAGES.items():
            self._stage_s.bind(model, lane.value, stage, prompt, pool.value).observe(getattr(timing, field) / 1e3)
        self._prefill_s.observe(timing.prefill_ms / 1e3)
        self._decode_s.observe(timing.decode_ms / 1e3)
        ended = (model, lane.value, prompt, pool.value, reason.value)
        self._completion_s.bind(*ended).observe((timing.first_token_ms + timing.decode_ms) / 1e3)
        if num_tokens > 1:
            self._completion_token_s.bind(*ended).observe(timing.decode_ms / 1e3 / (num_tokens - 1))
        self._count_places(num_prompt_tokens, timing, pool)
        if choice is not None:
            self._count_route(num_prompt_tokens, timing.cached_tokens, choice)

    def _count_places(self, num_prompt_tokens: int, timing: common_pb2.Timing, pool: Role) -> None:
        """Counts prompt tokens by where they were computed, and by where the decode worker decided that they be."""
        cached = min(timing.cached_tokens, num_prompt_tokens)
        computed = num_prompt_tokens - cached
        there = computed if pool is Role.PREFILL else 0
        if timing.prices:
            planned = min(computed, max(0, timing.prices[0].remote_tokens - cached))
            self._planned["prefill worker"].inc(planned)
            self._planned["decode worker"].inc(computed - planned)
            if timing.prices[0].place == "split" and pool is Role.PREFILL:
                there = planned
        self._tokens["cached"].inc(cached)
        self._tokens["prefill worker"].inc(there)
        self._tokens["decode worker"].inc(computed - there)

    def _count_route(self, num_prompt_tokens: int, num_cached: int, choice: PairChoice) -> None:
        """Counts what the index promised of the worker that was to compute the prompt beside what was cached."""
        is_remote, score = bool(choice.prefill), choice.score
        pool = Role.PREFILL if is_remote else Role.DECODE
        promised = score.prefill_cached_tokens if is_remote else score.decode_cached_tokens
        self._routed[pool, "all"].inc(num_prompt_tokens)
        self._routed[pool, "predicted cached"].inc(min(promised, num_prompt_tokens))
        self._routed[pool, "cached"].inc(min(num_cached, num_prompt_tokens))

    def request(self, lane: Lane, num_tokens: int, token_s: float | None, met: bool) -> None:
        """Counts a request that ended with an answer.

        `num_tokens` were generated; `token_s` is the mean time between two of them, None where there was but one.
        """
        self._output_size.observe(num_tokens)
        if token_s is not None:
            self._token_s.observe(token_s)
        self._targets[lane, met].inc()


def prompt_class(num_tokens: int) -> str:
    """Returns the length class of a prompt, as the label `prompt` names it."""
    return _PROMPT_CLASSES[bisect_right(_PROMPT_BOUNDS, num_tokens)]
