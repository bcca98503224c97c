"""Maps API keys and client certificates to tenants, and tenants to their limits and lanes. No I/O.

Keys are looked up by their SHA-256 digest, so that the duration of a look-up reveals nothing about any key. No error
message repeats a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.config.admission import TenantLimits
from penstock.config.tenants import TenantConfig
from penstock.errors import ConfigError, PermissionDenied, Unauthenticated
from penstock.rpc.secret import ADMIN, ClusterSecret, ClusterSecrets, digest_of
from penstock.rpc.ticket import page_salt
from penstock.types import Lane
from penstock.v1 import common_pb2
from penstock.wire import lane_from_wire

CANARY = "canary"  # purpose for which the controller's own API key is derived from the cluster secret
_SCHEME = "bearer "
_MAX_KEY_CHARACTERS = 512
_LANES = list(Lane)
_MAX_SALTS = 4096  # cached


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant and its configuration. The default stands for every caller of a router without tenants."""

    name: str = ""
    config: TenantConfig = field(default_factory=TenantConfig)

    def lane(self, requested: common_pb2.Lane) -> Lane:
        """Returns the lane of a request that asks for `requested`, or the tenant's default lane if it asks for none.

        Raises PermissionDenied for a lane above the tenant's `max_lane`.
        """
        lane = lane_from_wire(requested, self.config.lane)
        if _LANES.index(lane) < _LANES.index(self.config.max_lane):
            raise PermissionDenied(
                f"lane: {lane.value} is not open to this API key; ask for {self.config.max_lane.value} or a lower lane"
            )
        return lane

    @property
    def cache_scope(self) -> str:
        """Returns the scope within which requests share cached pages. A group and a tenant of the same name differ."""
        if self.config.share_group:
            return f"group:{self.config.share_group}"
        return f"tenant:{self.name}" if self.name else ""


class TenantDirectory:
    """Finds the tenants of one file or configuration by name, key or certificate name."""

    def __init__(self, configs: Mapping[str, TenantConfig]) -> None:
        """Raises ConfigError if two tenants claim the same key or the same certificate name."""
        self.by_name = {name: Tenant(name, config) for name, config in configs.items()}
        self.by_digest: dict[str, Tenant] = {}
        self.by_subject: dict[str, Tenant] = {}
        for tenant in self.by_name.values():
            _claim(self.by_digest, tenant, tenant.config.keys, "keys")
            _claim(self.by_subject, tenant, tenant.config.subjects, "subjects")


class Tenants:
    """Identifies the tenants of a router. If none are configured, all callers are the same nameless tenant.

    Tenants and cluster secrets are looked up for each call, so a change applies from the next call on.
    """

    def __init__(
        self, directory: Callable[[], TenantDirectory], secrets: Callable[[], ClusterSecrets | None] = lambda: None
    ) -> None:
        """`directory` and `secrets` return the tenants and secrets that were read last."""
        self.open = Tenant()
        self._directory = directory
        self._secrets = secrets
        self._controllers: tuple[ClusterSecrets | None, frozenset[str]] = (None, frozenset())
        self._salts: dict[tuple[ClusterSecret | None, str, str, str], bytes] = {}  # by the arguments of `page_salt`

    @property
    def are_configured(self) -> bool:
        """Returns whether any tenants are configured."""
        return bool(self._directory().by_name)

    def limits_of(self, default: TenantLimits) -> Callable[[str], TenantLimits]:
        """Returns a function from a tenant's name to its limits: `default` for names that are not configured."""

        def limits(name: str) -> TenantLimits:
            tenant = self._directory().by_name.get(name)
            return tenant.config if tenant is not None else default

        return limits

    def identify(self, authorization: str | None, subjects: Sequence[str] = ()) -> Tenant:
        """Returns the tenant of a call from its authorization header and the names in its verified certificate.

        A key takes precedence over the certificate. Raises Unauthenticated or PermissionDenied.
        """
        directory = self._directory()
        if not directory.by_name:
            return self.open
        if authorization is not None:
            digest = digest_of(_key(authorization))
            tenant = directory.by_digest.get(digest)
            if tenant is None and digest in self._controller_digests():
                return self.open
            if tenant is None:
                raise Unauthenticated("authorization: the API key is not known here; check it or ask for another one")
        elif subjects:
            tenant = next((directory.by_subject[name] for name in subjects if name in directory.by_subject), None)
            if tenant is None:
                raise PermissionDenied(
                    "the names in the client certificate belong to no tenant; ask the operator to add one of them"
                )
        else:
            raise Unauthenticated("authorization: is missing; send your API key as 'Bearer KEY'")
        if not tenant.config.enabled:
            raise PermissionDenied(f"tenant {tenant.name} is turned off; ask the operator of this deployment")
        return tenant

    def named(self, name: str) -> Tenant:
        """Returns the tenant of that name, for its offline work. Raises PermissionDenied if it is gone or disabled."""
        directory = self._directory()
        tenant = directory.by_name.get(name) if directory.by_name else self.open
        if tenant is None or tenant.name != name or not tenant.config.enabled:
            raise PermissionDenied(f"tenant {name} is unknown or turned off; ask the operator of this deployment")
        return tenant

    def check_scraper(self, authorization: str | None, token: str) -> None:
        """Checks that a caller may read metrics, which show all tenants. Raises Unauthenticated or PermissionDenied."""
        if token:
            if authorization is None or not hmac.compare_digest(digest_of(_key(authorization)), digest_of(token)):
                raise Unauthenticated("authorization: is not the metrics token; send that token as 'Bearer TOKEN'")
        elif self.are_configured:
            raise PermissionDenied("metrics cover all tenants; set metrics_token_file and send its token")

    def check_operator(self, authorization: str | None) -> None:
        """Checks that a caller may change what the router serves. Raises Unauthenticated or PermissionDenied."""
        secrets = self._secrets()
        if secrets is None:
            raise PermissionDenied(
                "this call needs the admin token, which is made of the cluster secret; set security.secret_file"
            )
        tokens = map(digest_of, secrets.tokens(ADMIN))
        if authorization is None or digest_of(_key(authorization)) not in tokens:
            raise Unauthenticated(
                "authorization: is not the admin token; send what `penstock key admin` prints as 'Bearer TOKEN'"
            )

    def identify_controller(self, authorization: str | None) -> Tenant:
        """Returns the tenant of a call on the controller's own port. Raises Unauthenticated for other callers."""
        if authorization is None or digest_of(_key(authorization)) not in self._controller_digests():
            raise Unauthenticated("authorization: this port is only for the controller; call the public port")
        return self.open

    def _controller_digests(self) -> frozenset[str]:
        secrets = self._secrets()
        if secrets is not self._controllers[0]:
            tokens = secrets.tokens(CANARY) if secrets is not None else ()
            self._controllers = secrets, frozenset(map(digest_of, tokens))
        return self._controllers[1]

    def salt(self, model_revision: str, cache_scope: str, adapter: str = "") -> bytes:
        """Returns the root of the page hashes for requests of a scope. `adapter` is the revision of their adapter."""
        secrets = self._secrets()
        secret = secrets.current if secrets is not None else None
        key = (secret, model_revision, cache_scope, adapter)
        salt = self._salts.get(key)
        if salt is None:
            if len(self._salts) >= _MAX_SALTS:
                self._salts.clear()
            salt = self._salts[key] = page_salt(*key)
        return salt


def read_authorization(headers: Mapping[str, str]) -> str | None:
    """Returns the authorization header, or else the key that Anthropic's clients send in x-api-key; None without."""
    authorization, key = headers.get("authorization"), headers.get("x-api-key")
    return f"Bearer {key}" if authorization is None and key is not None else authorization


def salted_scope(cache_scope: str, cache_salt: str) -> str:
    """Returns the scope of requests with their own salt within a tenant's scope. It differs from every other scope."""
    if not cache_salt:
        return cache_scope
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=16).hexdigest()
    return f"salt:{digest}:{cache_scope}"


def _key(authorization: str) -> str:
    if authorization[: len(_SCHEME)].lower() != _SCHEME or not authorization[len(_SCHEME) :].strip():
        raise Unauthenticated("authorization: is not a bearer token; send your API key as 'Bearer KEY'")
    key = authorization[len(_SCHEME) :].strip()
    if len(key) > _MAX_KEY_CHARACTERS:
        raise Unauthenticated(f"authorization: the API key is longer than {_MAX_KEY_CHARACTERS} characters; check it")
    return key


def _claim(owners: dict[str, Tenant], tenant: Tenant, claims: Sequence[str], setting: str) -> None:
    for claim in claims:
        other = owners.setdefault(claim, tenant)
        if other is not tenant:
            raise ConfigError(
                f"tenants.{tenant.name}.{setting}: one of them also belongs to {other.name}; give each tenant its own"
            )
