"""Checks of this machine: Ray, memory and disk space, GPUs, NIXL, the model's folder and ports."""

from __future__ import annotations

import contextlib
import importlib.util
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cluster.diagnose.findings import Finding, Severity
from cluster.diagnose.ray_checks import check_installed_ray
from cluster.ray.launch import resolve_ports
from engine.models.config import ModelConfig
from engine.weights.hub import HubModel
from penstock.config import ServeConfig, load
from penstock.errors import ConfigError, PenstockError

_HERE = "this machine"
_CONNECT_TIMEOUT_S = 5.0
_MIN_SHM_BYTES = 256 << 20
_MIN_DISK_SHARE = 0.06  # Ray stops when 5 % of the disk that it logs to is free
_MIN_FILES = 4096  # a router holds a socket for each client
_MIB = 1 << 20
_GPU_FIELDS = "name,memory.used,memory.total,temperature.gpu,ecc.errors.uncorrected.volatile.total"
_NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits")


def check_machine() -> Iterator[Finding]:
    """Checks everything that needs neither a configuration nor a deployment."""
    yield from check_installed_ray(_HERE)
    yield from _check_space()
    yield from _check_gpus()
    yield _check_nixl()


def _check_space() -> Iterator[Finding]:
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        advice = "enlarge it (container: --shm-size=1g); Ray and NCCL use it" if free < _MIN_SHM_BYTES else ""
        yield _space_finding("/dev/shm", f"{free / _MIB:.0f} MiB free", advice)
    folder = tempfile.gettempdir()
    disk = shutil.disk_usage(folder)
    low = disk.free < _MIN_DISK_SHARE * disk.total
    advice = f"free space in {folder}, or move it with RAY_TMPDIR: Ray stops at 95 %" if low else ""
    yield _space_finding("disk", f"{disk.free / _MIB:.0f} MiB free in {folder}, {disk.free / disk.total:.0%}", advice)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 0 <= soft < _MIN_FILES
    advice = f"ulimit -n {_MIN_FILES} or more where routers run: each client is a socket" if low else ""
    yield _space_finding("open files", f"{soft} at most", advice)


def _space_finding(check: str, text: str, advice: str) -> Finding:
    return Finding(check, _HERE, Severity.WARNING if advice else Severity.OK, text, advice)


def _check_gpus() -> Iterator[Finding]:
    """Yields a finding for each GPU, or a single one where the driver's tool is missing or fails."""
    if shutil.which(_NVIDIA_SMI[0]) is None:
        yield Finding("gpu", _HERE, Severity.SKIPPED, "no nvidia-smi here: workers compute on the CPU")
        return
    try:
        answer = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        advice = "check the driver: dmesg | grep NVRM"
        yield Finding("gpu", _HERE, Severity.PROBLEM, f"nvidia-smi failed: {error}", advice)
        return
    for index, line in enumerate(answer.stdout.strip().splitlines()):
        yield judge_gpu(index, [cell.strip() for cell in line.split(",")])


def judge_gpu(index: int, cells: list[str]) -> Finding:
    """Judges one line of `nvidia-smi`, whose cells are _GPU_FIELDS; [N/A] stands for what a GPU does not report."""
    name, used, total, degrees, ecc = (*cells, *[""] * 5)[:5]
    text = f"{name}, {used} of {total} MiB used, {degrees} degrees"
    if ecc.isdecimal() and int(ecc):
        advice = f"take GPU {index} out of service and reset it: nvidia-smi -r -i {index}"
        return Finding("gpu", f"GPU {index}", Severity.PROBLEM, f"{text}, {ecc} uncorrected memory errors", advice)
    return Finding("gpu", f"GPU {index}", Severity.OK, text)


def _check_nixl() -> Finding:
    if any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13")):
        return Finding("nixl", _HERE, Severity.OK, "installed")
    text = "not installed: between hosts, KV pages travel over torch.distributed"
    return Finding("nixl", _HERE, Severity.SKIPPED, text, "for RDMA: pip install 'penstock[nixl]' on every node")


def check_configuration(config_file: str | None, model: str | None) -> tuple[ServeConfig | None, Finding | None]:
    """Checks the configuration and model that are to be served; two Nones if neither is given.

    Of a model of the Hub only config.json is fetched.
    """
    subject = config_file or model
    if subject is None:
        return None, None
    try:
        config = load(ServeConfig, config_file) if config_file else ServeConfig(model=subject)
        of_hub = HubModel.parse(config.model)
        folder = of_hub.fetch(config_only=True) if of_hub else config.model
        found = ModelConfig.from_folder(folder, has_weights=of_hub is None)
    except PenstockError as error:
        advice = "give a Hugging Face checkpoint folder or an id of the Hub"
        return None, Finding("model", subject, Severity.PROBLEM, error.message, advice)
    rest = "downloaded when it is served" if of_hub else f"revision {found.revision[:12]}"
    text = f"{config.model}: {found.num_layers} layers, {found.dtype}, {rest}"
    return config, Finding("model", subject, Severity.OK, text)


def check_ports(config: ServeConfig) -> Finding:
    """Checks that the configured ports are free."""
    try:
        resolve_ports(config)
    except ConfigError as conflict:
        return Finding("ports", _HERE, Severity.PROBLEM, conflict.message, "or stop the process that listens there")
    ports = f"{config.http_port}, {config.grpc_port} and {config.admin_port}"
    if not config.routers:
        return Finding("ports", _HERE, Severity.OK, f"{config.admin_port} is free")
    return Finding("ports", _HERE, Severity.OK, f"{ports} are free")


def check_endpoint(endpoint: str) -> Finding:
    """Checks that a router's endpoint, such as http://host:port, accepts connections from here."""
    host, _, port = endpoint.partition("://")[2].partition("/")[0].rpartition(":")
    try:
        with contextlib.closing(socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S)):
            return Finding("ports", endpoint, Severity.OK, "accepts connections")
    except OSError as error:
        advice = "look for a firewall in between, and at `penstock status` for the router"
        return Finding("ports", endpoint, Severity.PROBLEM, f"cannot be reached from here: {error}", advice)
