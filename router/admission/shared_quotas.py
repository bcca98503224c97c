"""Tracks what a tenant uses at the other routers: one quota is one quota however many routers there are. Pure.

Routers report requests and KV of the moment, which are added to the own ones, and the tokens that each tenant has spent
since the router started, of which the growth is charged to the own buckets. A router that is out of reach is not
counted. A tenant can therefore exceed a limit by what the other routers admit within one report, and while routers
cannot reach each other each of them allows the whole limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.types import Epoch
from router.fleet.tenant_use import TenantUse

_NO_USE = TenantUse()
_MAX_PEERS = 256  # remembered; the oldest is dropped


@dataclass(slots=True)
class _Peer:
    epoch: Epoch
    uses: Mapping[str, TenantUse] = field(default_factory=dict)  # empty while it is out of reach
    spent: dict[str, int] = field(default_factory=dict)  # as last reported, kept while it is out of reach


class SharedQuotas:
    """Owned by the tenants' accounts."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def elsewhere(self, tenant: str) -> TenantUse:
        """Returns the tenant's requests and KV at the other routers; `spent_tokens` is 0."""
        if not self._peers:
            return _NO_USE
        uses = [peer.uses.get(tenant, _NO_USE) for peer in self._peers.values()]
        return TenantUse(sum(use.num_requests for use in uses), sum(use.inflight_tokens for use in uses))

    def apply(self, address: str, epoch: Epoch, uses: Mapping[str, TenantUse]) -> dict[str, int]:
        """Takes a router's report. Returns the tokens that each tenant has spent there since its previous one.

        What a router has spent before its first report here is not known to be recent, and is not charged.
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
        """Counts nothing of a router that is out of reach, until it reports again."""
        if (peer := self._peers.get(address)) is not None:
            peer.uses = {}
