"""Which wires this process can use, in order of preference. The one place that knows them all by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kv_transfer import nixl, torch_dist
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
        nixl.NAME: lambda: nixl.NixlReceiver(pages, config),
        torch_dist.NAME: lambda: torch_dist.TorchReceiver(pages, config, landing),
    }
    return _make(makers, config)


def sending(
    pages: PageBuffer, config: TransferConfig, epoch: Epoch, wake: Callable[[], None]
) -> list[SendingTransport]:
    """Raises ConfigError when the configured wire cannot be used here."""
    makers: dict[str, Callable[[], SendingTransport]] = {
        nixl.NAME: lambda: nixl.NixlSender(pages, config, epoch),
        torch_dist.NAME: lambda: torch_dist.TorchSender(pages, config, wake),
    }
    return _make(makers, config)


def available(config: TransferConfig) -> list[str]:
    """Names of the wires that `config` allows and this process has, best first."""
    if config.transport != "auto":
        return [config.transport]
    return [nixl.NAME, torch_dist.NAME] if nixl.is_installed() else [torch_dist.NAME]


def _make(makers: dict[str, Callable[[], WireT]], config: TransferConfig) -> list[WireT]:
    made: list[WireT] = []
    for name in available(config):
        try:
            made.append(makers[name]())
        except (TransferError, OSError) as error:
            if config.transport != "auto":
                raise ConfigError(f"transfer.transport = {name!r}: {error}; mend that or use 'auto'") from error
            log.warning("transport %s cannot be used and is left out: %s", name, error)
    if not made:
        raise ConfigError("transfer.transport = 'auto': no transport can be used; see the warnings above")
    return made
