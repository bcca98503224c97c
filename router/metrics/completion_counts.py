"""Counts completions and requests that have ended, whether their tokens passed the router or not (lookaside)."""

from __future__ import annotations

import time

from penstock.client.retry import RetryBudget
from penstock.types import FinishReason
from penstock.v1 import common_pb2
from router.admission.interface import RequestUsage
from router.metrics.demand_report import DemandCounter
from router.metrics.metrics import RouterMetrics


class CompletionCounts:
    """Records each event in every place that counts it: metrics, the retry budget, the autoscaler's demand."""

    def __init__(self, metrics: RouterMetrics, retries: RetryBudget, demand: DemandCounter) -> None:
        self.metrics = metrics
        self._demand = demand
        self._retries = retries

    def first_token(self, num_prompt_tokens: int, ttft_s: float) -> None:
        self.metrics.first_token_s.observe(ttft_s)
        self._demand.begin(num_prompt_tokens, ttft_s)

    def completion(self, reason: FinishReason, timing: common_pb2.Timing) -> None:
        """Counts a completion that has ended."""
        metrics = self.metrics
        metrics.succeeded(reason.value)
        metrics.preemptions.inc(timing.num_preemptions)
        metrics.migrations.inc(timing.num_migrations)
        metrics.redispatches.inc(timing.num_redispatches)
        metrics.queue_s.observe(timing.queue_ms / 1e3)

    def request(self, usage: common_pb2.Usage, accepted_s: float, decode_ms: float) -> RequestUsage:
        """Counts a request all of whose completions have ended; `decode_ms` is the decode time of the last one."""
        metrics, now_s = self.metrics, time.monotonic()
        self._retries.succeed(now_s)
        self._demand.end(usage, decode_ms / 1e3)
        metrics.request_s.observe(now_s - accepted_s)
        metrics.prompt_size.observe(usage.prompt_tokens)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.generation_tokens.inc(usage.completion_tokens)
        metrics.cache_queries.inc(usage.prompt_tokens)
        metrics.cache_hits.inc(usage.cached_tokens)
        return RequestUsage(usage.completion_tokens, usage.cached_tokens, decode_ms / 1e3)
