"""Tests the `penstock` command: refusals and their messages, and commands that call a deployment, which is fake
here."""

from __future__ import annotations

import io
import json
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from cluster.cli import commands
from cluster.cli.admin import admin_call
from cluster.cli.catalog import EXAMPLES, GROUPS
from cluster.cli.commands.inspecting import status as status_command
from cluster.cli.commands.running.serve import how_to_call, may_restart, serve_config
from cluster.cli.main import main, make_parser
from cluster.cli.start_progress import StartProgress
from cluster.cli.table import state_changes
from cluster.ray import connection
from cluster.ray import launch as launching
from cluster.ray.connection import MINIMUM_RAY
from penstock.charts.table import format_table
from penstock.config import ServeConfig
from penstock.errors import ConfigError, DeadlineExceeded, InvalidInput
from penstock.rpc.addresses import callable_host
from penstock.rpc.secret import digest_of
from penstock.v1 import admin_pb2, admin_pb2_grpc, common_pb2, worker_pb2
from tests.support.router.fake_inference import FakeInference, FakeServer, say

MODEL = str(Path(__file__).resolve().parents[3] / "models" / "penstock-tiny")
FREE_PORTS = ["--http-port", "0", "--grpc-port", "0", "--admin-port", "0"]


def config_of(*flags: str) -> ServeConfig:
    return serve_config(make_parser().parse_args(["serve", *flags]))


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs a command that must fail with status 2; returns its message, which holds no traceback."""
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("penstock: ")
    assert "Traceback" not in captured.err
    return captured.err.removeprefix("penstock: ").strip()


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'model = "from-file"\ngrpc_port = 7000\nhttp_port = 7001\n'
        '[decode_pool]\nreplicas = 4\n[engine]\ndtype = "float16"\n'
    )
    config = config_of("--config", str(file), "--grpc-port", "9000", "--decode", "2", "--transport", "torch")
    assert (config.model, config.grpc_port, config.http_port) == ("from-file", 9000, 7001)
    assert (config.decode_pool.replicas, config.prefill_pool.replicas) == (2, 1)
    assert config.transfer.transport == "torch"
    assert config.engine_config().dtype == "float16"
    assert config_of("--config", str(file), "--dtype", "float32").engine_config().dtype == "float32"


def test_colocated_has_no_prefill_workers() -> None:
    config = config_of("--model", "m", "--colocated", "--decode", "3")
    assert (config.prefill_pool.replicas, config.decode_pool.replicas) == (0, 3)
    assert config.decode.placement == "local"
    with pytest.raises(ConfigError, match="--colocated with --prefill 2"):
        config_of("--model", "m", "--colocated", "--prefill", "2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('model = "m"\nhtpp_port = 1', ["serve.toml", "unknown key htpp_port = 1", "spelling"]),
        ('model = "m"\nhttp_port = 99999', ["http_port = 99999", "65535"]),
        ('model = "m"\n[decode_pool]\nreplicas = 0', ["decode_pool.replicas is 0"]),
        ('model = "m"\n[engine]\nnum_page = 3', ["num_page"]),
        ('model = "m"\nengine = 3', ["engine = 3"]),
        ("model = ", ["serve.toml", "give a readable TOML"]),
        ("", ["model is missing", "--model DIR"]),
    ],
)
def test_a_bad_config_file_is_refused_by_key_value_and_fix(
    text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    message = refusal(capsys, "serve", "--config", str(file))
    for word in words:
        assert word in message


def test_missing_files_are_refused_by_flag_or_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "missing.toml" in refusal(capsys, "serve", "--config", str(tmp_path / "missing.toml"))
    assert str(tmp_path / "no-model") in refusal(capsys, "serve", "--model", str(tmp_path / "no-model"), *FREE_PORTS)
    assert "config.json" in refusal(capsys, "serve", "--model", str(tmp_path), *FREE_PORTS)


@pytest.mark.parametrize("key", ["http_port", "grpc_port", "admin_port"])
def test_a_port_in_use_is_refused_before_anything_starts(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "connect", lambda config: pytest.fail("Ray was started"))
    flag = "--" + key.replace("_", "-")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refusal(capsys, "serve", "--model", MODEL, *FREE_PORTS, flag, str(port))
    assert f"{key} = {port}: cannot listen on 127.0.0.1:{port} (Address already in use)" in message
    assert f"choose another with {flag}" in message


def test_a_server_on_every_interface_is_called_on_loopback() -> None:
    assert [callable_host(host) for host in ("0.0.0.0", "::", "10.0.0.7")] == ["127.0.0.1", "127.0.0.1", "10.0.0.7"]


def test_two_equal_ports_are_refused() -> None:
    port = launching.resolve_ports(ServeConfig(model="m", http_port=0, grpc_port=0, admin_port=0)).http_port
    with pytest.raises(ConfigError, match=f"grpc_port = {port}: another port has the same number"):
        launching.resolve_ports(ServeConfig(model="m", http_port=port, grpc_port=port, admin_port=0))


def test_a_ray_that_is_too_old_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.__version__", "2.9.3")
    message = refusal(capsys, "serve", "--model", MODEL, *FREE_PORTS)
    assert "ray 2.9.3 is too old" in message
    assert f"pip install -U 'ray>={MINIMUM_RAY}'" in message


def test_an_unreachable_ray_cluster_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal(capsys, "serve", "--model", MODEL, *FREE_PORTS, "--address", "127.0.0.1:1")
    assert "security.secret_file is missing: with address, workers on other machines read the cluster secret" in message
    monkeypatch.setattr(connection, "protect_token", lambda: None)
    joining = ("serve", "--model", MODEL, *FREE_PORTS, "--secret-file", "s")
    message = refusal(capsys, *joining, "--address", "127.0.0.1:1")
    assert "address = '127.0.0.1:1'" in message
    assert "ray start --head" in message
    message = refusal(capsys, *joining, "--address", "ray://127.0.0.1:1")
    assert "run this on a node of the cluster" in message


def test_generate_streams_and_prints_the_timing(capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeInference(say("Once", " upon"))
    with FakeServer(service) as server:
        flags = [
            "--server",
            server.address,
            "--timing",
            "--max-tokens",
            "9",
            "--stop",
            "a",
            "--stop",
            "b",
            "--lane",
            "bulk",
        ]
        assert main(["generate", "Hello", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Once upon\n"
    header, row = captured.err.strip().splitlines()
    assert header.split()[:2] == ["queue", "ms"]
    assert row.split()[-5:] == ["prefill-0", ">", "decode-1", "0", "3"]
    (request,) = service.requests
    assert (request.text, request.sampling.max_tokens, list(request.sampling.stop)) == ("Hello", 9, ["a", "b"])
    assert not request.sampling.HasField("temperature")
    assert request.lane == common_pb2.LANE_BULK


def test_generate_prints_the_whole_answer_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(FakeInference(say("Once", " upon"))) as server:
        assert main(["generate", "Hello", "--json", "--server", server.address]) == 0
    found = json.loads(capsys.readouterr().out)
    (completion,) = found["completions"]
    assert (completion["text"], completion["finish_reason"], completion["token_ids"]) == (
        "Once upon",
        "stop",
        [100, 101],
    )
    assert completion["timing"]["decode_worker"] == "decode-1"
    assert (found["usage"]["completion_tokens"], found["model"]) == (2, "fake")


class InterruptedOutput(io.StringIO):
    """Stands in for a terminal whose user presses Ctrl-C after the first word."""

    def write(self, text: str) -> int:
        if self.getvalue() == "Once":
            self.seek(0)
            self.truncate()
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_cancels_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeInference([*say("Once", " upon", " a"), FakeInference.HANG])
    monkeypatch.setattr("sys.stdout", InterruptedOutput())
    with FakeServer(service) as server:
        assert main(["generate", "Hello", "--server", server.address]) == 130
        assert service.cancelled.wait(60)


def test_generate_reads_standard_input_and_reports_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    service = FakeInference(say("ok"), [InvalidInput("temperature", "-1 is negative; give 0 or more")])
    with FakeServer(service) as server:
        assert main(["generate", "-", "--server", server.address]) == 0
        capsys.readouterr()
        message = refusal(capsys, "generate", "x", "--server", server.address, "--temperature", "-1")
    assert service.requests[0].text == "from a pipe"
    assert message == "temperature: -1 is negative; give 0 or more"


def test_chat_keeps_its_history_without_failed_turns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hi", "fails", "", "again"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or _end_of_file(lines))
    service = FakeInference(say("hello"), [InvalidInput("messages", "no")], say("bye"))
    with FakeServer(service) as server:
        assert main(["chat", "--system", "be kind", "--server", server.address]) == 0
    spoken = [(message.role, message.content) for message in service.requests[-1].messages]
    assert spoken == [("system", "be kind"), ("user", "hi"), ("assistant", "hello"), ("user", "again")]
    assert "messages: no" in capsys.readouterr().err


def test_chat_exits_2_when_its_last_answer_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    with FakeServer(FakeInference([InvalidInput("messages", "no")])) as server:
        assert main(["chat", "--server", server.address]) == 2
    assert "messages: no" in capsys.readouterr().err


def _end_of_file(lines: Iterator[str]) -> str:
    following = next(lines, None)
    if following is None:
        raise EOFError
    return following


class FakeAdmin(admin_pb2_grpc.AdminServicer):
    def __init__(self) -> None:
        self.stopped = threading.Event()

    def Status(self, request: admin_pb2.StatusRequest, context: grpc.ServicerContext) -> admin_pb2.StatusResponse:
        member = admin_pb2.Member(worker_id="decode-0", epoch=7, role="decode", address="127.0.0.1:9")
        load = worker_pb2.Load(num_running=3, free_pages=90, total_pages=100)
        ready = admin_pb2.WorkerStatus(member=member, state="ready", pid=42, num_restarts=1, load=load)
        lost = admin_pb2.WorkerStatus(
            member=admin_pb2.Member(worker_id="prefill-0"), state="lost", detail="its process died"
        )
        return admin_pb2.StatusResponse(
            model="m", ready=True, workers=[ready, lost], endpoints=["grpc://x:1"], uptime_s=5
        )

    def Stop(self, request: admin_pb2.StopRequest, context: grpc.ServicerContext) -> admin_pb2.StopResponse:
        self.stopped.set()
        return admin_pb2.StopResponse()


def test_status_and_stop(capsys: pytest.CaptureFixture[str]) -> None:
    admin = FakeAdmin()
    server = grpc.server(ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        assert main(["status", "--admin", address]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert printed[0] == "m: ready, up 5 s, at grpc://x:1"
        assert printed[3].split() == ["decode-0", "ready", "42", "1", "3", "0", "90/100", "127.0.0.1:9"]
        assert printed[4].endswith("its process died")
        assert main(["status", "--json", "--admin", address]) == 0
        fields = json.loads(capsys.readouterr().out)
        assert (fields["ready"], fields["workers"][0]["num_restarts"], fields["workers"][1]["pid"]) == (True, 1, 0)
        assert not admin.stopped.is_set()
        assert main(["stop", "--admin", address]) == 0
        assert admin.stopped.is_set()
    finally:
        server.stop(0).wait(5)


def test_status_waits_for_a_deployment_that_does_not_listen_yet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = FakeAdmin()
    monkeypatch.setattr(admin, "Events", lambda request, context: iter(()), raising=False)
    server = grpc.server(ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

    def start_instead_of_sleeping(seconds: float) -> None:
        server.add_insecure_port(address)
        server.start()

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=start_instead_of_sleeping)
    monkeypatch.setattr(status_command, "time", clock)
    monkeypatch.setattr(status_command, "all_ready", lambda status: status.ready)
    try:
        assert main(["status", "--wait", "60", "--admin", address]) == 0
        assert capsys.readouterr().out.startswith("m: ready, up 5 s")
    finally:
        server.stop(0).wait(5)


def test_an_unreachable_deployment_is_reported_with_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "stop"):
        message = refusal(capsys, command, "--admin", "127.0.0.1:1")
        assert message == (
            "no deployment answers at 127.0.0.1:1: nothing listens there (connection refused); start one with "
            "`penstock serve`, or give the deployment's --admin address, by default port 50052"
        )
    assert refusal(capsys, "generate", "hi", "--server", "127.0.0.1:1", "--timeout", "2") == (
        "no deployment answers at 127.0.0.1:1: nothing listens there (connection refused); start one with "
        "`penstock serve`, or give a router's gRPC address (host:port, by default port 50051)"
    )


def test_a_chat_without_a_server_ends_with_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", "--server", "127.0.0.1:1", "--timeout", "0.3"]) == 2
    assert capsys.readouterr().err.startswith("no deployment answers at 127.0.0.1:1: nothing listens there")


def test_a_grpc_server_without_the_admin_service_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        message = refusal(capsys, "status", "--admin", f"127.0.0.1:{port}")
        assert main(["doctor", "--json", "--no-transfers", "--admin", f"127.0.0.1:{port}"]) == 1
        found = json.loads(capsys.readouterr().out)["findings"]
    finally:
        server.stop(None).wait(5)
    assert message.startswith(f"the server at 127.0.0.1:{port} has no such call; give the deployment's --admin")
    (deployment,) = [each for each in found if each["check"] == "deployment"]
    assert (deployment["verdict"], deployment["advice"]) == ("problem", message)


def test_an_http_server_at_the_admin_address_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with ThreadPoolExecutor(1) as executor:
            answered = executor.submit(_refuse_as_http, listening)
            message = refusal(capsys, "status", "--admin", address)
            answered.result(5)
    assert message.startswith(f"{address} speaks HTTP, not gRPC; give the deployment's --admin")


def _refuse_as_http(listening: socket.socket) -> None:
    listening.settimeout(5)
    peer, _ = listening.accept()
    with peer:
        peer.settimeout(5)
        peer.recv(4096)
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def test_a_silent_server_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        arguments = make_parser("status").parse_args(["status", "--admin", address])
        with pytest.raises(DeadlineExceeded, match=f"{address} did not end the call before its deadline"):
            admin_call(arguments, "Status", admin_pb2.StatusRequest(), timeout_s=0.3)


def test_a_missing_package_is_reported_with_the_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)  # as if the package were not installed
    for name in [name for name in sys.modules if name.startswith(("simulator", "cluster.cli.commands.sizing"))]:
        monkeypatch.delitem(sys.modules, name)
    assert refusal(capsys, "plan", "--help") == "numpy is not installed; run: pip install 'penstock[serve]'"


def test_the_doctor_of_a_bare_client_checks_only_the_deployment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith(("cluster.diagnose", "cluster.ray"))]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["doctor", "--json", "--admin", "127.0.0.1:1"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(each["check"], each["verdict"]) for each in found] == [("install", "skipped"), ("deployment", "skipped")]
    assert "pip install 'penstock[serve]'" in found[0]["advice"]
    assert found[1]["text"] == "none answers: nothing listens there (connection refused)"
    assert found[1]["advice"].startswith("start one with `penstock serve`")


def test_tables_align_and_each_change_is_printed_once() -> None:
    assert format_table(("name", "n"), [["a", "1"], ["long", "100"]]) == "name    n\na       1\nlong  100"
    states: dict[str, str] = {}
    status = admin_pb2.StatusResponse(
        workers=[admin_pb2.WorkerStatus(member=admin_pb2.Member(worker_id="w"), state="lost", detail="killed")]
    )
    assert state_changes(states, status) == ["w is lost: killed"]
    assert state_changes(states, status) == []


def test_a_start_without_a_terminal_prints_each_stage_once(capsys: pytest.CaptureFixture[str]) -> None:
    def status(state: str, detail: str) -> admin_pb2.StatusResponse:
        worker = admin_pb2.WorkerStatus(member=admin_pb2.Member(worker_id="w"), state=state, detail=detail)
        return admin_pb2.StatusResponse(workers=[worker])

    with StartProgress() as progress:
        for detail in ("", "building CPU kernels, once for this machine", "loading weights 5%", "loading weights 50%"):
            progress.show(status("starting", detail))
        progress.show(status("ready", ""))
    assert capsys.readouterr().err.splitlines() == [
        "w is starting",
        "w: building CPU kernels, once for this machine",
        "w: loading weights",
        "w is ready",
    ]


def test_a_free_port_lies_outside_the_ephemeral_range() -> None:
    """Inside that range, a connection of Ray could take the port before the router listens."""
    config = launching.resolve_ports(ServeConfig(model="m", http_port=0, grpc_port=0, admin_port=0))
    ports = {config.http_port, config.grpc_port, config.admin_port}
    assert len(ports) == 3
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not [port for port in ports if low <= port <= high]


def test_a_new_key_is_printed_once_beside_its_digest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "acme"]) == 0
    printed = capsys.readouterr()
    key = printed.out.strip()
    assert key.startswith("psk-")
    assert len(key) > 40
    assert f'[tenants.acme]\nkeys = ["{digest_of(key)}"]' in printed.err
    assert key not in printed.err
    assert refusal(capsys, "key", "new", "a b").startswith("tenant: is 'a b'; give letters")


def test_the_suggested_commands_use_tls_and_keys_when_configured() -> None:
    endpoints = {"http": "h:1", "grpc": "h:2", "admin": "h:3"}
    plain, secured = how_to_call("m", endpoints), how_to_call("m", endpoints, encrypted=True, keyed=True)
    assert "curl http://h:1/v1/completions -H 'Content" in plain
    assert "--tls" not in plain
    assert 'curl https://h:1/v1/completions -H "Authorization: Bearer $PENSTOCK_API_KEY"' in secured
    assert "penstock generate --tls --server h:2" in secured


def test_a_drain_needs_either_a_worker_or_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give one of the two" in refusal(capsys, "drain")
    assert "give one of the two" in refusal(capsys, "drain", "decode-1", "--node", "n")
    without_node = refusal(capsys, "drain", "decode-1", "--within", "5")
    assert "within: is 5; give seconds above 0, together with --node" in without_node
    assert "give seconds above 0" in refusal(capsys, "drain", "--node", "n", "--within", "0")


def test_a_deployment_that_keeps_losing_its_ray_is_not_restarted() -> None:
    assert may_restart([0.0], 0.0)
    assert may_restart([0.0, 50.0, 100.0], 100.0)
    assert not may_restart([0.0, 50.0, 100.0, 150.0], 150.0)
    assert may_restart([0.0, 50.0, 100.0, 900.0], 900.0)  # the earlier losses are long ago


@pytest.mark.processes
def test_help_lists_each_command_once_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    rooms = Path(commands.__file__).parent
    files = {path.stem.replace("_", "-") for path in rooms.glob("*/*.py") if path.stem != "__init__"}
    listed = [name for group in GROUPS for name in group.help_lines]
    assert sorted(listed) == sorted(files)
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in listed)
    code = "import sys; from cluster.cli.main import make_parser; make_parser(''); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "cluster.cli.commands" not in modules


def test_a_mistyped_command_gets_the_nearest_as_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "statu") == "command: 'statu' is unknown; did you mean status?; see penstock --help"
    assert refusal(capsys, "qqqqq") == "command: 'qqqqq' is unknown; see penstock --help"


def test_every_file_in_a_command_room_is_a_command() -> None:
    rooms = Path(commands.__file__).parent
    files = [file for file in rooms.glob("*/*.py") if file.stem != "__init__"]
    assert {(file.parent.name, file.stem.replace("_", "-")) for file in files} == {
        (group.room, name) for group in GROUPS for name in group.help_lines
    }


@pytest.mark.parametrize("name", [name for group in GROUPS for name in group.help_lines])
def test_the_examples_in_a_commands_help_are_valid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser(name)
    for line in EXAMPLES[name]:
        words = shlex.split(line.removeprefix("source <(").partition("|")[0].partition("<")[0].removesuffix(")"))
        assert words[:2] == ["penstock", name]
        parser.parse_args(words[1:])
    with pytest.raises(SystemExit):
        parser.parse_args([name, "--help"])
    assert f"examples:\n  {EXAMPLES[name][0]}\n" in capsys.readouterr().out
