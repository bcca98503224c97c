"""Tracks each tenant's requests and KV, at this and the other routers, and what is left of its token rate. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.config.admission import TenantLimits
from penstock.types import Epoch
from router.admission.shared_quotas import SharedQuotas
from router.fleet.tenant_use import TenantUse

_BURST_S = 60.0  # default burst: this many seconds of the tenant's token rate
_MAX_BUCKETS = 4096  # beyond this, full buckets are dropped


class TokenBucket:
    """Holds a budget of tokens that refills at a steady rate.

    A request takes what it is expected to use and, when it ends, takes or returns the difference. The level may fall
    below zero: a tenant that used more than expected waits until the bucket has refilled.
    """

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._level = burst
        self._filled_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Returns the seconds until `amount` may be taken. A full bucket allows even more than the burst."""
        self._fill(now_s)
        missing = min(amount, self._burst) - self._level
        return max(0.0, missing / self._rate_per_s)

    def take(self, amount: float, now_s: float) -> None:
        """Takes tokens, or returns them if `amount` is negative."""
        self._fill(now_s)
        self._level = min(self._burst, self._level - amount)

    def is_full(self, now_s: float) -> bool:
        self._fill(now_s)
        return self._level >= self._burst

    def _fill(self, now_s: float) -> None:
        # Callers may pass an earlier time than the last one: the bucket never fills twice for the same time.
        self._level = min(self._burst, self._level + self._rate_per_s * max(0.0, now_s - self._filled_s))
        self._filled_s = max(self._filled_s, now_s)


class TenantAccounts:
    """Counts each tenant's requests and tokens. Looks up the limits on every call, since they may change."""

    def __init__(self, limits_of: Callable[[str], TenantLimits]) -> None:
        self._limits_of = limits_of
        self._buckets: dict[str, tuple[TenantLimits, TokenBucket]] = {}
        self._num_requests: dict[str, int] = {}  # queued or at the workers
        self._inflight_tokens: dict[str, int] = {}  # of KV at the workers
        self._spent: dict[str, int] = {}  # tokens since this router started, of tenants with a rate
        self._shared = SharedQuotas()
        self._watchers: list[Callable[[], None]] = []

    def limits(self, tenant: str) -> TenantLimits:
        return self._limits_of(tenant)

    def weight(self, tenant: str) -> float:
        return self._limits_of(tenant).weight

    def num_requests(self, tenant: str) -> int:
        """Returns the tenant's requests at all routers."""
        return self._num_requests.get(tenant, 0) + self._shared.elsewhere(tenant).num_requests

    def enter(self, tenant: str) -> None:
        """Counts an admitted request."""
        self._num_requests[tenant] = self._num_requests.get(tenant, 0) + 1
        self._notify(tenant)

    def leave(self, tenant: str) -> None:
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            del self._num_requests[tenant]
        self._notify(tenant)

    def inflight_tokens(self, tenant: str) -> int:
        return self._inflight_tokens.get(tenant, 0)

    def fits(self, tenant: str, num_tokens: int) -> bool:
        """Returns whether the tenant's quota, over all routers, now allows `num_tokens` more tokens of KV."""
        quota = self._limits_of(tenant).max_inflight_tokens
        if quota is None:
            return True
        elsewhere = self._shared.elsewhere(tenant).inflight_tokens
        return self.inflight_tokens(tenant) + elsewhere + num_tokens <= quota

    def send(self, tenant: str, num_tokens: int) -> None:
        self._inflight_tokens[tenant] = self.inflight_tokens(tenant) + num_tokens
        self._notify(tenant)

    def end(self, tenant: str, num_tokens: int) -> None:
        self._inflight_tokens[tenant] -= num_tokens
        if not self._inflight_tokens[tenant]:
            del self._inflight_tokens[tenant]
        self._notify(tenant)

    def rate_wait_s(self, tenant: str, num_tokens: int, now_s: float) -> float:
        """Returns the seconds until the tenant's rate allows `num_tokens`."""
        bucket = self._bucket(tenant, now_s)
        return bucket.wait_s(num_tokens, now_s) if bucket else 0.0

    def spend(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """Charges tokens to the tenant's rate, or refunds them if `num_tokens` is negative."""
        if (bucket := self._bucket(tenant, now_s)) is not None:
            bucket.take(num_tokens, now_s)
            self._spent[tenant] = self._spent.get(tenant, 0) + num_tokens
            self._notify(tenant)

    # Quotas shared with the other routers.

    def watch(self, callback: Callable[[], None]) -> None:
        """Calls `callback` after every change of what `uses` returns. It must return quickly."""
        self._watchers.append(callback)

    def uses(self) -> dict[str, TenantUse]:
        """Returns the usage at this router of the tenants that have limits, so the number of entries stays small."""
        tenants = self._num_requests.keys() | self._inflight_tokens.keys() | self._spent.keys()
        return {
            tenant: TenantUse(
                self._num_requests.get(tenant, 0), self.inflight_tokens(tenant), self._spent.get(tenant, 0)
            )
            for tenant in tenants
            if self._is_limited(tenant)
        }

    def on_peer_uses(self, peer: str, epoch: Epoch, uses: Mapping[str, TenantUse], now_s: float) -> None:
        """Counts the tenants' usage at another router and charges their rates for what they spent there."""
        for tenant, num_tokens in self._shared.apply(peer, epoch, uses).items():
            if (bucket := self._bucket(tenant, now_s)) is not None:
                bucket.take(num_tokens, now_s)

    def on_peer_away(self, peer: str) -> None:
        self._shared.away(peer)

    def _is_limited(self, tenant: str) -> bool:
        limits = self._limits_of(tenant)
        return any(each is not None for each in (limits.tokens_per_s, limits.max_inflight_tokens, limits.max_requests))

    def _notify(self, tenant: str) -> None:
        if self._watchers and self._is_limited(tenant):
            for callback in self._watchers:
                callback()

    def _bucket(self, tenant: str, now_s: float) -> TokenBucket | None:
        """Returns the tenant's bucket, or None if it has no rate. Starts with a full bucket if the limits changed."""
        limits = self._limits_of(tenant)
        if limits.tokens_per_s is None:
            return None
        known = self._buckets.get(tenant)
        if known is None or known[0] != limits:
            burst = limits.burst_tokens or _BURST_S * limits.tokens_per_s
            known = self._buckets[tenant] = (limits, TokenBucket(limits.tokens_per_s, burst, now_s))
            if len(self._buckets) > _MAX_BUCKETS:
                self._drop_full(now_s)
        return known[1]

    def _drop_full(self, now_s: float) -> None:
        """Drops full buckets, which a new bucket can replace without a difference."""
        self._buckets = {tenant: known for tenant, known in self._buckets.items() if not known[1].is_full(now_s)}
