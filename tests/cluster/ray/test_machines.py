"""Tests how a machine's free memory is read. Starts no Ray."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.ray import machines


def write_cgroup(folder: Path, limit: str, used: int, inactive: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_free_memory_is_what_the_container_may_still_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_CGROUP", tmp_path)
    assert machines._free_in_cgroup() == float("inf")  # no cgroup of version 2
    write_cgroup(tmp_path, "max", 600, 100)
    assert machines._free_in_cgroup() == float("inf")
    write_cgroup(tmp_path, "1000", 600, 100)
    assert machines._free_in_cgroup() == 500  # page cache counts as free
    room = machines._read_memory([os.getpid(), 2**22 + 1])  # the second pid does not exist
    assert room is not None
    assert room.free_bytes == 500
    assert room.worker_bytes > 2**20
    assert machines._read_memory([]) is None
