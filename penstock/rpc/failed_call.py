"""Explains gRPC calls that no Penstock server answered: names the problem at the address, and the fix."""

from __future__ import annotations

import grpc

from penstock.errors import (
    STATUS_DETAILS,
    ConfigError,
    DeadlineExceeded,
    PenstockError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    from_rpc_error,
)

_CLOSED = "it closed the connection; call it with TLS if it has a certificate"
# gRPC has no codes for these causes: phrases of its details, and their meaning.
_MAY_PASS = {
    "connection refused": "nothing listens there (connection refused)",
    "domain name not found": "the host has no address",
    "socket closed": _CLOSED,
    "connection reset": _CLOSED,
    "before receiving settings": "it accepts connections but does not answer",
    "timed out": "the host does not answer",
    "timeout": "the host does not answer",
    "unreachable": "the network is unreachable",
    "no route to host": "the network is unreachable",
}
_WILL_NOT_PASS = {  # each with its fix, if that is not a different address
    "failed parsing http/2": ("speaks HTTP, not gRPC", ""),
    "misformatted domain name": ("is not of the form host:port", ""),
    "wrong_version_number": ("does not speak TLS", "call it without TLS"),
    "hostname verification": ("has a certificate for another name", "call it by that name, or give it (--server-name)"),
    "certificate_verify_failed": (
        "has a certificate that the given authority has not signed",
        "give the certificate of the authority that has (--ca)",
    ),
}


def is_answered(error: grpc.RpcError) -> bool:
    """Returns whether a Penstock server raised the error; they send details with every error."""
    return any(key == STATUS_DETAILS for key, _ in error.trailing_metadata() or ())  # type: ignore[attr-defined]


def failed_call(error: grpc.RpcError, address: str, advice: str) -> PenstockError:
    """Returns the typed error of a failed call to `address`.

    If no Penstock server answered, the message names the address, the problem there, and the fix. `advice` is an
    imperative clause that says which address to give.
    """
    typed = from_rpc_error(error)
    code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
    if is_answered(error):
        return typed
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ConfigError(
            f"the server at {address} has no such call; {advice}, and run the same release on both sides"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{address} did not end the call before its deadline; look at the server, or {advice}")
    if code is grpc.StatusCode.UNAVAILABLE:
        details = typed.message.lower()
        for words, (cause, fix) in _WILL_NOT_PASS.items():
            if words in details:
                return ConfigError(f"{address} {cause}; {fix or advice}")
        cause = next((cause for words, cause in _MAY_PASS.items() if words in details), typed.message)
        return Unavailable(f"no deployment answers at {address}: {cause}; start one with `penstock serve`, or {advice}")
    if isinstance(typed, Unauthenticated | PermissionDenied):
        return type(typed)(f"a proxy or another server at {address} refuses the call: {typed.message}; {advice}")
    return typed
