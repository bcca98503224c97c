"""Metrics that the step loop observes: duration and size of steps, and how many proposals were accepted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import numpy as np
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.step.speculation.proposal import ProposalKind
from penstock.metrics.families import HistogramFamily, observe_all
from penstock.types import Lane
from penstock.v1 import worker_pb2

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_BATCH = 512  # steps
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class StepMetrics(Collector):
    """Observes the distributions of steps. Only the step loop's thread observes; scrapes read concurrently.

    A step costs one append: steps are counted `_BATCH` at a time and at each scrape, which takes 0.3 us a step where
    the library's histograms take 2, both in a loop with warm caches.
    """

    def __init__(self, described: worker_pb2.WorkerDescription) -> None:
        self.registry = CollectorRegistry()
        self._steps: deque[tuple[float, int, int]] = deque()  # seconds, tokens and sequences of uncounted steps
        self._counting = threading.Lock()  # held by the thread that counts them
        names = {"model_name": described.model, "worker": described.worker_id, "role": described.role}
        self._families = [
            HistogramFamily(name, help_text, tuple(names), bounds, None)
            for name, help_text, bounds in (
                ("penstock:worker_step_duration_seconds", "Duration of a step", _STEP_S),
                ("vllm:iteration_tokens_total", "Tokens computed in a step", _TOKENS),
                ("penstock:worker_batch_size", "Sequences in a step", _SEQUENCES),
            )
        ]
        self._series = [family.bind(*names.values()) for family in self._families]
        self.registry.register(self)

    def observe(self, num_sequences: int, num_tokens: int, elapsed_s: float) -> None:
        """Observes a step that has ended."""
        self._steps.append((elapsed_s, num_tokens, num_sequences))
        if len(self._steps) >= _BATCH:
            self._count()

    def collect(self) -> Iterator[Metric]:
        self._count()
        for family in self._families:
            yield from family.collect()

    def describe(self) -> list[Metric]:
        return [metric for family in self._families for metric in family.describe()]

    def _count(self) -> None:
        with self._counting:
            steps = [self._steps.popleft() for _ in range(len(self._steps))]
            for series, values in zip(self._series, np.array(steps, float).reshape(-1, 3).T, strict=True):
                observe_all([series], np.zeros(len(values), np.int64), values)


class SpeculationMetrics:
    """Counts proposed and accepted tokens under vLLM's names, and compares requests with and without speculation. The
    step loop observes; scrapes read concurrently."""

    def __init__(self, described: worker_pb2.WorkerDescription) -> None:
        self.registry = CollectorRegistry()
        self._labels = {
            "model_name": described.model,
            "worker": described.worker_id,
            "role": described.role,
        }

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            names = [*self._labels, "proposer", "lane", *labels]
            return Counter(name, help_text, names, registry=self.registry)

        self._drafts = counter("vllm:spec_decode_num_drafts", "Proposals that were verified")
        self._proposed = counter("vllm:spec_decode_num_draft_tokens", "Proposed tokens that were verified")
        self._accepted = counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Proposed tokens that were right; each has saved its sequence a step",
        )
        self._by_position = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Proposed tokens that were right, by their place in the proposal",
            "position",
        )
        names = [*self._labels, "group"]
        self._tokens = Counter(
            "penstock:speculation_tokens",
            "Output tokens after the first; group is off for requests that turn speculation off, else on",
            names,
            registry=self.registry,
        )
        self._decode_s = Counter(
            "penstock:speculation_decode_seconds",
            "Time in which those tokens were decoded, summed over requests",
            names,
            registry=self.registry,
        )

    def observe_request(self, is_off: bool, num_tokens: int, decode_s: float) -> None:
        """Observes a request that has ended: the tokens decoded after its first one, and the seconds they took."""
        labels = self._labels | {"group": "off" if is_off else "on"}
        self._tokens.labels(**labels).inc(num_tokens)
        self._decode_s.labels(**labels).inc(decode_s)

    def observe(self, kind: ProposalKind, lane: Lane, num_proposed: int, num_accepted: int) -> None:
        """Observes a proposal for a request of the lane, whose first `num_accepted` tokens were accepted."""
        labels = self._labels | {"proposer": kind.value, "lane": lane.value}
        self._drafts.labels(**labels).inc()
        self._proposed.labels(**labels).inc(num_proposed)
        self._accepted.labels(**labels).inc(num_accepted)
        for position in range(num_accepted):
            self._by_position.labels(**labels, position=str(position)).inc()
