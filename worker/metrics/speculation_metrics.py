"""Counts what becomes of proposed tokens, under vLLM's names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from penstock.v1 import worker_pb2


class SpeculationMetrics:
    """Binds its labels once. One thread observes, the worker's step loop; scrapes read beside it."""

    def __init__(self, described: worker_pb2.WorkerDescription) -> None:
        self.registry = CollectorRegistry()
        self._labels = {
            "model_name": described.model,
            "worker": described.worker_id,
            "role": described.role,
        }

        def counter(name: str, help_text: str) -> Counter:
            return Counter(name, help_text, list(self._labels), registry=self.registry).labels(**self._labels)

        self._drafts = counter("vllm:spec_decode_num_drafts", "Proposals that were verified")
        self._proposed = counter("vllm:spec_decode_num_draft_tokens", "Proposed tokens that were verified")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Proposed tokens that were right")
        self._by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Proposed tokens that were right, by their place in the proposal",
            [*self._labels, "position"],
            registry=self.registry,
        )

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Observes a proposal of which the first `num_accepted` tokens were right."""
        self._drafts.inc()
        self._proposed.inc(num_proposed)
        self._accepted.inc(num_accepted)
        for position in range(num_accepted):
            self._by_position.labels(**self._labels, position=str(position)).inc()
