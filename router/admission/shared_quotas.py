"""Tracks each tenant's usage at the other routers, so that its quota holds for all routers together. Pure.

Routers report each tenant's current requests and KV, which count in addition to this router's own, and the tokens that
the tenant has spent since that router started, whose growth is charged to this router's buckets. An unreachable router
is not counted. A tenant can therefore exceed a limit by what the other routers admit between two reports, and routers
that cannot reach each other each allow the whole limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.types import Epoch
from router.fleet.tenant_use import TenantUse

_NO_USE = TenantUse()
_MAX_PEERS = 256  # beyond this, the peer that was added first is dropped


@dataclass(slots=True)
class _Peer:
    epoch: Epoch
    uses: Mapping[str, TenantUse] = field(default_factory=dict)  # empty while it is unreachable
    spent: dict[str, int] = field(default_factory=dict)  # as last reported; kept while it is unreachable


class SharedQuotas:
    """Holds the latest report of every other router. `TenantAccounts` owns it."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def elsewhere(self, tenant: str) -> TenantUse:
        """Returns the tenant's requests and KV at the other routers; `spent_tokens` is 0."""
        if not self._peers:
            return _NO_USE
        uses = [peer.uses.get(tenant, _NO_USE) for peer in self._peers.values()]
        return TenantUse(sum(use.num_requests for use in uses), sum(use.inflight_tokens for use in uses))

    def apply(self, address: str, epoch: Epoch, uses: Mapping[str, TenantUse]) -> dict[str, int]:
        """Stores a router's report and returns the tokens that each tenant spent there since the previous report.

        Tokens spent before a router's first report are not charged: they may have been spent long ago.
        """
        peer = self._peers.get(address)
        is_known = peer is not None and peer.epoch == epoch
        if peer is None or not is_known:
            peer = self._peers[address] = _Peer(epoch)
            if len(self._peers) > _MAX_PEERS:
                del self._peers[next(iter(self._peers))]
        grown = {
            tenant: use.spent_tokens - peer.spent.get(tenant, 0)
            for tenant, use in uses.items()
            if is_known and use.spent_tokens != peer.spent.get(tenant, 0)
        }
        peer.uses = dict(uses)
        peer.spent.update({tenant: use.spent_tokens for tenant, use in uses.items()})
        return grown

    def away(self, address: str) -> None:
        """Stops counting a router that is unreachable, until it reports again."""
        if (peer := self._peers.get(address)) is not None:
            peer.uses = {}
