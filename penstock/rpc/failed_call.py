"""Errors of calls that nothing of Penstock has answered: what is wrong at the address, and the fix."""

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
# Words of gRPC's details, for which it has no codes, and what they mean.
_MAY_PASS = {
    "connection refused": "nothing listens there (connection refused)",
    "domain name not found": "the host has no address",
    "socket closed": _CLOSED,
    "connection reset": _CLOSED,
    "before receiving settings": "it accepts connections and says nothing",
    "timed out": "the host does not answer",
    "timeout": "the host does not answer",
    "unreachable": "no network leads there",
    "no route to host": "no network leads there",
}
_WILL_NOT_PASS = {  # with the fix, if it is not another address
    "failed parsing http/2": ("speaks HTTP, not gRPC", ""),
    "misformatted domain name": ("is not of the form host:port", ""),
    "wrong_version_number": ("speaks no TLS", "call it without TLS"),
    "hostname verification": ("has a certificate of another name", "call it by that name, or give it (--server-name)"),
    "certificate_verify_failed": (
        "has a certificate that the given authority has not signed",
        "give the certificate of the authority that has (--ca)",
    ),
}


def is_answered(error: grpc.RpcError) -> bool:
    """Returns whether a server of Penstock raised the error; those send details with every one."""
    return any(key == STATUS_DETAILS for key, _ in error.trailing_metadata() or ())  # type: ignore[attr-defined]


def failed_call(error: grpc.RpcError, address: str, advice: str) -> PenstockError:
    """Returns the typed error of a failed call to `address`.

    If no server of Penstock answered, the message names the address, what is wrong there, and the fix: `advice` says
    which address to give, as an imperative clause.
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
