"""Accelerators by their published peaks. Nothing here was measured on them: efficiencies are assumptions.

Peaks are dense (without sparsity), of one device. The link is what a worker gets to others for KV: one 400 Gbit/s
adapter for each device in a node of eight, 100 Gbit/s for PCIe cards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from penstock.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peaks that kernels reach; assumptions, to be replaced by a fit where there are measurements."""

    compute: float = 0.5  # large matrix products, and attention of prompts
    memory: float = 0.75
    link: float = 0.8
    step_overhead_s: float = 0.001  # scheduling, launches and sampling of a step
    sequence_overhead_s: float = 5e-6  # for each sequence of a step
    collective_s: float = 12e-6  # latency of one all-reduce between the devices of a worker


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device. FLOP/s and bytes/s are published peaks."""

    name: str
    flops: float  # bf16, dense
    flops_8bit: float  # fp8 or int8, dense; equal to `flops` where there is none
    memory_bytes: float
    memory_bytes_per_s: float
    peer_bytes_per_s: float  # to the other devices of its node, one direction
    link_bytes_per_s: float  # to other nodes, one direction; an assumption, since nodes are built differently
    source: str
    efficiency: Efficiency = Efficiency()

    @property
    def ridge_flops_per_byte(self) -> float:
        """Arithmetic intensity above which computing, not memory, limits the device."""
        return self.flops * self.efficiency.compute / (self.memory_bytes_per_s * self.efficiency.memory)


_GBIT_400, _GBIT_100 = 50e9, 12.5e9
_PCIE = Efficiency(collective_s=30e-6)

ACCELERATORS: dict[str, Accelerator] = {
    device.name: device
    for device in (
        Accelerator(
            "A100", 312e12, 624e12, 80e9, 2.039e12, 300e9, _GBIT_400,
            "NVIDIA A100 80GB SXM data sheet (int8 for 8 bits: it has no fp8)",
        ),
        Accelerator("H100", 989e12, 1979e12, 80e9, 3.35e12, 450e9, _GBIT_400, "NVIDIA H100 SXM data sheet"),
        Accelerator("H200", 989e12, 1979e12, 141e9, 4.8e12, 450e9, _GBIT_400, "NVIDIA H200 SXM data sheet"),
        Accelerator("B200", 2250e12, 4500e12, 180e9, 7.7e12, 900e9, _GBIT_400, "NVIDIA HGX B200 data sheet"),
        Accelerator("L40S", 362e12, 733e12, 48e9, 864e9, 32e9, _GBIT_100, "NVIDIA L40S data sheet", _PCIE),
        Accelerator(
            "MI300X", 1307e12, 2615e12, 192e9, 5.3e12, 448e9, _GBIT_400, "AMD Instinct MI300X data sheet"
        ),
    )
}  # fmt: skip


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

    Its figures are what numpy reached, so that compute and memory count in full.
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
