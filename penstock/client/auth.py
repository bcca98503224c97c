"""Identifies a client by an API key in each call's metadata and a certificate in the TLS handshake."""

from __future__ import annotations

import os

from penstock.errors import InvalidInput
from penstock.rpc.tls import ClientTls

__all__ = ["API_KEY_VARIABLE", "ClientTls", "auth_metadata"]

API_KEY_VARIABLE = "PENSTOCK_API_KEY"


def auth_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of every call, empty without a key; the key defaults to PENSTOCK_API_KEY.

    Raises InvalidInput for characters that no key contains; the message does not repeat the key.
    """
    key = api_key if api_key is not None else os.environ.get(API_KEY_VARIABLE, "")
    if not key:
        return ()
    if not (key.isascii() and key.isprintable()):
        raise InvalidInput("api_key", "holds characters that no key has; check how it was copied")
    return (("authorization", f"Bearer {key}"),)
