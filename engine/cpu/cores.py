"""Binds a worker to its own cores, so that its step's threads do not compete with another worker's on the same host.

`engine.cores` gives each worker of a host its cores; threads and processes that the worker starts later inherit them.
"""

from __future__ import annotations

import os

from penstock.errors import ConfigError


def parse_cores(text: str) -> frozenset[int]:
    """Parses a core list in `taskset` syntax, such as "0-3,8". Raises ConfigError."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise ConfigError(f"engine.cores = {text!r} is not a list of cores; give one such as '0-3,8'")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def bind_to_cores(text: str) -> int:
    """Binds every thread of this process and returns the number of cores. Raises ConfigError for cores that the process
    is not allowed to use."""
    cores, allowed = parse_cores(text), os.sched_getaffinity(0)
    if not cores <= allowed:
        raise ConfigError(
            f"engine.cores = {text!r}: this process may use only cores {sorted(allowed)}; give some of those"
        )
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # the thread has ended since it was listed
    return len(cores)
