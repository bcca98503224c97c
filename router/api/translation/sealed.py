"""Wraps a model's reasoning into the opaque strings that dialects carry between turns, and unwraps it again. Pure.

A client that keeps only such a string can still send the reasoning back. It is encoded, not encrypted: the client may
read it, and what it sends is as untrusted as any other text of its prompt.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "penstock.r1."


def seal(reasoning: str) -> str:
    """Returns the opaque form of a text."""
    return _MARK + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unseal(sealed: str) -> str | None:
    """Returns the text, or None for a string that `seal` did not make."""
    if not sealed.startswith(_MARK):
        return None
    try:
        return base64.b64decode(sealed[len(_MARK) :].encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None
