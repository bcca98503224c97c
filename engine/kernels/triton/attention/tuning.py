"""Tile sizes, warps and pipeline stages of kernels, looked up by device and shape.

Nothing is measured while serving. `python -m benchmarks.gpu.tune` measures on the GPU at hand and stores the fastest
configurations in a file of the cache folder; files in `engine/kernels/tuned` ship with the package. Other shapes use
the kernel's default, derived from a Hopper's registers and the device's shared memory.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).parents[2] / "tuned"


@dataclass(frozen=True, slots=True)
class KernelConfig:
    rows: int  # of a tile of queries or outputs; fixed in kernels without a choice
    tile: int  # along the loop: tokens of the context, inputs of a product
    num_warps: int
    num_stages: int


HOPPER_SHARED_BYTES = 227 << 10  # of a multiprocessor, available to one program
Tuned = dict[str, dict[str, KernelConfig]]  # by kernel and shape


def select_config(kernel: str, shape: str, default: KernelConfig, device: torch.device) -> KernelConfig:
    """Returns the measured configuration for this kernel, shape and kind of device, or else `default`."""
    if device.type != "cuda":
        return default
    return load_tuned(device_name(device)).get(kernel, {}).get(shape, default)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Returns how much shared memory a program may use on the device: 163 KiB on an A100, 99 on Ada and GA10x."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    from triton.runtime.driver import driver

    found: dict[str, int] = driver.active.utils.get_device_properties(device.index or 0)  # a launch's limit
    return found["max_shared_mem"]


def fitted(config: KernelConfig, needed: Callable[[KernelConfig], int], device: torch.device) -> KernelConfig:
    """Returns the configuration, with fewer stages, then shorter tiles, then fewer rows, as the device's shared memory
    requires. `needed` returns an upper bound of the bytes that a configuration takes."""
    limit = shared_bytes(device)
    while needed(config) > limit:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.tile > 32:
            config = replace(config, tile=config.tile // 2)
        elif config.rows > 64:
            config = replace(config, rows=config.rows // 2, num_warps=4)
        elif config.tile > 16:
            config = replace(config, tile=config.tile // 2)
        else:
            return config  # the launch then reports the shortage
    return config


@functools.cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device).replace(" ", "_").replace("/", "_")


@functools.cache
def load_tuned(name: str) -> Tuned:
    """Merges the package's file with this machine's cache folder, which takes precedence."""
    found: Tuned = {}
    for file in (SHIPPED / f"{name}.json", tuned_file(name)):
        for kernel, shapes in _read(file).items():
            found.setdefault(kernel, {}).update(shapes)
    return found


def tuned_file(name: str) -> Path:
    """Returns the file for this machine's measurements."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "penstock" / "tuned" / f"{name}.json"


def save_tuned(file: Path, tuned: Tuned) -> None:
    """Adds to the file's entries, atomically: a reader finds the old file or the new one."""
    kept = _read(file)
    for kernel, shapes in tuned.items():
        kept.setdefault(kernel, {}).update(shapes)
    plain = {kernel: {shape: asdict(config) for shape, config in shapes.items()} for kernel, shapes in kept.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(plain, indent=1, sort_keys=True) + "\n")
    scratch.replace(file)


def _read(file: Path) -> Tuned:
    """Returns the file's entries; none if it is missing, or if it is invalid, which is logged."""
    try:
        plain = json.loads(file.read_text())
        return {
            kernel: {shape: KernelConfig(**config) for shape, config in shapes.items()}
            for kernel, shapes in plain.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s is invalid, defaults apply: %s; delete it, or run python -m benchmarks.gpu.tune", file, error)
        return {}
