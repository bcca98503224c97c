"""Binds a worker to cores of its own, so that the threads of a step do not chase those of a neighbour.

Several workers on one host each name theirs (`engine.cores`); what a worker starts later inherits them.
"""

from __future__ import annotations

import os

from penstock.errors import ConfigError


def parse_cores(text: str) -> frozenset[int]:
    """Of a list as `taskset` takes it, such as "0-3,8". Raises ConfigError."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise ConfigError(f"engine.cores = {text!r} is no list of cores; give one such as '0-3,8'")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def bind_to_cores(text: str) -> int:
    """Binds every thread of this process; returns the number of cores. Raises ConfigError where it may not use them."""
    cores, allowed = parse_cores(text), os.sched_getaffinity(0)
    if not cores <= allowed:
        raise ConfigError(
            f"engine.cores = {text!r}: this process may use cores {sorted(allowed)} alone; give some of those"
        )
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # it has ended meanwhile
    return len(cores)
