"""What each tenant has at the workers and what it has left of its token rate. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router.budgets import TokenBucket

_BURST_S = 60.0  # of a token rate, where the tenant has no burst of its own
_MANY = 4096  # buckets, before those that are full again are dropped


class Limits(Protocol):
    """What one tenant may use; None: no limit. `penstock.admission_config.TenantLimits` has the meanings."""

    @property
    def weight(self) -> float: ...

    @property
    def tokens_per_s(self) -> float | None: ...

    @property
    def burst_tokens(self) -> int | None: ...

    @property
    def max_inflight_tokens(self) -> int | None: ...

    @property
    def max_requests(self) -> int | None: ...


class TenantAccounts:
    """Owns the counts; the limits are asked for each time, since they may change."""

    def __init__(self, limits_of: Callable[[str], Limits]) -> None:
        self._limits_of = limits_of
        self._buckets: dict[str, tuple[Limits, TokenBucket]] = {}
        self._num_requests: dict[str, int] = {}  # waiting, or at the workers
        self._inflight_tokens: dict[str, int] = {}  # of KV at the workers

    def limits(self, tenant: str) -> Limits:
        return self._limits_of(tenant)

    def weight(self, tenant: str) -> float:
        return self._limits_of(tenant).weight

    def num_requests(self, tenant: str) -> int:
        return self._num_requests.get(tenant, 0)

    def enter(self, tenant: str) -> None:
        """One request more is admitted."""
        self._num_requests[tenant] = self.num_requests(tenant) + 1

    def leave(self, tenant: str) -> None:
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            del self._num_requests[tenant]

    def inflight_tokens(self, tenant: str) -> int:
        return self._inflight_tokens.get(tenant, 0)

    def fits(self, tenant: str, num_tokens: int) -> bool:
        """Whether so many more tokens of KV are within its quota now."""
        quota = self._limits_of(tenant).max_inflight_tokens
        return quota is None or self.inflight_tokens(tenant) + num_tokens <= quota

    def send(self, tenant: str, num_tokens: int) -> None:
        self._inflight_tokens[tenant] = self.inflight_tokens(tenant) + num_tokens

    def end(self, tenant: str, num_tokens: int) -> None:
        self._inflight_tokens[tenant] -= num_tokens
        if not self._inflight_tokens[tenant]:
            del self._inflight_tokens[tenant]

    def rate_wait_s(self, tenant: str, num_tokens: int, now_s: float) -> float:
        """Until so many tokens are within its rate."""
        bucket = self._bucket(tenant, now_s)
        return bucket.wait_s(num_tokens, now_s) if bucket else 0.0

    def spend(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """Takes tokens of its rate, or gives them back where negative."""
        if (bucket := self._bucket(tenant, now_s)) is not None:
            bucket.take(num_tokens, now_s)

    def _bucket(self, tenant: str, now_s: float) -> TokenBucket | None:
        """Made anew, and full, where the tenant's limits have changed."""
        limits = self._limits_of(tenant)
        if limits.tokens_per_s is None:
            return None
        held = self._buckets.get(tenant)
        if held is None or held[0] != limits:
            burst = limits.burst_tokens or _BURST_S * limits.tokens_per_s
            held = self._buckets[tenant] = (limits, TokenBucket(limits.tokens_per_s, burst, now_s))
            if len(self._buckets) > _MANY:
                self._drop_full(now_s)
        return held[1]

    def _drop_full(self, now_s: float) -> None:
        """A full bucket is what a new one would be."""
        self._buckets = {one: held for one, held in self._buckets.items() if not held[1].is_full(now_s)}
