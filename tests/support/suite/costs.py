"""Orders test files by duration, the slowest first, so that no long one is left for the end of a run.

`--dist loadfile` hands files to the next free process in the order of collection. The times are those that a run
measured with `--record-costs`; a file without a record counts as an average one. Tests of the slowest files are marked
`slow`.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

COSTS = Path(__file__).with_name("costs.json")
OPTION = "--record-costs"
SLOW_S = 4.5
_COMMON_S = 3.0  # of a file without a record


@functools.cache
def recorded() -> Mapping[str, float]:
    """Returns the seconds of each recorded file."""
    found: dict[str, float] = json.loads(COSTS.read_text())
    return found


def slowest_first(items: list[pytest.Item], costs: Mapping[str, float]) -> None:
    """Sorts the items in place by the cost of their files. Tests of one file stay together and in order."""

    def rank(item: pytest.Item) -> tuple[float, str]:
        file = _file_of(item)
        return -costs.get(file, _COMMON_S), file

    items.sort(key=rank)


def mark_slow(items: list[pytest.Item], costs: Mapping[str, float]) -> None:
    """Marks the tests of files that take longer than `SLOW_S`."""
    for item in items:
        if costs.get(_file_of(item), _COMMON_S) > SLOW_S:
            item.add_marker("slow")


def may_skip(file: str, markers: str, costs: Mapping[str, float]) -> bool:
    """Returns whether `-m MARKERS` deselects every test of a file because it is slow.

    Such a file is not imported; imports take a third of the time of `make test-fast`.
    """
    return "not slow" in markers.split(" and ") and costs.get(file, _COMMON_S) > SLOW_S


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class CostRecorder:
    """Sums the durations of tests by file, and writes them when the session ends."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        costs = {**recorded()} | {file: round(cost_s, 1) for file, cost_s in self._seconds.items()}
        COSTS.write_text(json.dumps(costs, indent=1, sort_keys=True) + "\n")
