"""Distributions over steps: how long they take and how much they compute."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from penstock.v1 import worker_pb2

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class StepMetrics:
    """Binds its labels once. One thread observes, the worker's step loop; scrapes read beside it."""

    def __init__(self, described: worker_pb2.WorkerDescription) -> None:
        self.registry = CollectorRegistry()
        names = {"model_name": described.model, "worker": described.worker_id, "role": described.role}

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, help_text, list(names), buckets=buckets, registry=self.registry)
            return family.labels(**names)

        self._seconds = histogram("penstock:worker_step_duration_seconds", "Duration of a step", _STEP_S)
        self._tokens = histogram("vllm:iteration_tokens_total", "Tokens computed in a step", _TOKENS)
        self._sequences = histogram("penstock:worker_batch_size", "Sequences in a step", _SEQUENCES)

    def observe(self, num_sequences: int, num_tokens: int, elapsed_s: float) -> None:
        """Observes a step that has ended."""
        self._seconds.observe(elapsed_s)
        self._tokens.observe(num_tokens)
        self._sequences.observe(num_sequences)
