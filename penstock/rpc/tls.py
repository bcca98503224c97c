"""Reads TLS credentials for both ends of a connection from PEM files; servers read them again when the files change.
The public client and every server use this module.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from penstock.errors import ConfigError
from penstock.rpc.reload import FileWatcher, WatchedFiles

if TYPE_CHECKING:
    from penstock.config.security import TlsConfig  # the bare client does not need configuration


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a client. Without `ca_file`, gRPC's default authorities must have certified the server."""

    ca_file: str | None = None  # the authority that certifies the server
    cert_file: str | None = None  # the client's own certificate, if the server asks for one
    key_file: str | None = None
    server_name: str | None = None  # the name in the server's certificate, if it differs from the host

    @classmethod
    def from_config(cls, tls: TlsConfig) -> ClientTls:
        return cls(tls.ca_file, tls.cert_file, tls.key_file, tls.server_name or None)

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises ConfigError that names the file at fault."""
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError(f"cert_file = {self.cert_file!r}, key_file = {self.key_file!r}; give both or neither")
        return grpc.ssl_channel_credentials(
            root_certificates=_read_pem(self.ca_file, "ca_file"),
            private_key=_read_pem(self.key_file, "key_file"),
            certificate_chain=_read_pem(self.cert_file, "cert_file"),
        )

    def context(self) -> ssl.SSLContext:
        """Returns the credentials for HTTP. Raises ConfigError that names the file at fault."""
        try:
            _read_pem(self.ca_file, "ca_file")
            context = _ClientContext(ssl.PROTOCOL_TLS_CLIENT)
            context.server_name = self.server_name
            if self.ca_file:
                context.load_verify_locations(self.ca_file)
            else:
                context.load_default_certs()
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file, password="")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"ca_file = {self.ca_file}, cert_file = {self.cert_file}, key_file = {self.key_file}: {error}; give "
                "PEM files, and the key of the certificate"
            ) from error
        return context

    def options(self) -> list[tuple[str, str]]:
        """Returns the channel options that belong to the credentials."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


class _ClientContext(ssl.SSLContext):
    """Verifies a server as `ssl.create_default_context` does, by `server_name` instead of the host that is called."""

    server_name: str | None = None  # None: the host

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        return super().wrap_socket(*arguments, **self._named(options))

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return super().wrap_bio(*arguments, **self._named(options))

    def _named(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"server_hostname": self.server_name} if self.server_name else options


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The content of a server's files: valid PEM, with a key that matches the certificate."""

    chain: bytes
    key: bytes
    authority: bytes | None
    context: ssl.SSLContext  # the same files for servers other than gRPC's
    open_context: ssl.SSLContext  # a context that does not ask clients for a certificate

    @classmethod
    def read(cls, tls: TlsConfig, setting: str) -> CertificateFiles:
        """Reads the files. Raises ConfigError that names the file at fault."""
        key = _read_pem(tls.key_file, f"{setting}.key_file")
        chain = _read_pem(tls.cert_file, f"{setting}.cert_file")
        if key is None or chain is None:
            raise ConfigError(f"{setting}: cert_file or key_file is empty; give both")
        authority = _read_pem(tls.ca_file, f"{setting}.ca_file")
        open_context = _make_context(tls.model_copy(update={"ca_file": None}), setting)
        return cls(chain, key, authority, _make_context(tls, setting), open_context)


class ServerCertificate:
    """The certificate of a server, for gRPC and HTTP. New connections use the files that were read last; open ones keep
    theirs.
    """

    def __init__(self, tls: TlsConfig, setting: str, watcher: FileWatcher) -> None:
        """`setting` names the configuration in messages. Raises ConfigError if the files cannot be used."""
        self._files: WatchedFiles[CertificateFiles] = watcher.watch(
            setting, (tls.cert_file, tls.key_file, tls.ca_file), lambda: CertificateFiles.read(tls, setting)
        )

    def grpc_credentials(self) -> grpc.ServerCredentials:
        version, configuration = self._files.version, _to_grpc(self._files.value)

        def fetch() -> grpc.ServerCertificateConfiguration:
            """Returns the current certificate. gRPC calls it on its own threads for each handshake."""
            nonlocal version, configuration
            if version != self._files.version:
                version, configuration = self._files.version, _to_grpc(self._files.value)
            return configuration

        wants_client = self._files.value.authority is not None
        return grpc.dynamic_ssl_server_credentials(configuration, fetch, require_client_authentication=wants_client)

    def ssl_context(self, *, asks_for_certificate: bool = True) -> ssl.SSLContext:
        """Returns a context that uses the files that were read last in every handshake.

        If a client authority is configured, clients need a certificate, unless `asks_for_certificate` is off.
        """

        def newest() -> ssl.SSLContext:
            files = self._files.value
            return files.context if asks_for_certificate else files.open_context

        def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = newest()

        first = newest()
        first.sni_callback = choose  # OpenSSL calls it in each handshake, even if the client names no server
        return first


def _to_grpc(files: CertificateFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.chain)], files.authority)


def _make_context(tls: TlsConfig, setting: str) -> ssl.SSLContext:
    """Makes an SSL context. Raises ConfigError if certificate and key do not match or are invalid."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{setting}.cert_file = {tls.cert_file}, {setting}.key_file = {tls.key_file}: {error}; give a chain and "
            "its key in PEM, without a password"
        ) from error
    if tls.ca_file:
        try:
            context.load_verify_locations(tls.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{setting}.ca_file = {tls.ca_file}: {error}; give certificates in PEM") from error
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session would not present its certificate again, whose authority may no longer be accepted.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def _read_pem(path: str | None, setting: str) -> bytes | None:
    """Returns the file's content, or None without a path. Raises ConfigError that names the setting."""
    if not path:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting} = {path}: {error.strerror}; give a readable PEM file") from error
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{setting} = {path}: is not a PEM file; convert it to PEM")
    return data
