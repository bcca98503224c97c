"""Bounds the number of values of the metrics' `tenant` label, which is off by default."""

from __future__ import annotations

OTHER = "other"
_NAMES = ("tenant",)


class TenantLabel:
    """Gives each of the first tenants its own label value; later ones share `other`."""

    def __init__(self, max_tenants: int) -> None:
        """Gives up to `max_tenants` tenants their own value; 0 omits the label."""
        self.names: tuple[str, ...] = _NAMES if max_tenants else ()
        self._max_tenants = max_tenants
        self._known: dict[str, tuple[str, ...]] = {}

    def values(self, tenant: str) -> tuple[str, ...]:
        """Returns the label values of a tenant, one for each of `names`."""
        if not self.names:
            return ()
        if (found := self._known.get(tenant)) is None:
            if len(self._known) >= self._max_tenants:
                return (OTHER,)
            found = self._known[tenant] = (tenant,)
        return found
