"""Tests a worker's cores: parsing of lists, and binding of each thread of a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.cpu.cores import bind_to_cores, parse_cores
from penstock.errors import ConfigError


@pytest.mark.parametrize(("text", "cores"), [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), (" 2 , 2-2", {2})])
def test_lists_have_the_format_of_taskset(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "-1", "1,,2"])
def test_invalid_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.cores = .* give one such as"):
        parse_cores(text)


def test_missing_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.cores = '99999': this process may use"):
        bind_to_cores("99999")


@pytest.mark.processes
def test_every_thread_of_the_process_is_bound() -> None:
    """Binds threads that already run and threads that start later."""
    core = min(os.sched_getaffinity(0))
    code = (
        "import os, threading\n"
        "from engine.cpu.cores import bind_to_cores\n"
        "done = threading.Event()\n"
        "early = threading.Thread(target=done.wait)\n"
        "early.start()\n"
        f"assert bind_to_cores('{core}') == 1\n"
        "late = threading.Thread(target=done.wait)\n"
        "late.start()\n"
        "print([sorted(os.sched_getaffinity(thread.native_id)) for thread in (early, late)])\n"
        "done.set()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == str([[core], [core]])
