"""Translates addresses to listen on into addresses to call, which differ if a server listens on every interface."""

from __future__ import annotations

from penstock.errors import InvalidInput

LOOPBACK = "127.0.0.1"
_EVERY_INTERFACE = frozenset({"0.0.0.0", "::", "[::]", ""})


def is_every_interface(host: str) -> bool:
    return host in _EVERY_INTERFACE


def callable_host(host: str) -> str:
    """Returns the host by which this machine reaches a server that listens on `host`."""
    return LOOPBACK if is_every_interface(host) else host


def needs_loopback_too(host: str) -> bool:
    """Returns whether a server that listens only on `host` is unreachable through loopback."""
    return callable_host(host) != LOOPBACK and host != "localhost"


def require_source_address(address: str) -> str:
    """Returns a worker's own `address` if other machines can call it. Raises InvalidInput for a wildcard host."""
    if is_every_interface(address.rpartition(":")[0]):
        raise InvalidInput(
            "source_address",
            f"is {address!r}, which other workers cannot reach; name the address at which others reach this worker",
        )
    return address
