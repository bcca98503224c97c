"""Reads the processor time of the benchmark's processes, and what other programs take of the machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = 100  # of /proc/stat


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """Returns the processor time of each process, to the microsecond; 0 if it has ended."""
    return {name: _clock_s(pid) for name, pid in pids.items()}


def _clock_s(pid: int) -> float:
    try:
        return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3): all threads of another process
    except OSError:
        return 0.0


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Processor times in seconds since boot: of the whole machine, idle or not, and of the benchmark's processes."""

    whole_s: float
    idle_s: float
    ours_s: Mapping[str, float]

    @classmethod
    def now(cls, pids: Mapping[str, int]) -> CpuTimes:
        ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return cls(sum(ticks) / _TICKS_PER_S, (ticks[3] + ticks[4]) / _TICKS_PER_S, cpu_seconds(pids))

    def others_share(self, before: CpuTimes) -> float:
        """Returns the share of all cores that other programs, and the host of a virtual machine, have taken since."""
        whole_s = self.whole_s - before.whole_s
        busy_s = whole_s - (self.idle_s - before.idle_s)
        return max(0.0, busy_s - sum(self.seconds_since(before).values())) / max(1 / _TICKS_PER_S, whole_s)

    def seconds_since(self, before: CpuTimes) -> dict[str, float]:
        """Returns the processor time of each process since."""
        return {name: seconds - before.ours_s[name] for name, seconds in self.ours_s.items()}
