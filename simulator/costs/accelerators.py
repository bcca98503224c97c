"""Finds an accelerator by its name, or measures this machine as one."""

from __future__ import annotations

import time

import numpy as np

from penstock.errors import InvalidInput
from penstock.sizing.accelerators import ACCELERATORS, Accelerator, Efficiency


def find_accelerator(name: str) -> Accelerator:
    """Returns the accelerator of that name, whatever its case; `cpu` measures this machine for about a second.

    Raises InvalidInput.
    """
    if name.lower() == "cpu":
        return measured_cpu()
    for known, device in ACCELERATORS.items():
        if known.lower() == name.lower():
            return device
    raise InvalidInput("accelerator", f"{name!r} is not known; give one of {', '.join(ACCELERATORS)}, cpu")


def measured_cpu(seconds: float = 0.5) -> Accelerator:
    """Measures this machine's float32 matrix products and memory with numpy, half of `seconds` for each.

    Its peaks are the rates that numpy reached, so the efficiencies of compute and memory are 1.
    """
    left, right = np.ones((512, 512), np.float32), np.ones((512, 512), np.float32)
    products_per_s = _best_rate(lambda: left @ right, seconds / 2)
    block = np.ones(1 << 24, np.float32)  # 64 MiB, more than caches hold
    reads_per_s = _best_rate(block.sum, seconds / 2)
    flops, bytes_per_s = 2 * 512**3 * products_per_s, block.nbytes * reads_per_s
    efficiency = Efficiency(compute=1.0, memory=1.0)
    source = "measured here with numpy: 512 x 512 float32 products, sums over 64 MiB"
    return Accelerator("CPU", flops, flops, 8e9, bytes_per_s, bytes_per_s / 4, bytes_per_s / 4, source, efficiency)


def _best_rate(call: object, seconds: float) -> float:
    assert callable(call)
    call()
    best_s, end_s = float("inf"), time.perf_counter() + seconds
    while (begun_s := time.perf_counter()) < end_s:
        call()
        best_s = min(best_s, time.perf_counter() - begun_s)
    return 1.0 / best_s
