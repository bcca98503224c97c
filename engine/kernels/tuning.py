"""How large a kernel's tiles are, how many warps work on one and how many loads are under way: by device and shape.

Nothing is tried out while serving. `python -m benchmarks.tune` measures on the GPU at hand and keeps what was fastest
in a file of the cache folder; files in `engine/kernels/tuned` come with the package. A shape that no file knows takes
the default that its kernel gives, reasoned for a Hopper's shared memory and registers.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_SHIPPED = Path(__file__).parent / "tuned"


@dataclass(frozen=True, slots=True)
class KernelConfig:
    rows: int  # of a tile of queries or outputs; where a kernel has no choice, what it takes
    tile: int  # of what is walked along: tokens of the context, inputs of a product
    num_warps: int
    num_stages: int


Tuned = dict[str, dict[str, KernelConfig]]  # by kernel and shape


def select_config(kernel: str, shape: str, default: KernelConfig, device: torch.device) -> KernelConfig:
    """What was measured for this kernel and shape on such a device, else `default`."""
    if device.type != "cuda":
        return default
    return load_tuned(device_name(device)).get(kernel, {}).get(shape, default)


@functools.cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device).replace(" ", "_").replace("/", "_")


@functools.cache
def load_tuned(name: str) -> Tuned:
    """Of the package's file and that of this machine's cache folder, which counts more."""
    found: Tuned = {}
    for file in (_SHIPPED / f"{name}.json", tuned_file(name)):
        for kernel, shapes in _read(file).items():
            found.setdefault(kernel, {}).update(shapes)
    return found


def tuned_file(name: str) -> Path:
    """Where measurements of this machine are kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "penstock" / "tuned" / f"{name}.json"


def save_tuned(file: Path, tuned: Tuned) -> None:
    """Adds to what the file has; a reader finds the old file or the new one, whole."""
    kept = _read(file)
    for kernel, shapes in tuned.items():
        kept.setdefault(kernel, {}).update(shapes)
    plain = {kernel: {shape: asdict(config) for shape, config in shapes.items()} for kernel, shapes in kept.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(plain, indent=1, sort_keys=True) + "\n")
    scratch.replace(file)


def _read(file: Path) -> Tuned:
    """Nothing where there is no such file; a file that makes no sense is logged and left alone."""
    try:
        plain = json.loads(file.read_text())
        return {
            kernel: {shape: KernelConfig(**config) for shape, config in shapes.items()}
            for kernel, shapes in plain.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s cannot be used, defaults are: %s; delete it, or run python -m benchmarks.tune", file, error)
        return {}
