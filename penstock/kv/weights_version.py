"""Encodes an update of the weights in the model's revision, on which page hashes and layouts depend.

Pages of two versions never match, and no page is transferred between workers of different ones. Revisions with the same
base belong to updates of one model, so a request may continue with another of them.
"""

from __future__ import annotations

_MARK = "@"


def updated_revision(revision: str, version: int, digest: str) -> str:
    """Returns the revision of a model whose weights come from the given update."""
    return f"{base_revision(revision)}{_MARK}{version}-{digest}"


def base_revision(revision: str) -> str:
    """Returns the revision without its update."""
    return revision.partition(_MARK)[0]


def weights_version(revision: str) -> int:
    """Returns the number of the update that a revision names; 0 without one."""
    number = revision.partition(_MARK)[2].partition("-")[0]
    return int(number) if number.isdecimal() else 0
