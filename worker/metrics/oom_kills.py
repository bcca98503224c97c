"""Counts the processes that the kernel killed for lack of memory in this worker's container.

A killed process cannot report it itself, so its siblings and its successor export the container's count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

EVENTS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))  # cgroup v2, v1


def count_oom_kills(files: Iterable[Path] = EVENTS) -> int | None:
    """Returns the number of kills since the container started; None if no file has it."""
    for path in files:
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return None
