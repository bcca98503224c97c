"""Metrics of requests that have ended: the time of each stage by lane and prompt length, and whether targets were met.

vLLM's names carry vLLM's labels, so that its dashboards work. What they lack (lanes, prompt lengths, the place that
computed a prompt) is under `penstock:`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Histogram

from penstock.types import Lane
from penstock.v1 import common_pb2

_LABELS = ["model_name"]
_STAGE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 131072)
_PROMPT_BOUNDS = (1024, 8192, 32768)  # tokens: a prompt below the first has the first class
_PROMPT_CLASSES = ("below 1k", "1k to 8k", "8k to 32k", "32k and more")
STAGES: Mapping[str, str] = MappingProxyType(
    {"queue": "queue_ms", "prefill": "prefill_ms", "transfer": "transfer_ms", "decode": "decode_ms"}
)
"""Each stage of a completion and the field of `Timing` that holds its milliseconds."""


class RequestMetrics:
    """Binds its labels once. Called on the router's event loop."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", help_text, _LABELS, buckets=buckets, registry=registry).labels(model)

        def counter(name: str, help_text: str, label: str) -> Counter:
            return Counter(f"penstock:{name}", help_text, [*_LABELS, label], registry=registry)

        self._prefill_s = histogram("request_prefill_time_seconds", "First chunk scheduled to first token", _STAGE_S)
        self._decode_s = histogram("request_decode_time_seconds", "First token sent to last token sent", _STAGE_S)
        self._token_s = histogram(
            "request_time_per_output_token_seconds", "Mean time between two tokens of a completion", _TOKEN_S
        )
        self._output_size = histogram("request_generation_tokens", "Tokens generated for a request", _TOKENS)
        stages = Histogram(
            "penstock:stage_seconds",
            "Time of a completion's stages",
            [*_LABELS, "lane", "stage"],
            buckets=_STAGE_S,
            registry=registry,
        )
        first_tokens = Histogram(
            "penstock:time_to_first_token_seconds",
            "Accepted to first token, by lane and prompt length in tokens",
            [*_LABELS, "lane", "prompt"],
            buckets=_STAGE_S,
            registry=registry,
        )
        targets = Counter(
            "penstock:request_targets",
            "Requests that ended with an answer, by whether they met the targets of the SLO",
            [*_LABELS, "lane", "result"],
            registry=registry,
        )
        tokens = counter("prompt_tokens_by_place", "Prompt tokens by where their KV came from", "place")
        self._stage_s = {(lane, stage): stages.labels(model, lane.value, stage) for lane in Lane for stage in STAGES}
        self._first_token_s = {
            (lane, name): first_tokens.labels(model, lane.value, name) for lane in Lane for name in _PROMPT_CLASSES
        }
        self._targets = {
            (lane, met): targets.labels(model, lane.value, "met" if met else "missed")
            for lane in Lane
            for met in (True, False)
        }
        self._tokens = {place: tokens.labels(model, place) for place in ("cached", "prefill worker", "decode worker")}

    def first_token(self, lane: Lane, num_prompt_tokens: int, ttft_s: float) -> None:
        """Observes the time to a completion's first token."""
        self._first_token_s[lane, prompt_class(num_prompt_tokens)].observe(ttft_s)

    def completion(self, lane: Lane, num_prompt_tokens: int, timing: common_pb2.Timing) -> None:
        """Observes the stages of a completion that has ended, and where its prompt was computed."""
        for stage, field in STAGES.items():
            self._stage_s[lane, stage].observe(getattr(timing, field) / 1e3)
        self._prefill_s.observe(timing.prefill_ms / 1e3)
        self._decode_s.observe(timing.decode_ms / 1e3)
        cached = min(timing.cached_tokens, num_prompt_tokens)
        remote = timing.prefill_worker not in ("", timing.decode_worker)
        self._tokens["cached"].inc(cached)
        self._tokens["prefill worker" if remote else "decode worker"].inc(num_prompt_tokens - cached)

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
