"""Times the sums of a decode step over the GPUs of this machine: in the ranks' shared memory, and with NCCL.

`sum_rows` starts a process for each rank, `python -m benchmarks.gpu.collectives RANK RANKS FOLDER DEVICE`; that of rank
0 prints its rows. A rehearsal has two ranks on the CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.common.report import Row
from benchmarks.gpu.bench_device import BenchDevice, RehearsalDevice
from engine.parallel.collectives import TorchGroup
from engine.parallel.shard import Shard

_WITHIN_S = 60
_MOST_RANKS = 8


def sum_rows(bench: BenchDevice) -> Iterator[Row]:
    """Yields sums of bf16 rows of 4096 in a graph, with NCCL as baseline; none with a single GPU."""
    num_gpus = 2 if bench.is_rehearsal else min(torch.cuda.device_count(), _MOST_RANKS)
    if num_gpus < 2:
        print("skipped: sums need two GPUs", file=sys.stderr)
        return
    num_ranks = 1 << num_gpus.bit_length() - 1
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.gpu.collectives"]
        rest = [str(num_ranks), folder, bench.device.type]
        processes = [
            subprocess.Popen([*command, str(rank), *rest], stdout=subprocess.PIPE, text=True)
            for rank in range(num_ranks)
        ]
        try:
            printed = [process.communicate(timeout=_WITHIN_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    for name, ours_s, theirs_s in json.loads(printed[0]):
        yield Row(f"{name}, {num_ranks} ranks", ours_s * 1e6, "us", "NCCL", theirs_s * 1e6)


def _time_rank(bench: BenchDevice, shard: Shard, folder: Path) -> list[tuple[str, float, float]]:
    """Returns the times as `group.sum` computes, and by the library alone. Every rank makes the same calls."""
    group = TorchGroup(shard, bench.device, folder / "store", _WITHIN_S)
    found: list[tuple[str, float, float]] = []
    for num_tokens in bench.pick([1, 16, 64], [1]):
        x = bench.noise(num_tokens, 4096)
        one_shot, times = group._one_shot, []
        for group._one_shot in (one_shot, None):
            times.append(bench.in_graph(lambda: group.sum(x)))  # noqa: B023
        group._one_shot = one_shot
        name = "shared memory" if one_shot is not None and one_shot.takes(x) else "NCCL, no shared memory"
        found.append((f"sum of {num_tokens} tokens by {name}", times[0], times[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.collectives", description=__doc__)
    parser.add_argument("rank", type=int)
    parser.add_argument("num_ranks", type=int)
    parser.add_argument("folder", type=Path, help="where the ranks meet")
    parser.add_argument("device", choices=("cpu", "cuda"))
    given = parser.parse_args()
    if given.device == "cpu":
        bench: BenchDevice = RehearsalDevice()
    else:
        torch.cuda.set_device(given.rank)
        bench = BenchDevice(f"cuda:{given.rank}")
    found = _time_rank(bench, Shard(given.rank, given.num_ranks), given.folder)
    if given.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
