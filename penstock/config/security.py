"""Settings of security: TLS, and the deployment's secret."""

from __future__ import annotations

import ipaddress

from pydantic import ConfigDict, model_validator

from penstock.config.base import FrozenConfig


def is_loopback(host: str) -> bool:
    """Returns whether only processes of this machine reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class _SecretiveConfig(FrozenConfig):
    model_config = ConfigDict(hide_input_in_errors=True)


class TlsConfig(_SecretiveConfig):
    """PEM files of a server, read again when they change. Unreadable files raise ConfigError at the start."""

    cert_file: str
    """Certificate chain."""
    key_file: str
    """Private key of the certificate."""
    ca_file: str = ""
    """Authority that must have signed callers' certificates; empty requires no certificate."""
    server_name: str = ""
    """Name expected in the certificate of a called process; by default the host that is called."""


class SecurityConfig(_SecretiveConfig):
    """Credentials that the processes of one deployment present to each other; all have the same."""

    secret_file: str = ""
    """File with the cluster secret, at least 32 random bytes in hex or base64, not readable by everybody. A second line
    may hold another secret that is also accepted while one replaces the other. The file is read again when it changes.
    """
    tls: TlsConfig | None = None
    """Certificates of every connection between routers, workers and the Admin service."""
    insecure: bool = False
    """Lets a process without secret and certificates listen beyond loopback, where anybody who reaches it controls it.
    """

    def check_host(self, setting: str, host: str) -> None:
        """Raises ValueError if a port that obeys all callers would listen beyond loopback without credentials."""
        if self.secret_file or self.tls is not None or self.insecure or is_loopback(host):
            return
        raise ValueError(
            f"{setting} = {host!r} is beyond loopback, and without a secret anybody who reaches it controls this "
            "process; set security.secret_file, or listen on 127.0.0.1; security.insecure = true allows it anyway"
        )

    @model_validator(mode="after")
    def _check_mutual_tls(self) -> SecurityConfig:
        if self.tls is not None and not self.tls.ca_file:
            raise ValueError("security.tls.ca_file is missing; both ends present a certificate here, so name the CA")
        return self
