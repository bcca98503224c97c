"""How fast weights load, and what a second replica on the host adds: seconds, bytes from the disk, memory of its own.

Each load is a process of its own, with the machine's usual packing. In turn: a first replica with the file out of the
page cache, one beside it that shares its weights, and one that does not (`share_weights = false`, what every process
would do by itself). Floors: the disk's sequential rate and a plain copy in memory, both for the file's bytes in the
same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.report import Row, publish
from benchmarks.shapes import random_llama

_STRIPE_BYTES = 16 * 1024 * 1024


def load(folder: Path, *, share: bool) -> None:
    """In a child: loads, tells what that took, and keeps the weights until its input ends."""
    from engine.kernels import select_backend
    from engine.model_config import ModelConfig
    from engine.models.registry import load_model

    config, cpu = ModelConfig.from_folder(str(folder)), torch.device("cpu")
    select_backend("auto", cpu)  # the kernels are loaded, which is not what is measured
    read, own = _read_bytes(), _own_bytes()
    began_s = time.perf_counter()
    model = load_model(
        folder, config, dtype=torch.bfloat16, device=cpu, max_context=2048, on_progress=lambda _: None, share=share
    )
    took_s = time.perf_counter() - began_s
    print(json.dumps({"s": took_s, "read": _read_bytes() - read, "own": _own_bytes() - own}), flush=True)
    sys.stdin.read()
    del model


def _read_bytes() -> int:
    """From the disk, by this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def _own_bytes() -> int:
    """Of memory that nobody else maps."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def child(folder: Path, *, share: bool) -> tuple[subprocess.Popen[str], dict[str, float]]:
    command = [sys.executable, "-m", "benchmarks.weights", "--load", str(folder), "--share", str(int(share))]
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert popen.stdout is not None
    return popen, json.loads(popen.stdout.readline())


def forget(file: Path) -> None:
    """Out of the page cache."""
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def disk_floor(file: Path) -> float:
    """Seconds of one sequential read that the page cache has no part in."""
    forget(file)
    buffer, began_s = bytearray(_STRIPE_BYTES), time.perf_counter()
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass
    return time.perf_counter() - began_s


def memory_floor(num_bytes: int) -> float:
    """Seconds of one copy to memory that is there already."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    times = []
    for _ in range(3):
        began_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
            popen, told = child(folder, share=name != "alone")
            running.append(popen)
            found[name].append(told)
        for popen in running:
            popen.communicate("", timeout=60)
    publish(
        "weights", f"Llama of 135 million parameters, bf16, CPU; {arguments.rounds} rounds", rows(found, disk, memory)
    )


def rows(found: dict[str, list[dict[str, float]]], disk: list[float], memory: list[float]) -> list[Row]:
    def median(name: str, field: str) -> float:
        return statistics.median(one[field] for one in found[name])

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
