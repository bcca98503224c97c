"""Counts the processes that the kernel ended for lack of memory in this worker's container.

A process that is killed cannot say so; its container's count, which its siblings and its successor export, does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

EVENTS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))  # cgroup v2, v1


def count_oom_kills(files: Iterable[Path] = EVENTS) -> int | None:
    """Returns how many there were since the container started; None where no file says."""
    for path in files:
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return None
