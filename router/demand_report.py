"""What this router's traffic is like, told to the controller's autoscaler about once a second.

Counts are whole since the router started, so that a report that is lost costs nothing but its moment. While the Admin
service is away nothing is told and nothing waits: the controller takes silence for silence, not for quiet.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from penstock.autoscaler_config import SloConfig
from penstock.grpc_server import Dial, log_level
from penstock.types import Epoch
from penstock.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from router.backoff import Backoff

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0


class DemandCounter:
    """Owns the counts; `generation` tells it what happens to requests."""

    def __init__(self, slo: SloConfig) -> None:
        self._slo = slo
        self.counts = admin_pb2.DemandReport()

    def arrive(self, num_prompt_tokens: int) -> None:
        self.counts.requests += 1
        self.counts.prompt_tokens += num_prompt_tokens
        self.counts.squared_prompt_tokens += num_prompt_tokens * num_prompt_tokens

    def begin(self, num_prompt_tokens: int, ttft_s: float) -> None:
        """The first token has come."""
        self.counts.first_tokens += 1
        self.counts.first_tokens_in_time += ttft_s <= self._slo.first_token_s(num_prompt_tokens)

    def end(self, usage: common_pb2.Usage, decode_s: float) -> None:
        """Of several completions at once the last one's time is held against the tokens of all."""
        self.counts.ended_prompt_tokens += usage.prompt_tokens
        self.counts.cached_tokens += min(usage.cached_tokens, usage.prompt_tokens)
        if usage.completion_tokens > 1:
            self.counts.ended += 1
            self.counts.ended_in_time += decode_s / (usage.completion_tokens - 1) <= self._slo.itl_s

    def report(self, router: str, epoch: Epoch, num_waiting: int) -> admin_pb2.DemandReport:
        report = admin_pb2.DemandReport()
        report.CopyFrom(self.counts)
        report.router, report.epoch, report.waiting = router, epoch, num_waiting
        if self.counts.requests:
            report.waiting_tokens = num_waiting * self.counts.prompt_tokens // self.counts.requests
        return report


async def report_demand(address: str, dial: Dial, report: Callable[[], admin_pb2.DemandReport]) -> None:
    """Until cancelled."""
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
                log.log(log_level(error), "telling the admin service of demand: %s", error.details())  # type: ignore[attr-defined]
        await asyncio.sleep(backoff.next_s())
