"""Measures the cores that a machine's other work leaves to the deployment, so that an attack is not blamed for that
work. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence

import psutil


class CoresLeft:
    """Measures the mean number of cores that processes other than the given ones left between `begin` and `end`."""

    def __init__(self, own: Callable[[], Sequence[psutil.Process]]) -> None:
        """`own` returns the processes of the deployment and of the harness."""
        self._own = own
        self.begin()

    def begin(self) -> None:
        self._began_s, self._foreign_s = time.monotonic(), self._foreign()

    def end(self) -> float:
        taken_s = self._foreign() - self._foreign_s
        num_cores = os.cpu_count() or 1
        return min(num_cores, max(0.1, num_cores - taken_s / (time.monotonic() - self._began_s)))

    def _foreign(self) -> float:
        """Returns the processor seconds of all other processes since the machine was started."""
        times = psutil.cpu_times()
        own_s = 0.0
        for process in self._own():
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()  # including its children that have ended
                own_s += used.user + used.system + used.children_user + used.children_system
        return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice - own_s)
