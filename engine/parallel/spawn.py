"""Starts the processes of a replica's other ranks, and runs such a rank: it dials rank 0 and does what rank 0 asks.

The caller chooses how they are started (`engine.parallel.leader.Launch`): `spawn_ranks` starts plain processes; on Ray
they are actors. A rank never outlives rank 0, however rank 0 ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engine.parallel.channel import dial
from engine.parallel.leader import Launch
from engine.parallel.worker_rank import RankExtension, WorkerRank

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ROOT = Path(__file__).resolve().parents[2]


def spawn_ranks(module: str) -> Launch:
    """Returns a launcher that starts `python -m module PATH PARENT` per rank; all log to this process's stderr."""

    def launch(control: Path, num_processes: int) -> None:
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        for _ in range(num_processes):
            subprocess.Popen(
                [sys.executable, "-m", module, str(control), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # rank 0's stdout carries its ready line
                env={**os.environ, "PYTHONPATH": path},
            )

    return launch


def end_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when its parent dies, even if it is stopped or stuck."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the call
        os._exit(1)


def serve_rank(
    control: Path,
    extend: Callable[[WorkerRank], RankExtension] = lambda rank: RankExtension(),
    on_orphaned: Callable[[], None] = lambda: os._exit(0),
) -> None:
    """Blocks until rank 0 is gone; a process then ends at once, since it may be stuck in a collective."""
    WorkerRank(dial(control), extend).run(on_orphaned)
