"""Who may call, as whom, and how large a call may be. Part of `penstock.config`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, field_validator, model_validator

from penstock.admission_config import TenantLimits
from penstock.types import Lane

TENANT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # it becomes a label of metrics
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

TenantName = Annotated[str, StringConstraints(pattern=f"^{TENANT_NAME.pattern}$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class TenantConfig(TenantLimits):
    """One tenant: what proves that a caller is it, and what it may use."""

    keys: tuple[str, ...] = ()  # sha256:HEX of its API keys, as `penstock key new` prints them; never a key itself
    subjects: tuple[str, ...] = ()  # names in its client certificates: common names or subject alternative names
    enabled: bool = True  # false: known, and refused
    lane: Lane = Lane.STANDARD  # of a request that names none
    max_lane: Lane = Lane.INTERACTIVE  # the first lane that it may ask for
    share_group: str = ""  # tenants that name one group share cached pages; empty: nobody shares with it

    @field_validator("keys")
    @classmethod
    def _digests_only(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if not all(_DIGEST.fullmatch(key) for key in keys):  # what is wrong may be a key: it is not repeated
            raise ValueError(
                "one of them is no sha256 digest (its value is not shown); give sha256: and 64 hex digits, "
                "as `penstock key new` prints them"
            )
        return keys

    @model_validator(mode="after")
    def _own_lane_is_allowed(self) -> TenantConfig:
        order = list(Lane)
        if order.index(self.lane) < order.index(self.max_lane):
            raise ValueError(f"lane = {self.lane.value} is above max_lane = {self.max_lane.value}; lower it")
        return self


class TlsConfig(_Frozen):
    """PEM files of one listening side. A path that cannot be read is a ConfigError when it starts."""

    cert_file: str  # certificate chain
    key_file: str
    ca_file: str = ""  # whose certificates callers must show; empty: callers show none
    server_name: str = ""  # expected in the certificate of whoever is called; default: the host that is called


class SecurityConfig(_Frozen):
    """What the processes of one deployment prove themselves to each other with. The same for all of them."""

    secret_file: str = ""  # at least 32 random bytes in hex or base64, not readable by everybody
    secret: SecretStr | None = None  # the same, handed over by whoever starts this process
    tls: TlsConfig | None = None  # of every connection between routers, workers and the Admin service

    @model_validator(mode="after")
    def _mutual(self) -> SecurityConfig:
        if self.tls is not None and not self.tls.ca_file:
            raise ValueError("security.tls.ca_file is missing; both ends show a certificate here, so name the CA")
        return self


class LimitsConfig(_Frozen):
    """How large one call to a router's public ports may be. More is refused, with the field's name."""

    request_bytes: int = Field(8 * 1024 * 1024, ge=1024)  # of a gRPC message or an HTTP body
    header_bytes: int = Field(16 * 1024, ge=1024)  # of gRPC metadata or HTTP headers
    prompt_characters: int = Field(4_000_000, ge=1)  # of a text, or of all messages together
    prompt_tokens: int = Field(1 << 20, ge=1)  # and never more than the workers' context holds
    messages: int = Field(4096, ge=1)  # of a chat
    completions: int = Field(128, ge=1)  # of a call: n, times the prompts of an HTTP call
    stop_token_ids: int = Field(256, ge=1)
    logit_bias: int = Field(1024, ge=1)  # entries
    streams_per_connection: int = Field(1024, ge=1)  # gRPC calls at once; more wait
    body_timeout_s: float = Field(30.0, gt=0)  # until an HTTP body must be there
