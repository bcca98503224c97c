"""Starts and cleans up the processes that render templates and compile grammars for the router."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_STOP_TIMEOUT_S = 5.0


def start_sandbox(module: str) -> subprocess.Popen[bytes]:
    """Starts a module as a process with pipes at its stdin and stdout.

    Passes on only the environment that it needs, so that untrusted code that breaks out finds no secrets.
    """
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TZ", "VIRTUAL_ENV") if name in os.environ}
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**kept, "PYTHONPATH": path},
    )


def clean_up_sandbox(process: subprocess.Popen[bytes]) -> int:
    """Closes the pipes of a process that has ended or is ending, and returns its exit status."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except OSError:
            continue  # the process did not read all of its input
    return process.wait(_STOP_TIMEOUT_S)
