"""Bounds the values of the metrics' `tenant` label, which is off unless it is configured."""

from __future__ import annotations

OTHER = "other"
_NAMES = ("tenant",)


class TenantLabel:
    """Gives the first tenants that it sees their own value; later ones share `other`."""

    def __init__(self, most: int) -> None:
        """Allows `most` tenants a value of their own; with 0 there is no label."""
        self.names: tuple[str, ...] = _NAMES if most else ()
        self._most = most
        self._known: dict[str, tuple[str, ...]] = {}

    def values(self, tenant: str) -> tuple[str, ...]:
        """Returns the values for `names`."""
        if not self.names:
            return ()
        if (found := self._known.get(tenant)) is None:
            if len(self._known) >= self._most:
                return (OTHER,)
            found = self._known[tenant] = (tenant,)
        return found
