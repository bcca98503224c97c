"""Lists accelerators with their published peaks. Nothing was measured on them: efficiencies are assumptions.

Peaks are those of one device, without sparsity. The link carries a worker's KV to other nodes: one 400 Gbit/s adapter
per device in a node of eight, 100 Gbit/s for PCIe cards.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The shares of the peaks that kernels reach. They are assumptions, to be replaced by a fit to measurements."""

    compute: float = 0.5  # for large matrix products and prompt attention
    memory: float = 0.75
    link: float = 0.8
    step_overhead_s: float = 0.001  # time of a step for scheduling, launches and sampling
    sequence_overhead_s: float = 5e-6  # time of a step for each sequence
    collective_s: float = 12e-6  # latency of an all-reduce between a worker's devices


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device. FLOP/s and bytes/s are published peaks."""

    name: str
    flops: float  # bf16, dense
    flops_8bit: float  # fp8 or int8, dense; equal to `flops` if there is neither
    memory_bytes: float
    memory_bytes_per_s: float
    peer_bytes_per_s: float  # to the other devices of its node, one direction
    link_bytes_per_s: float  # to other nodes, one direction; assumed, since nodes differ
    source: str
    efficiency: Efficiency = Efficiency()
    reads_e4m3: bool = True  # kernels multiply with fp8 (e4m3); otherwise MXFP4 is decoded on loading


_GBIT_400, _GBIT_100 = 50e9, 12.5e9
_PCIE = Efficiency(collective_s=30e-6)

ACCELERATORS: dict[str, Accelerator] = {
    device.name: device
    for device in (
        Accelerator(
            "A100", 312e12, 624e12, 80e9, 2.039e12, 300e9, _GBIT_400,
            "NVIDIA A100 80GB SXM data sheet (int8 for 8 bits: it has no fp8)", reads_e4m3=False,
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


def accelerator_of(device_name: str) -> Accelerator | None:
    """Returns the accelerator with a driver's name such as `NVIDIA H100 80GB HBM3`; None if its peaks are unknown.

    PCIe cards have lower peaks than the modules of the same name, so they do not match.
    """
    words = device_name.replace("-", " ").split()
    if "PCIe" in words:
        return None
    return next((device for name, device in ACCELERATORS.items() if name in words), None)
