"""Measures how fast weights load and what a second replica on the host adds: seconds, bytes read, and private memory.

Each load runs in its own process with the machine's usual packing. A round loads a first replica with the file out of
the page cache, a second one that shares its weights, and one that does not (`share_weights = false`). The floors are
the disk's sequential rate and a plain copy in memory, both for the file's bytes in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.common.report import Row, publish
from benchmarks.common.shapes import random_llama
from benchmarks.common.timing import Stopwatch, elapsed_s

_STRIPE_BYTES = 16 * 1024 * 1024


def load(folder: Path, *, share: bool) -> None:
    """Loads weights in a child process, prints what that took, and keeps them until its input ends."""
    from engine.kernels.backends import select_backend
    from engine.models.config import ModelConfig
    from engine.models.loader import load_model

    config, cpu = ModelConfig.from_folder(str(folder)), torch.device("cpu")
    select_backend("auto", cpu)  # loads the kernels, which is not measured
    read, own = _read_bytes(), _own_bytes()
    with Stopwatch() as watch:
        model = load_model(
            folder, config, dtype=torch.bfloat16, device=cpu, max_context=2048, on_progress=lambda _: None, share=share
        )
    print(json.dumps({"s": watch.seconds, "read": _read_bytes() - read, "own": _own_bytes() - own}), flush=True)
    sys.stdin.read()
    del model


def _read_bytes() -> int:
    """Returns the bytes that this process has read from the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def _own_bytes() -> int:
    """Returns the bytes of memory that no other process maps."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def child(folder: Path, *, share: bool) -> tuple[subprocess.Popen[str], dict[str, float]]:
    command = [sys.executable, "-m", "benchmarks.engine.weights", "--load", str(folder), "--share", str(int(share))]
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert popen.stdout is not None
    return popen, json.loads(popen.stdout.readline())


def forget(file: Path) -> None:
    """Drops the file from the page cache."""
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def disk_floor(file: Path) -> float:
    """Returns the seconds of one sequential read without the page cache."""
    forget(file)
    buffer = bytearray(_STRIPE_BYTES)
    with Stopwatch() as watch, file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass
    return watch.seconds


def memory_floor(num_bytes: int) -> float:
    """Returns the seconds of one copy to memory that is already mapped."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    return statistics.median(elapsed_s(lambda: target.copy_(source)) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.weights", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load is not None:
        load(arguments.load, share=bool(arguments.share))
        return
    folder = random_llama()
    file = folder / "model.safetensors"
    found: dict[str, list[dict[str, float]]] = {"first": [], "second": [], "alone": []}
    disk, memory = [], []
    for _ in range(arguments.rounds):
        disk.append(disk_floor(file))
        memory.append(memory_floor(file.stat().st_size))
        forget(file)
        running = []
        for name in found:
            popen, measured = child(folder, share=name != "alone")
            running.append(popen)
            found[name].append(measured)
        for popen in running:
            popen.communicate("", timeout=60)
    publish(
        "weights", f"Llama of 135 million parameters, bf16, CPU; {arguments.rounds} rounds", rows(found, disk, memory)
    )


def rows(found: dict[str, list[dict[str, float]]], disk: list[float], memory: list[float]) -> list[Row]:
    def median(name: str, field: str) -> float:
        return statistics.median(measured[field] for measured in found[name])

    mib = 2**20
    return [
        Row(
            "first replica, file not cached", median("first", "s"), "s", "one read of the disk", statistics.median(disk)
        ),
        Row("second replica, shared", median("second", "s"), "s", "one copy in memory", statistics.median(memory)),
        Row("the same", median("second", "s"), "s", "loading by itself, file cached", median("alone", "s")),
        Row("first: read from the disk", median("first", "read") / mib, "MiB"),
        Row("second: read from the disk", median("second", "read") / mib, "MiB"),
        Row(
            "second: memory of its own", median("second", "own") / mib, "MiB", "by itself", median("alone", "own") / mib
        ),
    ]


if __name__ == "__main__":
    main()
