"""Tests the errors of HTTP requests: each has the URL, the cause and the fix."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl

import pytest

from penstock.errors import ConfigError, PenstockError, PermissionDenied, Unauthenticated, Unavailable
from penstock.rpc.failed_http import failed_http, refused_http, without_user

URL, ADVICE = "http://here:8000/v1", "give another URL"


def wrapped(cause: Exception) -> Exception:
    """Returns the cause inside an error of another type, as libraries raise it."""
    try:
        try:
            raise cause
        except Exception as inner:
            raise OSError("connection failed") from inner
    except OSError as error:
        return error


@pytest.mark.parametrize(
    ("cause", "kind", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), Unavailable, "nothing listens there"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Unavailable, "call it as https:// if it has a certificate"),
        (OSError(errno.EHOSTUNREACH, "unreachable"), Unavailable, "the network is unreachable"),
        (socket.gaierror(-2, "unknown"), Unavailable, "the host has no address"),
        (TimeoutError(), Unavailable, "no answer came in time"),
        (http.client.RemoteDisconnected("closed"), Unavailable, "it closed the connection"),
        (http.client.BadStatusLine("xx"), ConfigError, f"{URL} does not speak HTTP; {ADVICE}"),
        (ssl.SSLError(1, "WRONG_VERSION_NUMBER"), ConfigError, "does not speak TLS; call it as http://"),
        (
            ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert"),
            ConfigError,
            "give --cert and --cert",
        ),
        (ssl.SSLCertVerificationError(1, "self-signed"), ConfigError, "give its authority's with --ca"),
        (ValueError("something new"), Unavailable, "connection failed"),
    ],
)
def test_a_request_without_an_answer_states_the_cause(cause: Exception, kind: type[PenstockError], words: str) -> None:
    found = failed_http(wrapped(cause), URL, ADVICE)
    assert type(found) is kind
    assert found.message.startswith(URL)
    assert words in found.message


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, Unauthenticated, f"{URL} refuses the call: no key; {ADVICE}"),
        (403, PermissionDenied, f"{URL} refuses the call: no key; {ADVICE}"),
        (404, ConfigError, f"{URL} does not exist on that server: no key; {ADVICE}"),
        (422, ConfigError, f"{URL} answers with status 422: no key"),
        (503, Unavailable, f"{URL} failed with status 503: no key; look at the server's log"),
    ],
)
def test_the_text_of_a_refusal_is_shown(status: int, kind: type[PenstockError], words: str) -> None:
    found = refused_http(status, '{"error": {"message": "no key"}}', URL, ADVICE)
    assert (type(found), found.message) == (kind, words)
    assert refused_http(status, " \n", URL, ADVICE).message == words.replace(": no key", "")


def test_a_long_page_is_shortened() -> None:
    assert len(refused_http(500, "x " * 5000, URL, ADVICE).message) < 400


def test_an_answer_cannot_control_the_terminal() -> None:
    found = refused_http(500, "broken \x1b]0;title\x07\x1b[2J\x9b1m here", URL, ADVICE)
    assert found.message.isprintable()
    assert "here" in found.message


def test_a_password_in_a_url_is_not_shown() -> None:
    url = "https://me:p@ss@here:8000/v1?at=a@b"
    for error in (failed_http(TimeoutError(), url, ADVICE), refused_http(500, "", url, ADVICE)):
        assert error.message.startswith("https://here:8000/v1?at=a@b ")
    for plain in (URL, "http://[::1]:8000/v1", "here:8000"):
        assert without_user(plain) == plain
