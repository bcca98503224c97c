"""Tests metrics that workers declare: they travel with the load, and the router exports them by worker."""

from __future__ import annotations

from penstock import wire
from penstock.metrics.worker_metrics import METRICS, PREEMPTED_TOKENS, PREEMPTIONS, WorkerMetrics
from penstock.types import WorkerId, WorkerLoad
from router.metrics.metrics import RouterMetrics


def test_values_travel_with_the_load_and_are_exported_by_worker() -> None:
    values = WorkerMetrics()
    values.add(PREEMPTIONS)
    values.add(PREEMPTIONS, 2.0)
    values.add(PREEMPTED_TOKENS, 640)
    load = wire.load_from_wire(wire.load_to_wire(WorkerLoad(metrics={**values.values(), "of_a_newer_worker": 1.0})))
    metrics = RouterMetrics("m")
    metrics.watch_workers(lambda: {WorkerId("decode-0"): load, WorkerId("decode-1"): WorkerLoad()})
    text = metrics.render().decode()
    assert 'penstock:worker_preemptions_total{model_name="m",worker="decode-0"} 3.0' in text
    assert 'penstock:worker_preempted_tokens_total{model_name="m",worker="decode-0"} 640.0' in text
    assert 'worker="decode-1"' not in text
    assert "newer" not in text


def test_names_are_unique_and_described() -> None:
    assert all(name == metric.name and metric.help_text for name, metric in METRICS.items())
