"""Tests what each process sets up at its start."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.process.setup import favour_event_loop, return_freed_memory


def test_threads_yield_to_the_event_loop_within_half_a_millisecond() -> None:
    before_s = sys.getswitchinterval()
    try:
        favour_event_loop()
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    finally:
        sys.setswitchinterval(before_s)


@pytest.mark.processes
def test_freed_blocks_of_a_megabyte_leave_the_process() -> None:
    """Runs in a process of its own, because threads that other tests have left allocate, too."""
    code = "from tests.penstock.process.test_setup import check_freed_blocks; check_freed_blocks()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def check_freed_blocks() -> None:
    return_freed_memory()
    for size in (1 << 20, 30 << 20, 1 << 20):  # by default glibc keeps blocks of the previous size after the second
        before = resident_bytes()
        blocks = [bytearray(size) for _ in range(60 << 20 >> size.bit_length() - 1)]
        kept = bytearray(1000)  # above them on the heap
        blocks.clear()
        assert resident_bytes() - before < 20 << 20
        del kept


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
