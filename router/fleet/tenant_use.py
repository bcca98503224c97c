"""Defines the usage of tenants at one router, as routers report it to each other, and the interface that takes it."""

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
    spent_tokens: int = 0  # of its rate since the router started, refunds deducted


class QuotaExchange(Protocol):
    """Gives this router's uses to the others and takes theirs. Called on the event loop; returns at once."""

    def tenant_uses(self) -> Mapping[str, TenantUse]:
        """Returns what tenants with limits use here."""
        ...

    def on_peer_uses(self, peer: str, epoch: Epoch, uses: Mapping[str, TenantUse]) -> None:
        """Replaces what is known of the router at that address."""
        ...

    def on_peer_away(self, peer: str) -> None:
        """Notes that the router is out of reach, or has left."""
        ...
