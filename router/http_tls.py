"""TLS of the HTTP front, and the names in a client's certificate, which the server library itself keeps to itself."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from penstock.errors import ConfigError
from penstock.security_config import TlsConfig

SUBJECTS = "penstock.subjects"  # key of a request's scope: names in the client certificate that TLS has verified


def uvicorn_settings(tls: TlsConfig | None) -> dict[str, Any]:
    """Raises ConfigError where the files do not fit together."""
    settings: dict[str, Any] = {"http": _SubjectsProtocol}
    if tls is None:
        return settings
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.cert_file, tls.key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tls.cert_file = {tls.cert_file}, tls.key_file = {tls.key_file}: {error}; give a chain and its key in PEM"
        ) from error
    settings |= {"ssl_certfile": tls.cert_file, "ssl_keyfile": tls.key_file}
    if tls.ca_file:
        settings |= {"ssl_ca_certs": tls.ca_file, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return settings


def subjects_of(certificate: Mapping[str, Any] | None) -> list[str]:
    """Alternative names first, then common names, of what `SSLObject.getpeercert` returns."""
    if not certificate:
        return []
    names = [value for _, value in certificate.get("subjectAltName", ())]
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return names + common


class _SubjectsProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # chosen by uvicorn when it is imported
    app: ASGIApp

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        connection = transport.get_extra_info("ssl_object")
        if connection is not None and (subjects := subjects_of(connection.getpeercert())):
            self.app = _with_subjects(self.app, subjects)


def _with_subjects(app: ASGIApp, subjects: list[str]) -> ASGIApp:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, SUBJECTS: subjects}, receive, send)

    return call
