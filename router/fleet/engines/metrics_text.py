"""Reads an engine's load from the text of its /metrics, by vLLM's names. Pure."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.types import CacheStats, StepTotals, WorkerLoad

MAX_TEXT_BYTES = 4 << 20
_SAMPLE = re.compile(r"(?m)^(vllm:[a-z_]+|process_start_time_seconds)(?:\{(.*)\})? ([0-9eE.+-]+|NaN|[+-]Inf)$")
_LABEL = re.compile(r'(?<![a-z_])([a-z_]+)="([^"]*)"')  # takes time in proportion to the text
_COUNTED = re.compile("running|waiting|usage|prefix_cache|_tokens|time_seconds|latency_seconds|process_start")
_MAX_BLOCKS = 1 << 32
_MAX_VALUE = 1e15  # keeps sums and products of values far from infinity


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Holds the figures of one scrape, summed over an engine's ranks."""

    values: Mapping[str, float]
    block_size: int | None = None
    num_blocks: int | None = None

    def get(self, name: str) -> float:
        return self.values.get(f"vllm:{name}", 0.0)

    @property
    def started_s(self) -> float:
        """When the process started; 0 if it does not say."""
        return self.values.get("process_start_time_seconds", 0.0)


def read_metrics(text: str) -> EngineMetrics:
    """Parses the lines that it knows and ignores all others."""
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
    """Returns the value; 0 for anything that is not a number of at least 0."""
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
    """Turns an engine's scrapes into the load reports that routing learns from."""

    def __init__(self) -> None:
        self._before: EngineMetrics | None = None
        self._prefill, self._decode = StepTotals(), StepTotals()

    def load(self, now: EngineMetrics, queued_tokens: int, num_open: int) -> WorkerLoad:
        """`queued_tokens` and `num_open` are what this router has there: tokens of prompts without a first token, and
        requests."""
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
        """A prompt counts as one step: the engine does not say in how many it was computed."""
        steps = _grown(before, now, "request_prefill_time_seconds_count")
        tokens = _grown(before, now, "request_prefill_kv_computed_tokens_sum")
        seconds = _grown(before, now, "request_prefill_time_seconds_sum")
        if steps and tokens:
            self._prefill = _added(self._prefill, steps, tokens, seconds)

    def _learn_decode(self, before: EngineMetrics, now: EngineMetrics) -> None:
        """A step takes as long as its tokens wait for each other."""
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
