"""Loads NIXL, registers the pool with an agent, and decides over which paths that agent may write pages.

Only nixl.py uses it, apart from `is_installed` and `NixlAgent.warm_up`. Every NIXL call is made under `NixlAgent.lock`.

Once a sender has finished, a fence may be lifted only if no byte of its pages can still arrive. UCX guarantees that
where the sender itself moves the bytes: over RDMA, or with CMA (`process_vm_writev`) and CUDA IPC on one host. Over TCP
it does not: the receiver's polling copies the pages out of a socket, into which kernels may deliver bytes for minutes
after the sender is gone. So pages never travel over TCP. A process with RDMA forbids UCX to use it. A process without
RDMA confines UCX to the loopback device, where TCP carries notifications only (measured with a frozen receiver,
docs/lab-notes/).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import ipaddress
import mmap
import os
import secrets
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kv_transfer.layout.pages import PageBuffer
from penstock.config import TransferConfig
from penstock.errors import TransferError

_BUILDS = ("nixl_cu13", "nixl_cu12", "nixl")  # "nixl" chooses one of the others by torch's CUDA


def is_installed() -> bool:
    """Returns whether any build of NIXL is installed, even one that does not fit torch's CUDA, which `module_name`
    reports.
    """
    return bool(_installed_builds())


def module_name() -> str:
    """Returns the build of NIXL that fits torch's CUDA; any build fits a torch without CUDA. A process may import only
    one build. Raises TransferError, which names the package to install.
    """
    builds = _installed_builds()
    if torch.version.cuda is None and builds:
        return builds[0]
    major = (torch.version.cuda or "13").split(".")[0]
    fitting = [name for name in (f"nixl_cu{major}", "nixl") if name in builds]
    if fitting:
        return fitting[0]
    found = f"is installed as {', '.join(builds)}, but torch has CUDA {major}" if builds else "is not installed"
    extra = "nixl" if major == "13" else f"nixl-cu{major}"
    raise TransferError(f"NIXL {found}; pip install 'penstock[{extra}]'")


def _installed_builds() -> list[str]:
    return [name for name in _BUILDS if importlib.util.find_spec(name) is not None]


class NixlAgent:
    """A NIXL agent with the pool registered. NIXL calls are made under `lock`: agents are not thread-safe."""

    def __init__(self, pages: PageBuffer, config: TransferConfig) -> None:
        name = module_name()
        self.uses_rdma = has_rdma() and not _is_loopback(config.host)
        if not self.uses_rdma and not has_cma():
            raise TransferError("no RDMA port is active and process_vm_writev is not permitted; use another transport")
        _configure_ucx(self.uses_rdma)
        try:
            api = importlib.import_module(f"{name}._api")
            bindings = importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            raise TransferError(f"NIXL cannot be loaded: {error}") from error
        own = [kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)]
        self.errors: tuple[type[Exception], ...] = (TransferError, RuntimeError, *own)
        self.name = f"penstock-{secrets.token_hex(16)}"
        self.memory = "VRAM" if pages.is_cuda else "DRAM"
        self.device = pages.device.index or 0 if pages.is_cuda else 0
        self.lock = threading.Lock()
        self._registered: list[Any] = []
        try:
            settings = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self.api: Any = api.nixl_agent(self.name, settings)
            self.register(pages.tensor)
        except self.errors as error:
            raise TransferError(f"NIXL agent: {self.memory} memory: {error}{self.advice}") from error

    @property
    def advice(self) -> str:
        """Returns what to do if NIXL cannot reach this memory, as the end of an error message."""
        if self.memory == "DRAM":
            return ""
        return (
            "; UCX reaches a GPU's memory only with its CUDA modules: let UCX_TLS allow cuda_copy and cuda_ipc, let "
            "UCX_MODULE_DIR be unset or name the modules of the installed NIXL, or set transfer.transport to another"
        )

    @classmethod
    def warm_up(cls, config: TransferConfig) -> None:
        """Makes UCX inspect the machine, which takes 0.4 s of a core once per process, while other parts of a worker
        start. Blocks, and leaves nothing open. Ignores errors, which the real agent reports.
        """
        if config.transport in ("auto", "nixl") and is_installed():
            with contextlib.suppress(TransferError):
                cls(PageBuffer(torch.zeros(1, mmap.PAGESIZE, dtype=torch.uint8)), config).close()

    def register(self, tensor: torch.Tensor) -> None:
        self._registered.append(self.api.register_memory(tensor))

    def prepare(self, agent_name: str, address: int, device: int, num_pages: int, page_bytes: int) -> Any:
        """Returns a descriptor list with every page, so that a push needs only page numbers."""
        table_P3 = np.empty((num_pages, 3), dtype=np.uint64)
        table_P3[:, 0] = np.uint64(address) + np.arange(num_pages, dtype=np.uint64) * np.uint64(page_bytes)
        table_P3[:, 1] = page_bytes
        table_P3[:, 2] = device
        return self.api.prep_xfer_dlist(agent_name, table_P3, self.memory)

    def close(self) -> None:
        """Withdraws the memory and ends the agent, so that other agents can no longer reach it. Idempotent. Raises what
        NIXL raises, but ends the agent in any case.
        """
        with self.lock:
            registered, self._registered = self._registered, []
            api, self.api = self.api, None
            try:
                for memory in registered:
                    api.deregister_memory(memory)
            finally:
                del (
                    api,
                    registered,
                )  # the last references; UCX unmaps what its cache still holds with its context


def has_rdma() -> bool:
    """Returns whether an InfiniBand or RoCE port of this host is active and reachable from this process."""
    states = Path("/sys/class/infiniband").glob("*/ports/*/state")
    return Path("/dev/infiniband").exists() and any("ACTIVE" in state.read_text() for state in states)


def has_cma() -> bool:
    """Returns whether the kernel lets this process write another one's memory: UCX tests it the same way."""
    write = getattr(ctypes.CDLL(None), "process_vm_writev", None)
    if write is None:
        return False
    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)
    local, remote = (
        (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 1)  # a struct iovec: address and length
        for buffer in (source, target)
    )
    return bool(write(os.getpid(), local, ctypes.c_ulong(1), remote, ctypes.c_ulong(1), ctypes.c_ulong(0)) == 1)


def _configure_ucx(uses_rdma: bool) -> None:
    """Sets the variables that the user has not set. Must run before UCX is loaded. Raises TransferError if UCX_TLS
    would let pages travel over TCP.
    """
    os.environ.setdefault("UCX_LOG_LEVEL", "error")  # only the log says why memory could not be registered
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # at higher levels its Python part logs to stdout
    if uses_rdma:
        transports = os.environ.setdefault("UCX_TLS", "^tcp")
        if _allows(transports, "tcp"):
            raise TransferError(f"UCX_TLS={transports}: pages must not travel over TCP; unset it or use UCX_TLS=^tcp")
        return
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    transports = os.environ.get("UCX_TLS", "all")
    if not _allows(transports, "cma", "sm", "shm"):
        raise TransferError(f"UCX_TLS={transports}: without RDMA pages must travel over CMA; unset it or add cma to it")


def _allows(ucx_tls: str, *names: str) -> bool:
    """Returns whether a value of UCX_TLS lets UCX use one of these transports."""
    listed = {name.strip() for name in ucx_tls.removeprefix("^").split(",")}
    if ucx_tls.startswith("^"):
        return not listed.intersection(names)
    return bool(listed.intersection((*names, "all")))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name
