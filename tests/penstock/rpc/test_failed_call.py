"""Tests the errors of clients whose server is not Penstock's, is silent, or has a certificate that does not fit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest

from penstock import Client
from penstock.client.retry import RetryPolicy
from penstock.errors import ConfigError, DeadlineExceeded, PenstockError, Unavailable
from penstock.rpc.tls import ClientTls
from tests.support.key_files import Authority

NO_RETRY = RetryPolicy(max_attempts=1)
FIX = "give a router's gRPC address (host:port, by default port 50051)"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def plain() -> Iterator[int]:
    """Yields the port of a gRPC server without any service."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait(5)


@pytest.fixture(scope="module")
def secured(authority: Authority) -> Iterator[int]:
    """Yields the port of a server whose certificate is for `localhost`."""
    made = authority.issue("server", "DNS:localhost")
    assert made.cert_file is not None
    assert made.key_file is not None
    pair = (Path(made.key_file).read_bytes(), Path(made.cert_file).read_bytes())
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield port
    server.stop(None).wait(5)


def failure(address: str, tls: ClientTls | None = None, timeout_s: float = 30.0) -> PenstockError:
    """Returns the error of a stream, after checking that a unary call has the same one."""
    found = []
    with Client(address, retry=NO_RETRY, tls=tls) as client:
        with pytest.raises(PenstockError) as caught:
            client.list_models(timeout_s=timeout_s)
        found.append(caught.value)
        with pytest.raises(PenstockError) as caught:
            next(client.generate("hi", timeout_s=timeout_s))
        found.append(caught.value)
    assert (type(found[0]), found[0].message) == (type(found[1]), found[1].message)
    return found[1]


def test_an_address_without_a_server_is_reported() -> None:
    error = failure("127.0.0.1:1")
    assert type(error) is Unavailable
    assert error.message == (
        "no deployment answers at 127.0.0.1:1: nothing listens there (connection refused); "
        f"start one with `penstock serve`, or {FIX}"
    )


def test_a_server_without_the_service_is_reported(plain: int) -> None:
    error = failure(f"127.0.0.1:{plain}")
    assert type(error) is ConfigError
    assert error.message == (
        f"the server at 127.0.0.1:{plain} has no such call; {FIX}, and run the same release on both sides"
    )


def test_an_http_server_is_reported() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        error = failure(f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert type(error) is ConfigError
    assert error.message == f"127.0.0.1:{server.server_port} speaks HTTP, not gRPC; {FIX}"


def test_a_silent_server_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        error = failure(address, timeout_s=0.3)
    assert type(error) is DeadlineExceeded
    assert error.message == f"{address} did not end the call before its deadline; look at the server, or {FIX}"


def test_a_url_in_place_of_an_address_is_reported() -> None:
    assert failure("http://localhost:50051").message == f"http://localhost:50051 is not of the form host:port; {FIX}"


def test_tls_at_only_one_end_is_reported(plain: int, secured: int, authority: Authority) -> None:
    encrypted = failure(f"localhost:{plain}", ClientTls(authority.ca))
    assert encrypted.message == f"localhost:{plain} does not speak TLS; call it without TLS"
    assert "call it with TLS if it has a certificate" in failure(f"localhost:{secured}").message


def test_certificates_that_do_not_fit_are_reported(
    secured: int, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Authority(tmp_path_factory.mktemp("other"))
    untrusted = failure(f"localhost:{secured}", ClientTls(other.ca))
    assert "has a certificate that the given authority has not signed" in untrusted.message
    wrong_name = failure(f"127.0.0.1:{secured}", ClientTls(authority.ca))
    assert "has a certificate for another name" in wrong_name.message
    right = ClientTls(authority.ca, server_name="localhost")
    assert "has no such call" in failure(f"127.0.0.1:{secured}", right).message
