"""Reports this router's traffic to the controller's autoscaler about once a second.

Counts are totals since the router started, so a lost report only delays the figures. While the Admin service is
unreachable, no reports are sent or queued; the controller does not take missing reports for a lack of traffic.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from penstock.config.autoscaler import SloConfig
from penstock.rpc.server import Dial, log_level
from penstock.types import Epoch
from penstock.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from router.fleet.backoff import Backoff

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0


class DemandCounter:
    """Counts arrivals, first tokens and ends of requests, which dispatch reports to it."""

    def __init__(self, slo: SloConfig) -> None:
        self._slo = slo
        self.counts = admin_pb2.DemandReport()

    def arrive(self, num_prompt_tokens: int) -> None:
        self.counts.requests += 1
        self.counts.prompt_tokens += num_prompt_tokens
        self.counts.squared_prompt_tokens += num_prompt_tokens * num_prompt_tokens

    def begin(self, num_prompt_tokens: int, ttft_s: float) -> None:
        """Counts a request's first token."""
        self.counts.first_tokens += 1
        self.counts.first_tokens_in_time += ttft_s <= self._slo.first_token_s(num_prompt_tokens)

    def end(self, usage: common_pb2.Usage, decode_s: float) -> None:
        """Counts an ended request. `decode_s` is that of the completion that ended last; with several completions it
        is divided by the tokens of all of them.
        """
        self.counts.ended_prompt_tokens += usage.prompt_tokens
        self.counts.cached_tokens += min(usage.cached_tokens, usage.prompt_tokens)
        if usage.completion_tokens > 1:
            self.counts.ended += 1
            self.counts.ended_in_time += decode_s / (usage.completion_tokens - 1) <= self._slo.itl_s

    def report(self, router: str, epoch: Epoch, num_waiting: int, waiting_tokens: int) -> admin_pb2.DemandReport:
        report = admin_pb2.DemandReport()
        report.CopyFrom(self.counts)
        report.router, report.epoch = router, epoch
        report.waiting, report.waiting_tokens = num_waiting, waiting_tokens
        return report


async def report_demand(address: str, dial: Dial, report: Callable[[], admin_pb2.DemandReport]) -> None:
    """Sends reports to the Admin service at `address` until cancelled."""
    backoff = Backoff(random.Random())

    async def reports() -> AsyncIterator[admin_pb2.DemandReport]:
        while True:
            yield report()
            backoff.reset()
            await asyncio.sleep(_INTERVAL_S)

    while True:
        async with dial(address) as channel:
            try:
                await admin_pb2_grpc.AdminStub(channel).ReportDemand(reports())
            except grpc.RpcError as error:
                log.log(log_level(error), "reporting demand to the admin service failed: %s", error.details())  # type: ignore[attr-defined]
        await asyncio.sleep(backoff.next_s())
