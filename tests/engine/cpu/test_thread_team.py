"""Tests the threads that share the tasks of CPU kernels: concurrent callers, forks, and sleep."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from engine.cpu.linear import TileLinear, pack_for_tiles
from tests.support.engine.isas import needs_native

pytestmark = needs_native
_DEADLINE_S = 60.0


@pytest.fixture
def three_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def make_linear() -> TileLinear:
    weight = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    linear = pack_for_tiles(weight, None)
    assert linear is not None
    return linear


def make_rows(count: int) -> torch.Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(count)).to(torch.bfloat16)


@pytest.mark.usefixtures("three_threads")
def test_concurrent_callers_each_get_their_own_results() -> None:
    """The first caller gets the workers, others compute alone; with more threads than cores, all are preempted."""
    linear = make_linear()
    rows = [make_rows(count) for count in (1, 40, 300, 700)]
    expected = [linear(x) for x in rows]
    wrong: list[int] = []

    def lead(which: int) -> None:
        torch.set_num_threads(3)
        wrong.extend(which for _ in range(60) if not torch.equal(linear(rows[which]), expected[which]))

    leaders = [threading.Thread(target=lead, args=(which,)) for which in range(len(rows))]
    for leader in leaders:
        leader.start()
    for leader in leaders:
        leader.join(_DEADLINE_S)
    assert not any(leader.is_alive() for leader in leaders)
    assert not wrong


@pytest.mark.processes
@pytest.mark.usefixtures("three_threads")
def test_a_forked_process_computes_without_the_threads_it_lacks() -> None:
    linear, x = make_linear(), make_rows(100)

    def compute() -> bytes:  # no torch operation, since OpenMP would wait for threads that do not exist after a fork
        return linear(x).view(torch.uint8).numpy().tobytes()

    expected = compute()
    child = os.fork()
    if child == 0:
        os._exit(0 if compute() == expected else 1)
    limit_s = time.monotonic() + _DEADLINE_S
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < limit_s:
        threading.Event().wait(0.01)
    if done[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == (child, 0)


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
def test_idle_workers_sleep() -> None:
    """Runs in a process of its own, where all new threads belong to the kernels."""
    code = (
        "import os, time, torch\n"
        "from tests.engine.cpu.test_thread_team import make_linear, make_rows\n"
        "torch.set_num_threads(1)\n"
        "linear, x, before = make_linear(), make_rows(300), set(os.listdir('/proc/self/task'))\n"
        "torch.set_num_threads(3)\n"
        "linear(x)\n"
        "helpers = set(os.listdir('/proc/self/task')) - before\n"
        "def state(thread):\n"
        "    return open(f'/proc/self/task/{thread}/stat').read().rpartition(')')[2].split()[0]\n"
        f"limit_s = time.monotonic() + {_DEADLINE_S}\n"
        "while any(state(thread) != 'S' for thread in helpers) and time.monotonic() < limit_s:\n"
        "    pass\n"
        "print(len(helpers), *(state(thread) for thread in helpers))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * _DEADLINE_S)
    assert done.stdout.split() == ["2", "S", "S"], done.stderr
