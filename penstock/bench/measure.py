"""Measures every point of a sweep at one endpoint: calibrates texts, warms up, sends, and collects the result."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from penstock.bench.driver.endpoint import Endpoint, StreamLog
from penstock.bench.driver.progress import ShownProgress
from penstock.bench.driver.run import LiveCounts, run_plan
from penstock.bench.results.record import Ending
from penstock.bench.results.result_file import BenchResult, PointResult, make_point
from penstock.bench.results.slo import SloSet
from penstock.bench.workloads.plan import LoadPlan, LoadRequest, PromptBlocks, Source
from penstock.bench.workloads.prompts import TOKEN_IDS, PromptWriter
from penstock.bench.workloads.schedule import Arrivals, Extras, schedule
from penstock.errors import Unavailable

_PROBE_TOKENS = (64, 320)
_MAX_WARM_UP_TOKENS = 16  # warming up needs no long answers


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """The measurements to make. Each point has its own prompts, which no earlier point has put into a cache."""

    source: Source
    points: Sequence[Arrivals]
    slos: Sequence[SloSet] = ()
    extras: Extras = field(default_factory=Extras)
    seed: int = 0
    warm_up: int = 3  # number of requests sent first, one after another, and not counted
    token_ids: range = TOKEN_IDS
    words_per_token: float = 1.0
    max_requests_s: float | None = None  # how long requests arrive; with a rate it determines the number of requests
    is_quiet: bool = False


async def measure(spec: SweepSpec, endpoint: Endpoint) -> list[PointResult]:
    """Measures the points one by one. Raises Unavailable if the warm-up fails; later failures are only counted."""
    results = []
    for index, arrivals in enumerate(spec.points):
        source = _source_for(spec, arrivals)
        plan = schedule(source, arrivals, spec.extras, spec.seed)
        await warm_up(plan, endpoint, spec, f"{spec.seed}/warm-up {index}")
        writer = PromptWriter(f"{spec.seed}/{index}", spec.token_ids, spec.words_per_token)
        counts = LiveCounts(plan.num_requests)
        async with ShownProgress(arrivals.name, counts, spec.is_quiet):
            run = await run_plan(plan, endpoint, writer, arrivals.concurrency, counts)
        given = {"rate": arrivals.rate, "speed": arrivals.speed, "concurrency": arrivals.concurrency}
        offered = {name: float(value) for name, value in given.items() if value is not None}
        results.append(make_point(arrivals.name, offered, run, spec.slos))
        if run.is_interrupted:
            break
    return results


def _source_for(spec: SweepSpec, arrivals: Arrivals) -> Source:
    """Returns the source, cut to the requests that arrive within `max_requests_s` if it is set."""
    if spec.max_requests_s is None or arrivals.rate is None:
        return spec.source
    count = max(1, round(arrivals.rate * spec.max_requests_s))
    drafts = sorted(spec.source.drafts, key=lambda draft: draft.arrival_s)[:count]
    return Source(spec.source.name, tuple(drafts), spec.source.gaps_are_pauses, spec.source.notes)


async def warm_up(plan: LoadPlan, endpoint: Endpoint, spec: SweepSpec, salt: str) -> None:
    """Sends the first requests of a plan with different prompts. Raises Unavailable with the server's answer."""
    writer = PromptWriter(salt, spec.token_ids, spec.words_per_token)
    for index, request in zip(range(spec.warm_up), plan.requests(), strict=False):
        prompt = request.prompt
        if not isinstance(prompt, PromptBlocks):  # a dataset's text would then be cached when it is measured
            prompt = PromptBlocks(((index, 1),), _PROBE_TOKENS[0], _PROBE_TOKENS[0])
        log, short = StreamLog(), min(request.num_output_tokens, _MAX_WARM_UP_TOKENS)
        await endpoint.send(endpoint.encode(LoadRequest(0, prompt, short, lane=request.lane), writer), log)
        if log.ending is not None and log.ending.is_failure and log.ending not in (Ending.SHORT, Ending.REFUSED):
            raise Unavailable(f"the first request failed: {log.detail}")


async def words_per_token(endpoint: Endpoint, seed: int) -> float:
    """Measures how many common words the server counts as one token. It sends prompts of two lengths, whose difference
    excludes the tokens that a chat template adds. Returns 1 if the server counts no tokens.
    """
    writer, counted = PromptWriter(f"{seed}/calibration"), []
    for index, num_words in enumerate(_PROBE_TOKENS):
        log = StreamLog()
        prompt = PromptBlocks(((index, 1),), num_words, num_words)
        await endpoint.send(endpoint.encode(LoadRequest(0, prompt, 1), writer), log)
        if log.ending is not None and log.ending.is_failure and log.ending is not Ending.SHORT:
            raise Unavailable(f"the calibration of texts failed: {log.detail}")
        if log.prompt_tokens is None:
            return 1.0
        counted.append(log.prompt_tokens)
    return (_PROBE_TOKENS[1] - _PROBE_TOKENS[0]) / max(1, counted[1] - counted[0])


def make_result(
    spec: SweepSpec, points: Sequence[PointResult], *, target: str, label: str = "", settings: Mapping[str, Any]
) -> BenchResult:
    """Returns the result of a sweep, including the machine that ran the generator."""
    notes = list(spec.source.notes)
    if len(points) > 1 and any(not isinstance(draft.prompt, PromptBlocks) for draft in spec.source.drafts):
        notes.append("every point sends the same texts, which prefix caches know from the second point on")
    return BenchResult(
        label=label,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        target=target,
        workload=f"{spec.source.name}, {len(spec.source.drafts)} requests",
        notes=notes,
        settings=dict(settings),
        machine={
            "generator's python": platform.python_version(),
            "generator's machine": platform.machine(),
            "generator's cores": len(os.sched_getaffinity(0)),
        },
        slos=list(spec.slos),
        points=list(points),
    )
