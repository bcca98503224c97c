"""TLS of the HTTP API, and the names in a client's certificate, which the server library does not expose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.rpc.tls import ServerCertificate


def tls_settings(certificate: ServerCertificate | None, *, asks_for_certificate: bool) -> dict[str, Any]:
    """Returns keyword arguments for uvicorn."""
    if certificate is None:
        return {}
    context = certificate.ssl_context(asks_for_certificate=asks_for_certificate)
    return {"ssl_context_factory": lambda config, default: context}


def subjects_of(certificate: Mapping[str, Any] | None) -> list[str]:
    """Returns the alternative names, then the common names, of what `SSLObject.getpeercert` returns."""
    if not certificate:
        return []
    names = [value for _, value in certificate.get("subjectAltName", ())]
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return names + common
