"""Defines the aims of `benchmarks.engine`: how many times as long as this engine the other subjects take. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.common.report import Row
from benchmarks.engine.workload import BATCHES, CONTEXT, PROMPTS, REQUESTS_NAME

OURS, FLOOR, VLLM, BATCHING = "this engine", "bare-torch floor", "vLLM", "transformers, continuous batching"
BARE = "its bare step"
COLD, WARM = "start to first token, nothing built", "start to first token"

Found = Mapping[str, Mapping[str, float]]  # seconds, by workload and subject

AIMS: tuple[tuple[str, str, float], ...] = (
    *((f"decode step, {batch} at {CONTEXT}", FLOOR, 0.75) for batch in BATCHES),
    *((f"decode step, {batch} at {CONTEXT}, whole loop", BARE, 0.97) for batch in BATCHES),
    *((f"decode step, {batch} at {CONTEXT}, whole loop", VLLM, 1.3 if batch == 1 else 1.2) for batch in BATCHES),
    *((f"prompt of {count}, whole loop", VLLM, 1.0) for count in PROMPTS),
    (REQUESTS_NAME, BATCHING, 3.0),
    (COLD, VLLM, 5.0),
    (WARM, VLLM, 5.0),
)


def rows_of(workload: str, seconds: Mapping[str, float]) -> list[Row]:
    """Returns the subjects of a workload, the quickest first, each with this engine as its baseline."""
    scale, unit = _unit(workload)
    ours = seconds.get(OURS)
    return [
        Row(f"{workload}: {name}", took_s * scale, unit, OURS, None if ours is None else ours * scale)
        for name, took_s in sorted(seconds.items(), key=lambda item: item[1])
    ]


def seconds_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the seconds by workload and subject that the rows of a result show: the inverse of `rows_of`."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        workload, _, subject = row["metric"].rpartition(": ")
        if row["baseline"] == OURS:
            found.setdefault(workload, {})[subject] = row["value"] / _unit(workload)[0]
    return found


def _unit(workload: str) -> tuple[float, str]:
    """Returns the unit in which a workload's times are shown, and how many of it are a second."""
    return (1.0, "s") if workload in (COLD, WARM) else (1e3, "ms")


def aim_rows(found: Found) -> list[Row]:
    """Compares workloads that both subjects were measured on with their aims; a ratio of at least 1 meets the aim."""
    return [
        Row(f"{workload}: {subject} / {OURS}", found[workload][subject] / found[workload][OURS], "x", "aim", factor)
        for workload, subject, factor in AIMS
        if {subject, OURS} <= found.get(workload, {}).keys()
    ]
