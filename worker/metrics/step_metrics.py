"""Metrics that the step loop observes: duration and size of steps, and how many proposals were accepted."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from engine.step.speculation.proposal import ProposalKind
from penstock.v1 import worker_pb2

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class StepMetrics:
    """Observes the distributions of steps. Only the step loop's thread observes; scrapes read concurrently."""

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


class SpeculationMetrics:
    """Counts proposed and accepted tokens under vLLM's names. The step loop observes; scrapes read concurrently."""

    def __init__(self, described: worker_pb2.WorkerDescription) -> None:
        self.registry = CollectorRegistry()
        self._labels = {
            "model_name": described.model,
            "worker": described.worker_id,
            "role": described.role,
        }

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(name, help_text, [*self._labels, *labels], registry=self.registry)

        self._drafts = counter("vllm:spec_decode_num_drafts", "Proposals that were verified", "proposer")
        self._proposed = counter("vllm:spec_decode_num_draft_tokens", "Proposed tokens that were verified", "proposer")
        self._accepted = counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Proposed tokens that were right; each has saved its sequence a step",
            "proposer",
        )
        self._by_position = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Proposed tokens that were right, by their place in the proposal",
            "proposer",
            "position",
        )

    def observe(self, kind: ProposalKind, num_proposed: int, num_accepted: int) -> None:
        """Observes a proposal whose first `num_accepted` tokens were accepted."""
        labels = self._labels | {"proposer": kind.value}
        self._drafts.labels(**labels).inc()
        self._proposed.labels(**labels).inc(num_proposed)
        self._accepted.labels(**labels).inc(num_accepted)
        for position in range(num_accepted):
            self._by_position.labels(**labels, position=str(position)).inc()
