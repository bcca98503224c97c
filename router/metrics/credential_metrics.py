"""Metrics of the keys, secrets and certificates that a router has read from files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily


class LoadedFiles(Protocol):
    """Files that are read again when they change."""

    setting: str
    loaded_unix_s: float
    problem: str


class CredentialCollector:
    def __init__(self, model: str, files: Callable[[], Sequence[LoadedFiles]]) -> None:
        self._model = model
        self._files = files

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ["model_name", "setting"]
        age = GaugeMetricFamily(
            "penstock:credentials_age_seconds", "Since the keys or certificates in force were read", labels=labels
        )
        refused = GaugeMetricFamily(
            "penstock:credentials_refused",
            "1 while the files that are there now cannot be used, and what was read before is in force",
            labels=labels,
        )
        now_s = time.time()
        for files in self._files():
            age.add_metric([self._model, files.setting], max(0.0, now_s - files.loaded_unix_s))
            refused.add_metric([self._model, files.setting], float(bool(files.problem)))
        yield age
        yield refused
