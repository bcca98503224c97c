"""How much memory a device has, by its name: for plans that are made where the device is not. Torch-free unless the
device at hand is asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.errors import InvalidInput

DeviceType = Literal["cpu", "cuda"]

# MiB that nvidia-smi calls total, 2026-11; less than the name says, since the driver and ECC take a part.
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
_UNITS = {"MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([MGT]I?B)")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    name: str
    type: DeviceType
    total_bytes: int  # that a worker may have


def find_device(text: str) -> DeviceMemory:
    """`cpu` and `cuda` are this machine's, with what is free; `H200` and its like a GPU of that kind, `24GiB` one of
    that size, `cpu:64GiB` a host. Raises InvalidInput."""
    upper = text.strip().upper()
    if upper == "CPU":
        return DeviceMemory("cpu", "cpu", _available_bytes())
    if upper == "CUDA":
        return _this_gpu()
    if upper in _GPU_MIB:
        return DeviceMemory(upper, "cuda", _GPU_MIB[upper] << 20)
    kind, _, size = upper.rpartition(":")
    found = _SIZE.fullmatch(size)
    if found is None or kind not in ("", "CPU", "CUDA"):
        raise InvalidInput(
            "device", f"{text!r} is not known; give cpu, cuda, {', '.join(_GPU_MIB)}, 24GiB or cpu:64GiB"
        )
    return DeviceMemory(text, "cpu" if kind == "CPU" else "cuda", int(float(found[1]) * _UNITS[found[2]]))


def _available_bytes() -> int:
    """What new processes can have without swapping, as Linux reckons it."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError) as error:
        raise InvalidInput(
            "device", f"'cpu': {_MEMINFO} does not tell what is free ({error!r}); give its size, as in cpu:64GiB"
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
    return DeviceMemory(torch.cuda.get_device_name(), "cuda", int(torch.cuda.mem_get_info()[0]))
