"""Addresses to listen on and addresses to call: not the same where a server listens on every interface."""

LOOPBACK = "127.0.0.1"
_EVERY_INTERFACE = {"0.0.0.0", "::"}


def callable_host(host: str) -> str:
    """The address at which a server that listens on `host` is reached from this machine."""
    return LOOPBACK if host in _EVERY_INTERFACE else host
