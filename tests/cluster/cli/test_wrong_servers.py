"""Tests each command that calls a server against wrong kinds of servers: exit status, address, cause and fix."""

from __future__ import annotations

import argparse
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import grpc
import pytest

from cluster.cli import admin
from cluster.cli.commands.inspecting.top import scrape
from cluster.cli.main import main
from cluster.cli.options import add_tls_options
from cluster.cli.router_http import RouterHttp
from penstock.client import sync_client
from penstock.v1 import admin_pb2

ADMIN_COMMANDS: Mapping[str, list[str]] = {
    "status": [],
    "status --wait": ["--wait", "5"],
    "events": ["-f"],
    "explain": [],
    "top": ["-n", "1"],
    "trace": ["some-request"],
    "drain": ["decode-0"],
    "drain --node": ["--node", "here"],
    "flip": ["decode-0", "prefill"],
    "scale": ["decode", "2"],
    "upgrade": [],
    "stop": [],
    "fit": ["costs.json"],
}
CLIENT_COMMANDS: Mapping[str, list[str]] = {
    "generate": ["hi"],
    "generate --lookaside": ["hi", "--lookaside"],
    "chat": [],
}
BENCH = ["bench", "run", "--requests", "1", "--timeout", "9"]


class NotFound(BaseHTTPRequestHandler):
    """Answers every request with a 404 page."""

    page: ClassVar[bytes] = b"<html>no such page</html>"

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("content-length", str(len(self.page)))
        self.end_headers()
        self.wfile.write(self.page)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


class Misleading(BaseHTTPRequestHandler):
    """Redirects `/moved`, answers every other path with a page, and records the headers it gets."""

    tokens: ClassVar[dict[str, str | None]] = {}

    def do_GET(self) -> None:
        self.tokens[self.path] = self.headers["authorization"]
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("location", f"http://localhost:{self.server.server_port}/elsewhere")  # type: ignore[attr-defined]
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


class RefuseAll(grpc.GenericRpcHandler):
    """Refuses every call as a proxy does, without the error details that Penstock's servers send."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "jwt is missing")

        return grpc.unary_unary_rpc_method_handler(refuse)


def _start_grpc(*handlers: grpc.GenericRpcHandler) -> tuple[grpc.Server, str]:
    server = grpc.server(ThreadPoolExecutor(2), handlers=handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def wrong() -> Iterator[dict[str, str]]:
    """Yields the address of a server of each wrong kind."""
    page = ThreadingHTTPServer(("127.0.0.1", 0), NotFound)
    threading.Thread(target=page.serve_forever, daemon=True).start()
    other, other_address = _start_grpc()
    proxy, proxy_address = _start_grpc(RefuseAll())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield {
            "none": "127.0.0.1:1",
            "page": f"127.0.0.1:{page.server_port}",
            "other gRPC": other_address,
            "proxy": proxy_address,
            "silent": f"127.0.0.1:{silent.getsockname()[1]}",
        }
    other.stop(None).wait(5)
    proxy.stop(None).wait(5)
    page.shutdown()
    page.server_close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the connection timeout, and gives `chat` one line to read."""
    short = {"grpc.min_reconnect_backoff_ms": 300}
    monkeypatch.setattr(admin, "_CHANNEL_OPTIONS", tuple((dict(admin._CHANNEL_OPTIONS) | short).items()))
    monkeypatch.setattr(sync_client, "CHANNEL_OPTIONS", tuple((dict(sync_client.CHANNEL_OPTIONS) | short).items()))
    monkeypatch.setattr("cluster.cli.client._CONNECT_S", 0.5)
    lines = iter(["hello"])

    def read(prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", read)


CAUSES = {
    "none": "nothing listens there (connection refused)",
    "page": "speaks HTTP, not gRPC",
    "other gRPC": "has no such call",
    "silent": "it accepts connections but does not answer",
}


PATIENT = ("status", "upgrade", "events")  # the only commands tried at the silent server, since each try takes a second
ADMIN_CASES = [
    (command, kind)
    for command in ADMIN_COMMANDS
    for kind in (*CAUSES, "proxy")
    if kind != "silent" or command in PATIENT
]


@pytest.mark.parametrize(("command", "kind"), ADMIN_CASES)
def test_operator_commands_name_the_address_cause_and_fix(
    command: str, kind: str, wrong: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command.split()[0], *ADMIN_COMMANDS[command], "--admin", wrong[kind]]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("penstock: ")
    assert wrong[kind] in printed
    assert CAUSES.get(kind, "wants another token") in printed
    assert ("--secret-file" if kind == "proxy" else "--admin") in printed


@pytest.mark.parametrize("kind", [*CAUSES, "proxy"])
@pytest.mark.parametrize("command", CLIENT_COMMANDS)
def test_client_commands_name_the_address_cause_and_fix(
    command: str, kind: str, wrong: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command.split()[0], *CLIENT_COMMANDS[command], "--server", wrong[kind]]) == 2
    printed = capsys.readouterr().err
    assert wrong[kind] in printed
    assert CAUSES.get(kind, "a proxy or another server") in printed
    assert "a router's gRPC address" in printed
    assert ("--api-key" in printed) is (kind == "proxy")


@pytest.mark.parametrize("kind", CAUSES)
def test_a_grpc_benchmark_ends_at_its_first_refused_request(
    kind: str, wrong: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.client.async_client.CHANNEL_OPTIONS", sync_client.CHANNEL_OPTIONS)
    assert main([*BENCH, "--grpc", wrong[kind]]) == 2
    printed = capsys.readouterr().err
    assert wrong[kind] in printed
    assert CAUSES[kind] in printed


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("none", "does not answer: nothing listens there"),
        ("page", "does not exist on that server: <html>no such page</html>"),
        ("other gRPC", "does not speak HTTP"),
    ],
)
@pytest.mark.parametrize("words", [[*BENCH, "--url"], ["trace", "some-request", "--router"]], ids=["bench", "trace"])
def test_a_wrong_url_is_reported_with_the_cause(
    words: list[str], kind: str, cause: str, wrong: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://{wrong[kind]}"
    assert main([*words, url]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"penstock: {url}/")
    assert cause in printed
    assert f"({words[-1]} http://HOST:PORT" in printed


def test_plain_http_behind_an_https_url_is_reported(wrong: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["trace", "x", "--router"], [*BENCH, "--url"]):
        assert main([*words, f"https://{wrong['page']}"]) == 2
        assert "does not speak TLS; call it as http://" in capsys.readouterr().err


@pytest.fixture
def misleading() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Misleading)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Misleading.tokens.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_redirect_target_does_not_get_the_metrics_token(misleading: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-secret")
    token.chmod(0o600)
    flags = argparse.ArgumentParser()
    add_tls_options(flags)
    arguments = flags.parse_args([])
    arguments.metrics_token_file = str(token)
    RouterHttp(arguments, 5.0).get(f"{misleading}/moved")
    assert Misleading.tokens == {"/moved": "Bearer a-secret", "/elsewhere": None}


def test_a_page_in_place_of_metrics_is_reported(misleading: str) -> None:
    flags = argparse.ArgumentParser()
    add_tls_options(flags)
    arguments = flags.parse_args([])
    arguments.metrics_token_file = None
    url = f"{misleading}/metrics"
    counts, unread = scrape(admin_pb2.StatusResponse(endpoints=[url]), RouterHttp(arguments, 5.0))
    assert counts == {}
    assert unread == {url: f"{url} does not answer with metrics; another server may listen there"}


def test_an_unparsable_url_is_refused_by_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "x", "--router", "http://[::1"]) == 2
    assert "--router: is 'http://[::1'; give http://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["localhost", "here:port", "http://here:1", "here:0", "here:99999", ""])
@pytest.mark.parametrize(
    ("words", "flag"),
    [(["status"], "--admin"), (["generate", "hi"], "--server")],
    ids=["status", "generate"],
)
def test_an_invalid_address_is_refused_by_flag(
    words: list[str], flag: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, flag, address]) == 2
    assert f"{flag}: is {address!r}; give HOST:PORT, such as localhost:5005" in capsys.readouterr().err
