"""Sends the chains of a plan: at their due times in the open loop, or as slots become free in the closed loop.

`GeneratorLag` measures the generator itself: how long its event loop was kept from reading.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from penstock.bench.driver.endpoint import Endpoint, StreamLog
from penstock.bench.results.record import Ending, RequestRecord, RunRecord
from penstock.bench.workloads.plan import Chain, LoadPlan, LoadRequest
from penstock.bench.workloads.prompts import PromptWriter

_ENCODED_AHEAD = 64  # number of chains whose first request is encoded in advance
_LAG_PERIOD_S = 0.01


@dataclass(slots=True)
class LiveCounts:
    """The figures of a progress line; only the run updates them."""

    total: int
    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def in_flight(self) -> int:
        return self.sent - self.done


@dataclass(slots=True)
class _Run:
    """The state of one run."""

    endpoint: Endpoint
    writer: PromptWriter
    counts: LiveCounts
    started_s: float = field(default_factory=time.perf_counter)
    records: list[RequestRecord] = field(default_factory=list)

    def now_s(self) -> float:
        return time.perf_counter() - self.started_s

    def encode(self, request: LoadRequest) -> Any:
        return self.endpoint.encode(request, self.writer)

    async def sleep_until(self, due_s: float) -> None:
        delay_s = due_s - self.now_s()
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    async def send(self, request: LoadRequest, due_s: float, encoded: Any) -> float:
        """Sends one request and follows it to its end. Returns the time when it was sent."""
        log = StreamLog(request.cancel_after)
        self.counts.sent += 1
        try:
            await self.endpoint.send(encoded, log)
        except asyncio.CancelledError:
            log.fail(Ending.CANCELLED, "the run was interrupted")
            raise
        finally:
            log.finish(None)
            record = record_of(request, log, self.started_s, due_s)
            self.records.append(record)
            self.counts.done += 1
            self.counts.failed += record.ending.is_failure
            self.counts.tokens += log.completion_tokens or log.num_pieces
        return log.sent_s - self.started_s

    async def follow(self, chain: Chain, due_s: float, first: Any) -> None:
        """Sends a chain's requests one after another, even if earlier ones failed."""
        encoded, sent_s = first, 0.0
        for index, request in enumerate(chain.requests):
            if index:
                due_s = max(sent_s + request.gap_s, self.now_s() + request.pause_s)
                encoded = self.encode(request)
                await self.sleep_until(due_s)
            sent_s = await self.send(request, due_s, encoded)


async def run_plan(
    plan: LoadPlan,
    endpoint: Endpoint,
    writer: PromptWriter,
    concurrency: int | None = None,
    counts: LiveCounts | None = None,
) -> RunRecord:
    """Sends the whole plan and returns the record of the run. With `concurrency`, that many clients take chain after
    chain.

    If the task is cancelled, it cancels the requests in flight and returns a record marked as interrupted.
    """
    counts = counts or LiveCounts(plan.num_requests)
    is_interrupted = False
    with without_garbage_collection():
        async with GeneratorLag() as lag:
            run = _Run(endpoint, writer, counts)
            try:
                if concurrency is None:
                    await _open_loop(run, plan)
                else:
                    await _closed_loop(run, plan, concurrency)
            except asyncio.CancelledError:
                is_interrupted = True
            elapsed_s = run.now_s()
    return RunRecord(
        tuple(sorted(run.records, key=lambda each: each.number)), elapsed_s, tuple(lag.lags_s), is_interrupted
    )


async def _open_loop(run: _Run, plan: LoadPlan) -> None:
    """Sends each chain at its due time, however many are in flight."""
    encoded: list[Any] = [run.encode(chain.requests[0]) for chain in plan.chains[:_ENCODED_AHEAD]]
    run.started_s = time.perf_counter()  # encoding the first requests does not count as being late
    async with asyncio.TaskGroup() as tasks:
        for index, chain in enumerate(plan.chains):
            await run.sleep_until(chain.due_s)
            tasks.create_task(run.follow(chain, chain.due_s, encoded[index]))
            encoded[index] = None
            await asyncio.sleep(0)  # lets the request leave before the next one is encoded
            if len(encoded) < len(plan.chains):
                encoded.append(run.encode(plan.chains[len(encoded)].requests[0]))


async def _closed_loop(run: _Run, plan: LoadPlan, concurrency: int) -> None:
    left: Iterator[Chain] = iter(plan.chains)

    async def client() -> None:
        for chain in left:
            encoded = run.encode(chain.requests[0])
            await run.follow(chain, run.now_s(), encoded)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(plan.chains))):
            tasks.create_task(client())


def record_of(request: LoadRequest, log: StreamLog, started_s: float, due_s: float) -> RequestRecord:
    """Converts a stream's log to a record, with times since the start of the run."""
    assert log.end_s is not None
    assert log.ending is not None
    times_s = log.piece_times_s
    return RequestRecord(
        number=request.number,
        lane=request.lane.value if request.lane else "",
        due_s=due_s,
        sent_s=log.sent_s - started_s,
        ending=log.ending,
        detail=log.detail,
        ttft_s=times_s[0] - log.sent_s if times_s else None,
        e2e_s=log.end_s - log.sent_s,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(times_s)),
        planned_input_tokens=getattr(request.prompt, "num_tokens", None),
        planned_output_tokens=request.num_output_tokens,
        prompt_tokens=log.prompt_tokens,
        cached_tokens=log.cached_tokens,
        output_tokens=log.completion_tokens if log.completion_tokens is not None else log.num_pieces,
    )


class GeneratorLag:
    """Samples how late the event loop's timers fire: a piece that arrives during such a delay gets a timestamp that is
    too late.
    """

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def _sample(self) -> None:
        while True:
            begun_s = time.perf_counter()
            await asyncio.sleep(_LAG_PERIOD_S)
            self.lags_s.append(max(0.0, time.perf_counter() - begun_s - _LAG_PERIOD_S))

    async def __aenter__(self) -> GeneratorLag:
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collects garbage before and after a run but not during it, since a collection would stop the loop for
    milliseconds.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()
