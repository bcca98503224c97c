"""Addresses to listen on and addresses to call: not the same where a server listens on every interface."""

from penstock.addresses import is_every_interface

LOOPBACK = "127.0.0.1"


def callable_host(host: str) -> str:
    """The address at which a server that listens on `host` is reached from this machine."""
    return LOOPBACK if is_every_interface(host) else host
