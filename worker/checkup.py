"""Reports the state of a worker's machine to `penstock doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from engine.engine import Engine
from engine.models.config import ModelConfig
from penstock.config import EngineConfig
from penstock.errors import CheckpointError
from penstock.v1 import worker_pb2

_SIDE = 64  # rows and columns of the matrices that the check multiplies
_SHM = Path("/dev/shm")


def check_up(engine: Engine, config: EngineConfig) -> worker_pb2.CheckupResponse:
    """Returns the report. Blocks for a few milliseconds; may be called from any thread."""
    device = engine.kv_pages.device
    answer = worker_pb2.CheckupResponse(
        unix_time_s=time.time(),
        host=platform.node(),
        python=platform.python_version(),
        torch=torch.__version__,
        penstock=_own_version(),
        device=device_name(engine),
        device_fault=_find_device_fault(device),
        model_fault=_find_model_fault(config.model, engine.model.revision),
    )
    answer.memory_total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    answer.memory_free_bytes = _available_memory(answer.memory_total_bytes)
    if device.type == "cuda":
        answer.device_free_bytes, answer.device_total_bytes = torch.cuda.mem_get_info(device)
    if _SHM.is_dir():
        answer.shm_free_bytes = shutil.disk_usage(_SHM).free
    if config.disk_path is not None:
        answer.disk_path, answer.disk_free_bytes = config.disk_path, _disk_free(config.disk_path)
    return answer


def _own_version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "from source"


def device_name(engine: Engine) -> str:
    """Returns the name of the engine's device, or `cpu` if it has none."""
    device = engine.kv_pages.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _find_device_fault(device: torch.device) -> str:
    """Multiplies two matrices of ones; returns the problem, or an empty string."""
    try:
        ones = torch.ones(_SIDE, _SIDE, device=device)
        product = (ones @ ones).sum().item()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return "" if product == _SIDE**3 else f"a product of ones is {product:g}, not {_SIDE**3}"


def _find_model_fault(model: str, revision: str) -> str:
    """Reads the model's folder, which a successor of this worker would need; returns the problem or an empty string."""
    try:
        found = ModelConfig.from_folder(model).revision
    except CheckpointError as error:
        return error.message
    return "" if found == revision else f"{model} now holds revision {found}, but the worker serves {revision}"


def _available_memory(total: int) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total  # unknown outside Linux, so no problem is reported
    kilobytes = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), total // 1024)
    return kilobytes * 1024


def _disk_free(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0
