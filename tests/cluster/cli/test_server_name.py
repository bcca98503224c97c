"""Tests `--server-name` over HTTPS and gRPC: the certificate is checked by that name instead of the host."""

from __future__ import annotations

import argparse
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import aiohttp
import pytest

from cluster.cli.options import add_tls_options, client_tls
from cluster.cli.router_http import RouterHttp
from penstock.bench.driver.openai_http import open_session
from penstock.errors import PenstockError
from tests.support.key_files import Authority


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"a page")

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def url(authority: Authority) -> Iterator[str]:
    """Yields the URL of a server whose certificate names another host than the URL."""
    made = authority.issue("server", "DNS:router.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(str(made.cert_file), made.key_file)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def flags(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_tls_options(parser)
    parser.add_argument("--metrics-token-file")
    return parser.parse_args(given)


def test_commands_check_the_certificate_by_the_given_name(url: str, authority: Authority) -> None:
    assert RouterHttp(flags("--ca", authority.ca, "--server-name", "router.example"), 30.0).get(url) == b"a page"
    for given in ((), ("--server-name", "other.example")):
        with pytest.raises(PenstockError, match="certificate"):
            RouterHttp(flags("--ca", authority.ca, *given), 30.0).get(url)


async def test_benchmarks_check_the_certificate_by_the_given_name(url: str, authority: Authority) -> None:
    tls = client_tls(flags("--ca", authority.ca, "--server-name", "router.example"))
    async with open_session(None, tls) as session, session.get(url) as answer:
        assert await answer.read() == b"a page"
    async with open_session(None, client_tls(flags("--ca", authority.ca))) as session:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.get(url)


def test_a_server_name_turns_on_tls_as_an_authority_does() -> None:
    tls = client_tls(flags("--server-name", "router.example"))
    assert tls is not None
    assert tls.options() == [("grpc.ssl_target_name_override", "router.example")]
    assert client_tls(flags()) is None
