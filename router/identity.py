"""Who calls: an API key or a client certificate to a tenant, and a tenant to what it may ask for. Pure, no I/O.

Keys are looked up by their SHA-256 digest: the time that takes says nothing about any key. No message repeats a key.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.admission_config import TenantLimits
from penstock.errors import ConfigError, PermissionDenied, Unauthenticated
from penstock.secret import ClusterSecret, digest_of
from penstock.security_config import TenantConfig
from penstock.ticket import page_salt
from penstock.types import Lane
from penstock.v1 import common_pb2
from penstock.wire import lane_from_wire

CANARY = "canary"  # use of the cluster secret: the key of the controller's own requests
_SCHEME = "bearer "
_MAX_KEY_CHARACTERS = 512
_LANES = list(Lane)
_MAX_SALTS = 4096  # known by heart


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant as requests are handled for it. The default is whoever calls where nobody is told apart."""

    name: str = ""
    config: TenantConfig = field(default_factory=TenantConfig)

    def lane(self, asked: common_pb2.Lane) -> Lane:
        """The lane of a request that asks for this one. Raises PermissionDenied above the tenant's best."""
        lane = lane_from_wire(asked, self.config.lane)
        if _LANES.index(lane) < _LANES.index(self.config.max_lane):
            raise PermissionDenied(
                f"lane: {lane.value} is not open to this API key; ask for {self.config.max_lane.value} or a later one"
            )
        return lane

    @property
    def cache_scope(self) -> str:
        """Requests of one scope may share cached pages. A group and a tenant of one name are two scopes."""
        if self.config.share_group:
            return f"group:{self.config.share_group}"
        return f"tenant:{self.name}" if self.name else ""


class Tenants:
    """Every tenant of a router. Without any, all callers are the same nameless one."""

    def __init__(self, configs: Mapping[str, TenantConfig], secret: ClusterSecret | None = None) -> None:
        """Raises ConfigError where two tenants claim one key or one name of a certificate."""
        self.open = Tenant()
        self._by_name = {name: Tenant(name, config) for name, config in configs.items()}
        self._by_digest: dict[str, Tenant] = {}
        self._by_subject: dict[str, Tenant] = {}
        for tenant in self._by_name.values():
            _claim(self._by_digest, tenant, tenant.config.keys, "keys")
            _claim(self._by_subject, tenant, tenant.config.subjects, "subjects")
        self._controller = digest_of(secret.token(CANARY)) if secret is not None else None
        self._secret = secret
        self._salts: dict[tuple[str, str], bytes] = {}  # by revision and scope

    @property
    def told_apart(self) -> bool:
        return bool(self._by_name)

    def find(self, name: str) -> Tenant:
        """By a request's `tenant`; the nameless one for any that is not configured."""
        return self._by_name.get(name, self.open)

    def limits_of(self, default: TenantLimits) -> Callable[[str], TenantLimits]:
        """What the tenant of a name may use; `default` for whoever is not configured."""
        return lambda name: self._by_name[name].config if name in self._by_name else default

    def identify(self, authorization: str | None, subjects: Sequence[str] = ()) -> Tenant:
        """Of one call: its authorization header, and the names in the certificate that TLS has verified.

        Raises Unauthenticated or PermissionDenied. A key, where one is given, goes before the certificate.
        """
        if not self._by_name:
            return self.open
        if authorization is not None:
            digest = digest_of(_key(authorization))
            if digest == self._controller:
                return self.open
            tenant = self._by_digest.get(digest)
            if tenant is None:
                raise Unauthenticated("authorization: the API key is not known here; check it, or ask for another one")
        elif subjects:
            tenant = next((self._by_subject[name] for name in subjects if name in self._by_subject), None)
            if tenant is None:
                raise PermissionDenied("the client certificate's names belong to no tenant; have one of them added")
        else:
            raise Unauthenticated("authorization: is missing; send your API key as 'Bearer KEY'")
        if not tenant.config.enabled:
            raise PermissionDenied(f"tenant {tenant.name} is turned off; ask whoever runs this deployment")
        return tenant

    def check_scraper(self, authorization: str | None, token: str) -> None:
        """Of a reader of metrics, which speak of all tenants. Raises Unauthenticated or PermissionDenied."""
        if token:
            if authorization is None or not hmac.compare_digest(digest_of(_key(authorization)), digest_of(token)):
                raise Unauthenticated("authorization: metrics are read with their own token, as 'Bearer TOKEN'")
        elif self._by_name:
            raise PermissionDenied(
                "metrics speak of all tenants; set metrics_token_file, and read them with that token"
            )

    def identify_controller(self, authorization: str | None) -> Tenant:
        """Of a call that can only be the controller's own. Raises Unauthenticated."""
        if authorization is None or self._controller != digest_of(_key(authorization)):
            raise Unauthenticated("authorization: this port is the controller's; call the public one")
        return self.open

    def salt(self, model_revision: str, tenant: Tenant) -> bytes:
        """The root of its requests' page hashes."""
        key = (model_revision, tenant.cache_scope)
        salt = self._salts.get(key)
        if salt is None:
            if len(self._salts) >= _MAX_SALTS:
                self._salts.clear()
            salt = self._salts[key] = page_salt(self._secret, *key)
        return salt


def _key(authorization: str) -> str:
    if authorization[: len(_SCHEME)].lower() != _SCHEME or not authorization[len(_SCHEME) :].strip():
        raise Unauthenticated("authorization: is no bearer token; send your API key as 'Bearer KEY'")
    key = authorization[len(_SCHEME) :].strip()
    if len(key) > _MAX_KEY_CHARACTERS:
        raise Unauthenticated(f"authorization: the API key is longer than {_MAX_KEY_CHARACTERS} characters; check it")
    return key


def _claim(owners: dict[str, Tenant], tenant: Tenant, claims: Sequence[str], setting: str) -> None:
    for claim in claims:
        other = owners.setdefault(claim, tenant)
        if other is not tenant:
            raise ConfigError(
                f"tenants.{tenant.name}.{setting}: one of them belongs to {other.name} too; give each tenant its own"
            )
