"""Provides clocks for benchmarks: how long a block, a call or a whole benchmark takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Clock = Callable[[], float]  # seconds since some moment

_REPEATS = 5


class Stopwatch:
    """Measures a `with` block: `seconds` holds how long it took once it has ended."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._started_s = 0.0

    def __enter__(self) -> Stopwatch:
        self._started_s = self._clock()
        return self

    def __exit__(self, *failure: object) -> None:
        self.seconds = self._clock() - self._started_s


def elapsed_s(call: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Returns the seconds that a call takes."""
    started_s = clock()
    call()
    return clock() - started_s


def best_s(call: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Returns the seconds of the quickest of `repeats` calls, after one warm-up call."""
    return min([elapsed_s(call) for _ in range(repeats + 1)][1:])


@contextmanager
def print_duration(suffix: str = "") -> Iterator[None]:
    """Prints how long a whole benchmark took, if it ends without an error."""
    with Stopwatch() as watch:
        yield
    print(f"took {watch.seconds:.0f} s{suffix}")
