"""Processes for the other ranks of a replica, and what each of them does: dial rank 0 and do what it says.

Who starts them is for the caller to choose (`engine.ranks.Launch`): `spawn_ranks` starts plain processes, on Ray they
are actors. A rank never outlives rank 0, whatever ended that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engine.rank_channel import dial
from engine.rank_member import Extension, RankMember
from engine.ranks import Launch

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ROOT = Path(__file__).resolve().parent.parent


def spawn_ranks(module: str) -> Launch:
    """Starts `python -m module PATH` for each. Their log is this process's."""

    def launch(control: Path, num_processes: int) -> None:
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        for _ in range(num_processes):
            subprocess.Popen(
                [sys.executable, "-m", module, str(control), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # rank 0's is for whoever waits for its ready line
                env={**os.environ, "PYTHONPATH": path},
            )

    return launch


def end_with(parent_pid: int) -> None:
    """The kernel kills this process when its parent dies, stopped or stuck as it may be."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it was faster
        os._exit(1)


def serve_rank(
    control: Path,
    extend: Callable[[RankMember], Extension] = lambda member: Extension(),
    on_orphaned: Callable[[], None] = lambda: os._exit(0),
) -> None:
    """Blocks until rank 0 is gone; a process then ends at once, since it may be stuck in a collective."""
    RankMember(dial(control), extend).run(on_orphaned)
