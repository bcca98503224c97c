"""Counts ended completions and requests, including lookaside ones, whose tokens do not pass the router."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence

from penstock.client.retry import RetryBudget
from penstock.types import FinishReason
from penstock.v1 import common_pb2
from router.admission.interface import RequestUsage
from router.metrics.demand_report import DemandCounter
from router.metrics.metrics import RouterMetrics
from router.metrics.request_metrics import EndedRequest
from router.prepared_request import PreparedRequest
from router.routing.policy.interface import PairChoice
from router.tracing.stages import EndedCompletion, WorkerLeg, stages_ms

log = logging.getLogger(__name__)


class CompletionCounts:
    """Records first tokens and ends in the metrics, among them the recent requests, in the retry budget and in the
    autoscaler's demand."""

    def __init__(self, metrics: RouterMetrics, retries: RetryBudget, demand: DemandCounter) -> None:
        self.metrics = metrics
        self._demand = demand
        self._retries = retries
        self._numbers = itertools.count(1)

    def first_token(self, request: PreparedRequest, ttft_s: float) -> None:
        num_prompt_tokens = len(request.token_ids)
        self.metrics.requests.first_token((request.lane._value_, num_prompt_tokens, request.tenant, ttft_s))
        self._demand.begin(num_prompt_tokens, ttft_s)

    def completion(
        self,
        request: PreparedRequest,
        reason: FinishReason,
        timing: common_pb2.Timing,
        num_tokens: int,
        *,
        index: int = 0,
        admitted_s: float = 0.0,
        legs: Sequence[WorkerLeg] = (),
        choices: Sequence[PairChoice] = (),
    ) -> EndedCompletion:
        """Counts, logs and returns completion `index` of a request, which ended after `num_tokens` tokens.

        `legs` are the decode workers that served it and `choices` the router's choices of worker pairs. The caller must
        not change these or `timing` afterwards.
        """
        trace, accepted_s = request.trace, request.accepted_s
        ended = EndedCompletion(
            next(self._numbers),
            request.request_id,
            index,
            request.lane,
            reason,
            len(request.token_ids),
            num_tokens,
            timing,
            accepted_s,
            request.prepared_s,
            admitted_s,
            time.time() - (time.monotonic() - accepted_s),
            legs,
            choices,
            trace.trace_id if trace is not None else "",
            request.call_id,
        )
        metrics = self.metrics
        metrics.recent.keep(ended)
        metrics.requests.completion((ended, request.tenant))
        if trace is not None:
            trace.completions.append(ended)
        if log.isEnabledFor(logging.DEBUG):
            stages = ", ".join(f"{name} {ms:.1f} ms" for name, ms in stages_ms(ended).items())
            log.debug("%s [%d] %s: %s", request.request_id, index, reason, stages)
        return ended

    def request(
        self, request: PreparedRequest, usage: common_pb2.Usage, last: common_pb2.Timing | None
    ) -> RequestUsage:
        """Counts a request whose completions have all ended. The caller counts its generated tokens.

        `last` is the timing of the completion that ended last.
        """
        now_s = time.monotonic()
        timing = last if last is not None else common_pb2.Timing()
        decode_s = timing.decode_ms / 1e3
        self._retries.succeed(now_s)
        self._demand.end(usage, decode_s)
        self.metrics.requests.request(
            EndedRequest(
                request.lane,
                request.tenant,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                timing.first_token_ms,
                timing.decode_ms,
                now_s - request.accepted_s,
            )
        )
        if request.trace is not None:
            request.trace.end()
        return RequestUsage(usage.completion_tokens, usage.cached_tokens, decode_s)
