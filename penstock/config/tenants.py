"""Settings of tenants: how their callers identify themselves, and what they may use."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator, model_validator

from penstock.config.admission import TenantLimits
from penstock.config.base import FrozenConfig
from penstock.types import Lane

TENANT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # the name becomes a metrics label
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

TenantName = Annotated[str, StringConstraints(pattern=f"^{TENANT_NAME.pattern}$")]


class TenantConfig(TenantLimits):
    """A tenant: how its callers identify themselves, and what it may use."""

    keys: tuple[str, ...] = ()
    """Digests of its API keys, `sha256:HEX` as `penstock key new` prints them; never a key itself."""
    subjects: tuple[str, ...] = ()
    """Common names or subject alternative names of its client certificates."""
    enabled: bool = True
    """False refuses every call of this tenant."""
    lane: Lane = Lane.STANDARD
    """Lane of a request that names none."""
    max_lane: Lane = Lane.INTERACTIVE
    """Highest lane that its requests may name."""
    share_group: str = ""
    """Tenants that name the same group share cached pages; empty shares with none."""

    @field_validator("keys")
    @classmethod
    def _check_digests(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if not all(_DIGEST.fullmatch(key) for key in keys):  # no message repeats the value, which may be a key
            raise ValueError(
                "one of them is not a sha256 digest (its value is not shown); give sha256: and 64 hex digits, "
                "as `penstock key new` prints them"
            )
        return keys

    @model_validator(mode="after")
    def _check_lane(self) -> TenantConfig:
        order = list(Lane)
        if order.index(self.lane) < order.index(self.max_lane):
            raise ValueError(f"lane = {self.lane.value} is above max_lane = {self.max_lane.value}; lower it")
        return self


class TenantsFile(FrozenConfig):
    """A file of tenants, which routers read again whenever it changes."""

    tenants: dict[TenantName, TenantConfig] = Field(min_length=1)
    """Tenants by name, at least one, since a router with tenants never opens to everybody."""
