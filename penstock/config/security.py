"""Settings of security: tenants and their keys, TLS, the deployment's secret, and the largest calls."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints, field_validator, model_validator

from penstock.config.admission import TenantLimits
from penstock.config.base import FrozenConfig
from penstock.types import Lane

TENANT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # the name becomes a metrics label
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

TenantName = Annotated[str, StringConstraints(pattern=f"^{TENANT_NAME.pattern}$")]


def is_loopback(host: str) -> bool:
    """Returns whether only processes of this machine reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class _SecretiveConfig(FrozenConfig):
    model_config = ConfigDict(hide_input_in_errors=True)


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


class TlsConfig(_SecretiveConfig):
    """PEM files of a listening side, read again when they change. At the start, unreadable ones raise ConfigError."""

    cert_file: str
    """Certificate chain."""
    key_file: str
    """Private key of the certificate."""
    ca_file: str = ""
    """Authority whose certificates callers must show; empty requires none."""
    server_name: str = ""
    """Name expected in the certificate of a called process; by default the host that is called."""


class TenantsFile(FrozenConfig):
    """A file of tenants, which routers read again whenever it changes."""

    tenants: dict[TenantName, TenantConfig] = Field(min_length=1)
    """Tenants by name, at least one, since a router with tenants never opens to everybody."""


class SecurityConfig(_SecretiveConfig):
    """Credentials that the processes of one deployment present to each other; all have the same."""

    secret_file: str = ""
    """File with the cluster secret, at least 32 random bytes in hex or base64, not readable by everybody. A second line
    may hold another secret that is also accepted while one replaces the other. The file is read again when it changes.
    """
    tls: TlsConfig | None = None
    """Certificates of every connection between routers, workers and the Admin service."""
    insecure: bool = False
    """Lets a process without secret and certificates listen beyond loopback, where anybody who reaches it can command
    it.
    """

    def check_host(self, setting: str, host: str) -> None:
        """Raises ValueError if a port that obeys all callers would listen beyond loopback without credentials."""
        if self.secret_file or self.tls is not None or self.insecure or is_loopback(host):
            return
        raise ValueError(
            f"{setting} = {host!r} is beyond loopback, and without a secret whoever reaches it commands this process; "
            "set security.secret_file, or listen on 127.0.0.1; security.insecure = true allows it all the same"
        )

    @model_validator(mode="after")
    def _check_mutual_tls(self) -> SecurityConfig:
        if self.tls is not None and not self.tls.ca_file:
            raise ValueError("security.tls.ca_file is missing; both ends show a certificate here, so name the CA")
        return self


class LimitsConfig(_SecretiveConfig):
    """Largest calls to a router's public ports. Larger ones are refused, with the field's name."""

    request_bytes: int = Field(8 * 1024 * 1024, ge=1024)
    """Bytes of a gRPC message or an HTTP body."""
    header_bytes: int = Field(16 * 1024, ge=1024)
    """Bytes of gRPC metadata or HTTP headers."""
    prompt_characters: int = Field(4_000_000, ge=1)
    """Characters of a text, or of all messages and tools together; long ones may also have at most 64 per token of the
    context.
    """
    prompt_tokens: int = Field(1 << 20, ge=1)
    """Tokens of a prompt, which must also fit into the workers' context."""
    messages: int = Field(4096, ge=1)
    """Messages of a chat, and tool calls in them."""
    tools: int = Field(256, ge=1)
    """Tools of a chat."""
    tool_characters: int = Field(1 << 20, ge=1)
    """Characters of the descriptions and schemas of a chat's tools."""
    completions: int = Field(128, ge=1)
    """Completions of a call: n, times the prompts of an HTTP call."""
    stop_token_ids: int = Field(256, ge=1)
    """Stop token ids of a call."""
    logit_bias: int = Field(1024, ge=1)
    """Logit bias entries of a call."""
    allowed_token_ids: int = Field(1024, ge=1)
    """Allowed token ids of a call."""
    prompt_logprobs: int = Field(1 << 16, ge=1)
    """Log-probabilities of prompt tokens and of their alternatives in an answer, over all its completions."""
    connections: int = Field(8192, ge=1)
    """Connections to each of the two public ports; fewer where the process may not open twice as many files."""
    connections_per_peer: int = Field(4096, ge=1)
    """HTTP connections from one IPv4 address, or one IPv6 network of 64 bits."""
    calls: int = Field(16384, ge=1)
    """Concurrent gRPC calls of all connections; further ones are refused."""
    header_timeout_s: float = Field(30.0, gt=0)
    """Seconds within which a new connection must begin its first request and the headers of a later request must
    arrive.
    """
    idle_timeout_s: float = Field(120.0, gt=0)
    """Seconds after which a connection without a request is closed."""
    connection_age_s: float = Field(3600.0, gt=0)
    """Seconds after which a gRPC connection takes no new calls, so that its client connects again; calls in flight go
    on to their end."""
    ping_strikes: int = Field(16, ge=1)
    """gRPC pings sent faster than two a second, without data in between, after which a connection is closed."""
    control_bytes_per_s: int = Field(64 * 1024, ge=1024)
    """Bytes that a gRPC connection may send each second beyond its calls, such as pings; one that sends more is
    closed."""
    body_timeout_s: float = Field(30.0, gt=0)
    """Seconds within which the message of a gRPC call or the body of an HTTP request must arrive."""
    bodies_bytes: int = Field(1 << 30, ge=1024)
    """Bytes of all HTTP bodies together that are received but not parsed yet; further bodies are refused."""
    write_stall_s: float = Field(60.0, gt=0)
    """Seconds for which a client may read nothing from its stream before it is disconnected."""
    read_grace_s: float = Field(60.0, ge=0)
    """Seconds after a request's deadline during which its client may still read what was generated in time."""
    text_queue_characters: int = Field(1 << 28, ge=1)
    """Characters of prompts that may wait for the threads that parse, template and tokenize them; beyond that, the
    tenant with most of them waiting is refused.
    """
    streams_per_connection: int = Field(1024, ge=1)
    """Concurrent gRPC calls of a connection; further ones wait."""
