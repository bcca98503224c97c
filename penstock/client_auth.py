"""How a client says who it is: an API key in each call's metadata, a certificate in the TLS handshake."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import grpc

from penstock.errors import ConfigError, InvalidInput

API_KEY_VARIABLE = "PENSTOCK_API_KEY"


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files. Without any, the server must be certified by an authority that gRPC knows."""

    ca_file: str | None = None  # who certifies the server
    cert_file: str | None = None  # the client's own certificate, where the server wants one
    key_file: str | None = None
    server_name: str | None = None  # that the server's certificate has, where it is not the host that is called

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError that names the file."""
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError(f"cert_file = {self.cert_file!r}, key_file = {self.key_file!r}; give both or neither")
        return grpc.ssl_channel_credentials(
            root_certificates=read_pem(self.ca_file, "ca_file"),
            private_key=read_pem(self.key_file, "key_file"),
            certificate_chain=read_pem(self.cert_file, "cert_file"),
        )

    def options(self) -> list[tuple[str, str]]:
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


def read_pem(path: str | None, setting: str) -> bytes | None:
    """Raises ConfigError that names the setting; None where no path is given."""
    if not path:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting} = {path}: {error.strerror}; give a readable PEM file") from error
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{setting} = {path}: is no PEM file; convert it to PEM")
    return data


def auth_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Of every call; empty without a key. Raises InvalidInput, without the key, where it can be none."""
    key = api_key if api_key is not None else os.environ.get(API_KEY_VARIABLE, "")
    if not key:
        return ()
    if not (key.isascii() and key.isprintable()):
        raise InvalidInput("api_key", "holds characters that no key has; check how it was copied")
    return (("authorization", f"Bearer {key}"),)
