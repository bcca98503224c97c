"""Opens the transports that this process can use, in order of preference. Only this module knows all of them by
name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kv_transfer.layout.pages import PageBuffer
from kv_transfer.transports import nixl, nixl_agent, torch_dist
from kv_transfer.transports.mapped import cuda_ipc, shared_memory
from kv_transfer.transports.transport import Landing, ReceivingTransport, SendingTransport
from penstock.config import TransferConfig
from penstock.errors import ConfigError, TransferError
from penstock.types import Epoch

log = logging.getLogger(__name__)

TransportT = TypeVar("TransportT")


def receiving_transports(pages: PageBuffer, config: TransferConfig, landing: Landing) -> list[ReceivingTransport]:
    """Opens the usable transports, best first. Raises ConfigError if the configured one cannot be used."""
    openers: dict[str, Callable[[], ReceivingTransport]] = {
        cuda_ipc.NAME: lambda: cuda_ipc.make_receiver(pages, config, landing),
        shared_memory.NAME: lambda: shared_memory.make_receiver(pages, config, landing),
        nixl.NAME: lambda: nixl.NixlReceiver(pages, config, landing),
        torch_dist.NAME: lambda: torch_dist.TorchReceiver(pages, config, landing),
    }
    return _make(openers, config, cuda_ipc.can_receive(pages), shared_memory.can_receive(pages))


def sending_transports(
    pages: PageBuffer, config: TransferConfig, epoch: Epoch, wake: Callable[[], None]
) -> list[SendingTransport]:
    """Opens the usable transports, best first. Raises ConfigError if the configured one cannot be used."""
    openers: dict[str, Callable[[], SendingTransport]] = {
        cuda_ipc.NAME: lambda: cuda_ipc.make_sender(pages, config, wake),
        shared_memory.NAME: lambda: shared_memory.make_sender(pages, config, wake),
        nixl.NAME: lambda: nixl.NixlSender(pages, config, epoch, wake),
        torch_dist.NAME: lambda: torch_dist.TorchSender(pages, config, wake),
    }
    return _make(openers, config, cuda_ipc.can_send(pages), shared_memory.can_send(pages))


def _make(
    openers: dict[str, Callable[[], TransportT]], config: TransferConfig, can_ipc: bool, can_share: bool
) -> list[TransportT]:
    """Opens them in order: mapped memory first, because nothing needs to be polled or staged there."""
    has = {
        cuda_ipc.NAME: can_ipc,
        shared_memory.NAME: can_share,
        nixl.NAME: nixl_agent.is_installed(),
        torch_dist.NAME: True,
    }
    names = [name for name in has if has[name]] if config.transport == "auto" else [config.transport]
    opened: list[TransportT] = []
    for name in names:
        try:
            opened.append(openers[name]())
        except (TransferError, OSError) as error:
            if config.transport != "auto":
                raise ConfigError(f"transfer.transport = {name!r}: {error}; fix that or use 'auto'") from error
            log.warning("transport %s is left out: %s", name, error)
    if not opened:
        raise ConfigError("transfer.transport = 'auto': no transport can be used; the warnings above say why")
    return opened
