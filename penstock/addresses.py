"""Addresses to listen on that nobody can call."""

_EVERY_INTERFACE = frozenset({"0.0.0.0", "::", "[::]", ""})


def is_every_interface(host: str) -> bool:
    return host in _EVERY_INTERFACE
