"""Which wires this process can use, in order of preference. The one place that knows them all by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kv_transfer import cuda_ipc, nixl, nixl_agent, shared_memory, torch_dist
from kv_transfer.pages import PageBuffer
from kv_transfer.transport import Landing, ReceivingTransport, SendingTransport
from penstock.config import TransferConfig
from penstock.errors import ConfigError, TransferError
from penstock.types import Epoch

log = logging.getLogger(__name__)

WireT = TypeVar("WireT")


def receiving(pages: PageBuffer, config: TransferConfig, landing: Landing) -> list[ReceivingTransport]:
    """Raises ConfigError when the configured wire cannot be used here."""
    makers: dict[str, Callable[[], ReceivingTransport]] = {
        cuda_ipc.NAME: lambda: cuda_ipc.make_receiver(pages, config, landing),
        shared_memory.NAME: lambda: shared_memory.make_receiver(pages, config, landing),
        nixl.NAME: lambda: nixl.NixlReceiver(pages, config),
        torch_dist.NAME: lambda: torch_dist.TorchReceiver(pages, config, landing),
    }
    return _make(makers, config, cuda_ipc.can_receive(pages), shared_memory.can_receive(pages))


def sending(
    pages: PageBuffer, config: TransferConfig, epoch: Epoch, wake: Callable[[], None]
) -> list[SendingTransport]:
    """Raises ConfigError when the configured wire cannot be used here."""
    makers: dict[str, Callable[[], SendingTransport]] = {
        cuda_ipc.NAME: lambda: cuda_ipc.make_sender(pages, config, wake),
        shared_memory.NAME: lambda: shared_memory.make_sender(pages, config, wake),
        nixl.NAME: lambda: nixl.NixlSender(pages, config, epoch),
        torch_dist.NAME: lambda: torch_dist.TorchSender(pages, config, wake),
    }
    return _make(makers, config, cuda_ipc.can_send(pages), shared_memory.can_send(pages))


def _make(
    makers: dict[str, Callable[[], WireT]], config: TransferConfig, can_ipc: bool, can_share: bool
) -> list[WireT]:
    """Best first: where both ends share memory nothing needs to be driven or staged."""
    has = {
        cuda_ipc.NAME: can_ipc,
        shared_memory.NAME: can_share,
        nixl.NAME: nixl_agent.is_installed(),
        torch_dist.NAME: True,
    }
    names = [name for name in has if has[name]] if config.transport == "auto" else [config.transport]
    made: list[WireT] = []
    for name in names:
        try:
            made.append(makers[name]())
        except (TransferError, OSError) as error:
            if config.transport != "auto":
                raise ConfigError(f"transfer.transport = {name!r}: {error}; mend that or use 'auto'") from error
            log.warning("transport %s cannot be used and is left out: %s", name, error)
    if not made:
        raise ConfigError("transfer.transport = 'auto': no transport can be used; see the warnings above")
    return made
