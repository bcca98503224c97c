"""NIXL's agent with the pool registered: how it is loaded and set up.

Beneath nixl.py. NIXL calls are made under `Agent.lock`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import ipaddress
import mmap
import os
import secrets
import threading
from typing import Any

import numpy as np
import torch

from kv_transfer.own_sockets import listening_ports
from kv_transfer.pages import PageBuffer
from penstock.config import TransferConfig
from penstock.errors import TransferError


def is_installed() -> bool:
    return module_name() is not None


def module_name() -> str | None:
    """The build that fits torch's CUDA. Only one may be imported in a process."""
    major = (torch.version.cuda or "12").split(".")[0]
    for name in (f"nixl_cu{major}", "nixl_cu12", "nixl_cu13", "nixl"):
        if importlib.util.find_spec(name) is not None:
            return name
    return None


class Agent:
    """One NIXL agent with the pool registered. NIXL calls are made under `lock`: agents are not thread-safe."""

    def __init__(self, pages: PageBuffer, config: TransferConfig) -> None:
        name = module_name()
        if name is None:
            raise TransferError("NIXL is not installed; pip install 'penstock[nixl]'")
        _set_ucx_defaults(config.host)
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
            others = listening_ports()
            settings = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self.api = api.nixl_agent(self.name, settings)
            self.ports = sorted(listening_ports() - others)  # where UCX takes TCP connections, if it does
            self.register(pages.tensor)
        except self.errors as error:
            raise TransferError(f"NIXL agent: {error}") from error

    @classmethod
    def warm_up(cls, config: TransferConfig) -> None:
        """UCX looks at the machine once a process, for 0.4 s of a core: here, beside what else a start takes. Blocks;
        afterwards nothing of it is left open. Whoever makes the real agent hears what is wrong."""
        if config.transport in ("auto", "nixl") and is_installed():
            with contextlib.suppress(TransferError):
                cls(PageBuffer(torch.zeros(1, mmap.PAGESIZE, dtype=torch.uint8)), config).close()

    def register(self, tensor: torch.Tensor) -> None:
        self._registered.append(self.api.register_memory(tensor))

    def prepare(self, agent_name: str, address: int, device: int, num_pages: int, page_bytes: int) -> Any:
        """A descriptor for every page, so that a push needs page numbers only."""
        table_P3 = np.empty((num_pages, 3), dtype=np.uint64)
        table_P3[:, 0] = np.uint64(address) + np.arange(num_pages, dtype=np.uint64) * np.uint64(page_bytes)
        table_P3[:, 1] = page_bytes
        table_P3[:, 2] = device
        return self.api.prep_xfer_dlist(agent_name, table_P3, self.memory)

    def close(self) -> None:
        with self.lock:
            while self._registered:
                self.api.deregister_memory(self._registered.pop())


def _set_ucx_defaults(host: str) -> None:
    """Only what the user has not set. Must run before UCX is loaded."""
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")  # a dead peer is our error to report, not a line on stderr
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # its Python part logs to stdout
    if host == "localhost" or _is_loopback(host):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")  # else UCX listens on every interface


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name
