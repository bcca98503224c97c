"""Finds how much memory a device has by its name, so that plans can be made on other machines. Imports torch only for
`cuda`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.errors import InvalidInput

DeviceType = Literal["cpu", "cuda"]

# Total MiB by nvidia-smi, 2026-11; less than the name says, because the driver and ECC take a part.
_GPU_MIB = {
    "B200": 183359,
    "H200": 143771,
    "H100": 81559,
    "A100-80GB": 81920,
    "A100-40GB": 40960,
    "L40S": 46068,
    "RTX4090": 24564,
    "L4": 23034,
    "A10G": 23028,
    "T4": 15360,
}
_WITHOUT_E4M3 = frozenset({"A100-80GB", "A100-40GB", "A10G", "T4"})  # below compute capability 8.9
_UNITS = {"MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([MGT]I?B)")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    name: str
    type: DeviceType
    total_bytes: int  # available to a worker
    reads_e4m3: bool = True  # its kernels multiply with fp8 codes; assumed of a GPU given only by its size


def find_device(text: str) -> DeviceMemory:
    """Parses a device: `cpu` or `cuda` of this machine, a GPU model such as `H200`, `24GiB` of GPU, or `cpu:64GiB`.

    Of this machine's devices, only the free memory counts. Raises InvalidInput.
    """
    upper = text.strip().upper()
    if upper == "CPU":
        return DeviceMemory("cpu", "cpu", available_bytes())
    if upper == "CUDA":
        return _this_gpu()
    if upper in _GPU_MIB:
        return DeviceMemory(upper, "cuda", _GPU_MIB[upper] << 20, upper not in _WITHOUT_E4M3)
    kind, _, size = upper.rpartition(":")
    found = _SIZE.fullmatch(size)
    if found is None or kind not in ("", "CPU", "CUDA"):
        raise InvalidInput(
            "device", f"{text!r} is not known; give cpu, cuda, {', '.join(_GPU_MIB)}, 24GiB or cpu:64GiB"
        )
    return DeviceMemory(text, "cpu" if kind == "CPU" else "cuda", int(float(found[1]) * _UNITS[found[2]]))


def available_bytes() -> int:
    """Returns the memory that new processes can use without swapping, by Linux's estimate."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError) as error:
        raise InvalidInput(
            "device", f"'cpu': {_MEMINFO} does not say how much is free ({error!r}); give its size, as in cpu:64GiB"
        ) from error


def _this_gpu() -> DeviceMemory:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise InvalidInput("device", f"'cuda': {error.name} is not installed; give the GPU's name or size") from error
    if not torch.cuda.is_available():
        raise InvalidInput(
            "device", "'cuda': there is no GPU here; give the name or size of one, such as H200 or 24GiB"
        )
    reads_e4m3 = torch.cuda.get_device_capability() >= (8, 9)  # as `engine.kernels.kv_quantization` has it
    return DeviceMemory(torch.cuda.get_device_name(), "cuda", int(torch.cuda.mem_get_info()[0]), reads_e4m3)
