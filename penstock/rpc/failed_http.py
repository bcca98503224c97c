"""Explains failed HTTP requests of any library: names the problem at the URL, and the fix.

The counterpart of `failed_call` for gRPC. Reads the causes of exceptions of both urllib and aiohttp.
"""

from __future__ import annotations

import errno
import http.client
import json
import socket
import ssl
from collections.abc import Iterator

from penstock.errors import ConfigError, PenstockError, PermissionDenied, Unauthenticated, Unavailable

_MAX_TEXT = 300  # most characters of an answer that a message repeats
_REFUSALS = {401: Unauthenticated, 403: PermissionDenied}
_ERRNOS = {
    errno.ECONNREFUSED: "nothing listens there (connection refused)",
    errno.ECONNRESET: "it closed the connection; call it as https:// if it has a certificate",
    errno.ENETUNREACH: "the network is unreachable",
    errno.EHOSTUNREACH: "the network is unreachable",
}


def failed_http(error: BaseException, url: str, advice: str) -> PenstockError:
    """Returns the typed error of a request without a complete answer. `advice` is an imperative clause with the fix.

    The message quotes the library for an unknown cause.
    """
    url = without_user(url)
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ConfigError(f"{url} has an untrusted certificate ({cause}); give its authority's with --ca")
        if isinstance(cause, ssl.SSLError) and "alert" in str(cause).lower():
            return ConfigError(
                f"{url} refuses the TLS handshake ({_brief(str(cause))}); if it requires a client certificate, give "
                "--cert and --cert-key"
            )
        if isinstance(cause, ssl.SSLError):
            return ConfigError(f"{url} does not speak TLS; call it as http://")
        if _is_no_http(cause):
            return ConfigError(f"{url} does not speak HTTP; {advice}")
        if found := _why_unreached(cause):
            return Unavailable(f"{url} does not answer: {found}; {advice}")
    return Unavailable(f"{url} does not answer: {_brief(str(error) or type(error).__name__)}; {advice}")


def without_user(url: str) -> str:
    """Returns the URL without the user and the password that it may hold, for messages and files."""
    scheme, mark, rest = url.rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"


def _is_no_http(error: BaseException) -> bool:
    if isinstance(error, http.client.RemoteDisconnected):
        return False
    return isinstance(error, http.client.BadStatusLine) or "bad status line" in str(error).lower()


def _why_unreached(error: BaseException) -> str:
    """Returns why the connection failed if the exception says so, or ""."""
    if isinstance(error, socket.gaierror):
        return "the host has no address"
    if isinstance(error, TimeoutError):
        return "no answer came in time"
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return _ERRNOS[error.errno]
    if "disconnected" in str(error).lower() or isinstance(error, http.client.RemoteDisconnected):
        return _ERRNOS[errno.ECONNRESET]
    return ""


def refused_http(status: int, text: str, url: str, advice: str) -> PenstockError:
    """Returns the typed error of an answer with this status, whose body is `text`."""
    url = without_user(url)
    detail = f": {_brief(_message_in(text))}" if text.strip() else ""
    if kind := _REFUSALS.get(status):
        return kind(f"{url} refuses the call{detail}; {advice}")
    if status == 404:
        return ConfigError(f"{url} does not exist on that server{detail}; {advice}")
    if status >= 500:
        return Unavailable(f"{url} failed with status {status}{detail}; look at the server's log")
    return ConfigError(f"{url} answers with status {status}{detail}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the causes of the error, the innermost first, then the error itself."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    yield from reversed(chain)


def _message_in(text: str) -> str:
    """Returns the message of an error in OpenAI's form, or the text."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text
    return str(message)


def _brief(text: str) -> str:
    words = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return words if len(words) <= _MAX_TEXT else f"{words[:_MAX_TEXT]}..."
