"""Requests to the routers' HTTP ports: metrics and finished requests."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from argparse import Namespace

from cluster.cli.options import client_tls
from penstock.errors import PenstockError
from penstock.rpc.failed_http import failed_http, refused_http
from penstock.rpc.secret import read_private
from penstock.rpc.tls import ClientTls
from penstock.v1 import admin_pb2

_ADVICE = "give a router's HTTP address (--router http://HOST:PORT, by default port 8000)"
_MAX_ERROR_BYTES = 4096
_MAX_BYTES = 64 << 20  # of metrics; a wrong server may send without end
_TOKEN_ADVICE = "name the file of its metrics token with --metrics-token-file"


class RouterHttp:
    """Reads from routers with the certificates and the metrics token of the flags."""

    def __init__(self, arguments: Namespace, timeout_s: float) -> None:
        """Raises ConfigError for a file that cannot be read."""
        file = arguments.metrics_token_file
        self._token = read_private(file, "--metrics-token-file") if file else ""
        self._tls = client_tls(arguments) or ClientTls()
        self._timeout_s = timeout_s

    def get(self, url: str) -> bytes | None:
        """Returns the answer's body, or None if a router answers that there is nothing at this URL.

        Raises PenstockError that says what is wrong.
        """
        request = urllib.request.Request(url)
        if self._token:
            # A redirect may lead to another host, which must not get the token.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        context = self._tls.context() if url.startswith("https") else None
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s, context=context) as answer:
                body: bytes = answer.read(_MAX_BYTES)
                return body
        except urllib.error.HTTPError as error:
            text = error.read(_MAX_ERROR_BYTES).decode(errors="replace")
            if error.code == 404 and _is_router_error(text):
                return None
            raise _refusal(error.code, text, url) from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # a URLError is an OSError
            raise failed_http(error, url, _ADVICE) from error


def router_urls(status: admin_pb2.StatusResponse) -> list[str]:
    """Returns the base of each router's own URL; that of the public port where a single router has no other."""
    own = [url.removesuffix("/metrics") for url in status.endpoints if url.endswith("/metrics")]
    return own or [url for url in status.endpoints if url.startswith("http")]


def _is_router_error(text: str) -> bool:
    try:
        return "error" in json.loads(text)
    except (ValueError, TypeError):
        return False


def _refusal(status: int, text: str, url: str) -> PenstockError:
    """Returns the error of an answer; leaves the body out if the token is wrong."""
    if status in (401, 403):
        return refused_http(status, "", url, _TOKEN_ADVICE)
    return refused_http(status, text, url, _ADVICE)
