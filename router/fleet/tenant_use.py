"""Defines the tenants' usage that routers report to each other, and the interface that exchanges it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.types import Epoch


@dataclass(frozen=True, slots=True)
class TenantUse:
    """The usage of one tenant at one router."""

    num_requests: int = 0  # queued or at the workers
    inflight_tokens: int = 0  # of KV at the workers
    spent_tokens: int = 0  # charged to its rate since the router started, less refunds


class QuotaExchange(Protocol):
    """Provides this router's usage to the other routers and receives theirs.

    Its methods are called on the event loop and must return at once.
    """

    def tenant_uses(self) -> Mapping[str, TenantUse]:
        """Returns the usage of tenants with limits at this router."""
        ...

    def on_peer_uses(self, peer: str, epoch: Epoch, uses: Mapping[str, TenantUse]) -> None:
        """Replaces what is known of the router at the address `peer`."""
        ...

    def on_peer_away(self, peer: str) -> None:
        """Drops the usage at a router that is unreachable or has left."""
        ...
