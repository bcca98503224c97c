"""What `benchmarks.engine` is to reach: how many times as long others take as this engine does. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.engine_asks import BATCHES, CONTEXT, PROMPTS, REQUESTS_NAME
from benchmarks.report import Row

OURS, FLOOR, VLLM, BATCHING = "this engine", "bare-torch floor", "vLLM", "transformers, continuous batching"
COLD, WARM = "start to first token, nothing built", "start to first token"

Found = Mapping[str, Mapping[str, float]]  # seconds, by workload and subject

AIMS: tuple[tuple[str, str, float], ...] = (
    *((f"decode step, {batch} at {CONTEXT}", FLOOR, 0.75) for batch in BATCHES),
    *((f"decode step, {batch} at {CONTEXT}, whole loop", VLLM, 1.3 if batch == 1 else 1.5) for batch in BATCHES),
    *((f"prompt of {count}, whole loop", VLLM, 1.3) for count in PROMPTS),
    (REQUESTS_NAME, BATCHING, 3.0),
    (COLD, VLLM, 5.0),
    (WARM, VLLM, 5.0),
)


def rows_of(workload: str, seconds: Mapping[str, float]) -> list[Row]:
    """Quickest first, each beside this engine."""
    scale, unit = (1.0, "s") if workload in (COLD, WARM) else (1e3, "ms")
    ours = seconds.get(OURS)
    return [
        Row(f"{workload}: {name}", took_s * scale, unit, OURS, None if ours is None else ours * scale)
        for name, took_s in sorted(seconds.items(), key=lambda item: item[1])
    ]


def aim_rows(found: Found) -> list[Row]:
    """Of those workloads that both were measured on; a ratio of 1 and more has reached its aim."""
    return [
        Row(f"{workload}: {subject} / {OURS}", found[workload][subject] / found[workload][OURS], "x", "aim", factor)
        for workload, subject, factor in AIMS
        if {subject, OURS} <= found.get(workload, {}).keys()
    ]
