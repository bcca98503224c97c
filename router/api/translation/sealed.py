"""Encodes a model's reasoning as the opaque strings that dialects pass between turns, and decodes them again. Pure.

A client that keeps only such a string can still send the reasoning back. The string is encoded, not encrypted: the
client may read it, and what it sends is as untrusted as any other text of its prompt.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "penstock.r1."


def seal(reasoning: str) -> str:
    """Returns the opaque form of a text."""
    return _PREFIX + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unseal(sealed: str) -> str | None:
    """Returns the text, or None for a string that `seal` did not make."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(sealed[len(_PREFIX) :].encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None
