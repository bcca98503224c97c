"""Computes an engine's load from the text of its /metrics, which use vLLM's names. Pure."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.types import CacheStats, StepTotals, WorkerLoad

MAX_TEXT_BYTES = 4 << 20
_SAMPLE = re.compile(r"(?m)^(vllm:[a-z_]+|process_start_time_seconds)(?:\{(.*)\})? ([0-9eE.+-]+|NaN|[+-]Inf)$")
_LABEL = re.compile(r'(?<![a-z_])([a-z_]+)="([^"]*)"')  # the lookbehind keeps the search linear in the text
_COUNTED = re.compile("running|waiting|usage|prefix_cache|_tokens|time_seconds|latency_seconds|process_start")
_MAX_BLOCKS = 1 << 32
_MAX_VALUE = 1e15  # keeps sums and products of values far from infinity


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """The figures of one scrape, summed over an engine's ranks."""

    values: Mapping[str, float]
    block_size: int | None = None
    num_blocks: int | None = None

    def get(self, name: str) -> float:
        return self.values.get(f"vllm:{name}", 0.0)

    @property
    def started_s(self) -> float:
        """Returns when the process started (Unix time); 0 if it does not say."""
        return self.values.get("process_start_time_seconds", 0.0)


def read_metrics(text: str) -> EngineMetrics:
    """Parses the metrics that `LoadReader` needs and ignores all other lines."""
    sums: dict[str, float] = defaultdict(float)
    size = blocks = None
    for name, labels, value in _SAMPLE.findall(text):
        if name == "vllm:cache_config_info":
            known = dict(_LABEL.findall(labels))
            size, blocks = _count(known.get("block_size")), _count(known.get("num_gpu_blocks"))
        elif _COUNTED.search(name):
            sums[name] = min(sums[name] + _number(value), _MAX_VALUE)
    return EngineMetrics(dict(sums), size, blocks)


def _number(text: str) -> float:
    """Returns the number, or 0 if the text is not a finite positive number."""
    try:
        found = float(text)
    except ValueError:
        return 0.0
    return found if math.isfinite(found) and found > 0 else 0.0


def _count(text: str | None) -> int | None:
    if text is None or not text.isascii() or not text.isdigit() or not 0 < int(text[:11]) < _MAX_BLOCKS:
        return None
    return int(text[:11])


class LoadReader:
    """Turns an engine's scrapes into load reports in the form that our own workers send."""

    def __init__(self) -> None:
        self._before: EngineMetrics | None = None
        self._prefill, self._decode = StepTotals(), StepTotals()

    def load(self, now: EngineMetrics, queued_tokens: int, num_open: int) -> WorkerLoad:
        """Returns the load since the previous call. `queued_tokens` are the prompt tokens of this router's requests at
        the engine that have no first token yet, and `num_open` is the number of its requests there.
        """
        before = self._before or now
        self._before = now
        self._learn_prefill(before, now)
        self._learn_decode(before, now)
        total, size = now.num_blocks or 0, now.block_size or 1
        return WorkerLoad(
            num_running=max(0, int(now.get("num_requests_running"))),
            num_waiting=max(0, int(now.get("num_requests_waiting"))),
            free_pages=max(0, min(total, round(total * (1.0 - now.get("kv_cache_usage_perc"))))),
            total_pages=total,
            queued_prefill_tokens=queued_tokens,
            step_s=self._step_s,
            prefill_tokens_per_s=self._tokens_per_s,
            cache=CacheStats(
                queries=int(now.get("prefix_cache_queries_total")) // size,
                device_hits=int(now.get("prefix_cache_hits_total")) // size,
            ),
            prefill_steps=self._prefill,
            decode_steps=self._decode,
            num_open=num_open,
        )

    @property
    def _step_s(self) -> float:
        return self._decode.seconds / self._decode.steps if self._decode.steps else 0.0

    @property
    def _tokens_per_s(self) -> float:
        return self._prefill.tokens / self._prefill.seconds if self._prefill.seconds else 0.0

    def _learn_prefill(self, before: EngineMetrics, now: EngineMetrics) -> None:
        """Counts each prompt as one step: the engine does not say in how many steps it was computed."""
        steps = _grown(before, now, "request_prefill_time_seconds_count")
        tokens = _grown(before, now, "request_prefill_kv_computed_tokens_sum")
        seconds = _grown(before, now, "request_prefill_time_seconds_sum")
        if steps and tokens:
            self._prefill = _added(self._prefill, steps, tokens, seconds)

    def _learn_decode(self, before: EngineMetrics, now: EngineMetrics) -> None:
        """Takes the mean inter-token latency as the time of a step."""
        steps = _grown(before, now, "iteration_tokens_total_count")
        tokens = _grown(before, now, "inter_token_latency_seconds_count")
        waited_s = _grown(before, now, "inter_token_latency_seconds_sum")
        if steps and tokens:
            self._decode = _added(self._decode, steps, tokens, steps * waited_s / tokens)


def _grown(before: EngineMetrics, now: EngineMetrics, name: str) -> float:
    return max(0.0, now.get(name) - before.get(name))


def _added(totals: StepTotals, steps: float, tokens: float, seconds: float) -> StepTotals:
    return replace(
        totals,
        steps=totals.steps + int(steps),
        tokens=totals.tokens + int(tokens),
        seconds=totals.seconds + seconds,
    )
