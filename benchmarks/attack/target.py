"""Runs the deployment under attack: `penstock serve` with the bundled model, two tenants, lookaside and a known secret.

`attacker` has quotas like those of a stranger who pays for access; `victim` has none. The harness, which knows the
cluster secret, looks at processes and reports; attacks use only keys that a stranger could have.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from benchmarks.attack.sockets import OWN, http_request
from benchmarks.attack.verdict import Window
from benchmarks.common.process_group import ROOT, PipedProcess, ProcessGroup
from benchmarks.common.shapes import BUNDLED
from penstock.rpc.secret import ADMIN, ClusterSecret, digest_of, make_api_key
from penstock.v1 import admin_pb2, admin_pb2_grpc

START_TIMEOUT_S = 180.0
BODY_TIMEOUT_S = 4.0
HEADER_TIMEOUT_S = 4.0
READ_GRACE_S = 4.0  # time after the deadline for clients that still read
WRITE_STALL_S = 4.0
MAX_CONNECTIONS = 1024  # connections of one peer to the HTTP port
DEFAULT_TIMEOUT_S = 6.0  # deadline of calls that name none
MAX_REQUESTS = 24  # concurrent requests of the attacker
_SETTLE_S = 15.0
_STATUS_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secrets of one deployment."""

    victim_key: str
    attacker_key: str
    metrics_token: str
    cluster: ClusterSecret


class _Serve(PipedProcess):
    """`penstock serve`, which ends on SIGINT instead of with its input."""

    _ask_to_end = ProcessGroup._ask_to_end


class AttackTarget:
    """A running deployment as an attacker and the harness see it."""

    def __init__(self, serve: _Serve | None, addresses: Mapping[str, str], credentials: Credentials) -> None:
        self._serve = serve
        self.grpc, self.http, self.admin = addresses["grpc"], addresses["http"], addresses["admin"]
        self.credentials = credentials
        self.key = credentials.attacker_key

    @property
    def serve_pid(self) -> int:
        assert self._serve is not None
        return self._serve._popen.pid

    async def status(self) -> admin_pb2.StatusResponse:
        metadata = (("authorization", f"Bearer {self.credentials.cluster.token(ADMIN)}"),)
        async with grpc.aio.insecure_channel(self.admin, options=[("grpc.use_local_subchannel_pool", 1)]) as made:
            stub = admin_pb2_grpc.AdminStub(made)
            return await stub.Status(
                admin_pb2.StatusRequest(), timeout=_STATUS_TIMEOUT_S, metadata=metadata, wait_for_ready=True
            )

    async def pids(self) -> dict[str, int]:
        """Returns the process of each worker and router by name."""
        return {each.member.worker_id: each.pid for each in (await self.status()).workers}

    async def metrics(self) -> str:
        head = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.credentials.metrics_token}\r\n"
        status, answer = await http_request(self.http, head.encode(), peer=OWN)
        if status != 200:
            raise RuntimeError(f"/metrics answered {status}: {answer[:300]!r}")
        return answer.decode()

    async def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels."""
        found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", await self.metrics(), re.MULTILINE)
        return sum(map(float, found))

    async def open_requests(self) -> int:
        """Returns how many requests the decode workers hold, in any state."""
        return sum(each.load.num_open for each in (await self.status()).workers if each.member.role == "decode")

    async def describe_held(self) -> str:
        """Describes the requests that are held, including the victims' streams."""
        return f"workers hold {await self.open_requests():g} requests and the router has {await self.metric(OUT):g} out"

    async def wait_until_idle(self, at_most: int, within_s: float = _SETTLE_S) -> bool:
        """Returns whether the decode workers and the router hold at most that many requests within the time."""

        async def is_idle() -> bool:
            return await self.open_requests() <= at_most and await self.metric(OUT) <= at_most

        return await becomes(is_idle, within_s)

    def processes(self) -> list[psutil.Process]:
        """Returns `penstock serve` and all its descendants."""
        serve = psutil.Process(self.serve_pid)
        return [serve, *serve.children(recursive=True)]

    async def num_connections(self, host: str) -> int:
        """Returns how many connections from an address the routers hold."""
        pids = [pid for name, pid in (await self.pids()).items() if name.startswith("router")]
        found = [each for pid in pids for each in psutil.Process(pid).net_connections("tcp")]
        return sum(bool(each.raddr) and each.raddr.ip == host for each in found)

    def listening(self, pid: int) -> list[str]:
        """Returns the addresses at which a process can be reached from this machine."""
        ports = {
            each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN
        }
        return [f"127.0.0.1:{port}" for port in sorted(ports)]


OUT = "penstock:admission_requests_out"


async def becomes(condition: Callable[[], Awaitable[bool]], within_s: float) -> bool:
    """Returns whether the condition holds within the time. A deployment that does not answer is asked again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError, OSError, RuntimeError):
                    if await condition():
                        return True
                await asyncio.sleep(0.25)  # there is no event to wait for
    return False


class WitnessProcess(PipedProcess):
    """The witness's process."""

    async def window(self) -> Window:
        """Returns the witness's observations since the last call."""
        self.write_line("window")
        raw = json.loads(await asyncio.to_thread(self.read_line, 90.0))
        return Window(**{**raw, "failures": tuple(raw["failures"])})

    def processes(self) -> list[psutil.Process]:
        """Returns the witness and the idle server that it probes too."""
        witness = psutil.Process(self._popen.pid)
        return [witness, *witness.children()]


@contextlib.contextmanager
def attacked_deployment(changes: Mapping[str, Any] | None = None) -> Iterator[AttackTarget]:
    """Starts the deployment; `changes` replace whole tables of its configuration."""
    with tempfile.TemporaryDirectory(prefix="penstock-attack-") as folder:
        secret = ClusterSecret.make()
        credentials = Credentials(make_api_key(), make_api_key(), make_api_key(), secret)
        config = serve_config(Path(folder), credentials) | dict(changes or {})
        path = Path(folder, "serve.json")
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "cluster.cli", "serve", "--config", str(path)]
        with _Serve(command, {**os.environ, "PYTHONPATH": str(ROOT)}) as serve:
            yield AttackTarget(serve, _read_addresses(serve), credentials)


def serve_config(folder: Path, credentials: Credentials) -> dict[str, Any]:
    """Returns the configuration, and writes the secrets that it names into the folder."""
    return {
        "model": str(BUNDLED),
        "http_port": 0,
        "grpc_port": 0,
        "admin_port": 0,
        "routers": 1,  # its metrics and memory are read
        "lookaside": True,
        "prefill_pool": {"replicas": 1, "num_cpus": 0.1},
        "decode_pool": {"replicas": 1, "num_cpus": 0.1},
        "engine": {"kv_memory_bytes": 128 << 20, "num_threads": 1},
        "security": {"secret_file": _private(folder / "secret", credentials.cluster.reveal())},
        "tenants": {
            "victim": {"keys": [digest_of(credentials.victim_key)], "weight": 4.0},
            "attacker": {
                "keys": [digest_of(credentials.attacker_key)],
                "max_lane": "bulk",
                "lane": "bulk",
                "max_requests": MAX_REQUESTS,
                "max_inflight_tokens": 32768,
            },
        },
        "router": {
            "metrics_token_file": _private(folder / "metrics", credentials.metrics_token),
            "default_timeout_s": DEFAULT_TIMEOUT_S,
            "limits": {
                "body_timeout_s": BODY_TIMEOUT_S,
                "header_timeout_s": HEADER_TIMEOUT_S,
                "read_grace_s": READ_GRACE_S,
                "write_stall_s": WRITE_STALL_S,
                "connections_per_peer": MAX_CONNECTIONS,
            },
        },
    }


def _private(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


def _read_addresses(serve: _Serve) -> dict[str, str]:
    """Reads what `penstock serve` prints when it is ready."""
    found: dict[str, str] = {}
    while (line := serve.read_line(START_TIMEOUT_S)) != "Ctrl-C stops it.":
        match = re.match(r"\s*(HTTP|gRPC|admin)\s+(?:http://)?([\w.\[\]:]+:\d+)", line)
        if match:
            found[match[1].lower()] = match[2]
    return found


@contextlib.contextmanager
def started_witness(target: AttackTarget) -> Iterator[WitnessProcess]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PENSTOCK_API_KEY": target.credentials.victim_key}
    command = [sys.executable, "-m", "benchmarks.attack.witness", target.grpc]
    with WitnessProcess(command, environment) as witness:
        witness.read_line(START_TIMEOUT_S)
        yield witness


@contextlib.asynccontextmanager
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Opens a gRPC channel without limits of its own."""
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=[*unlimited, ("grpc.use_local_subchannel_pool", 1)]) as made:
        yield made


async def call_code(
    made: grpc.aio.Channel, method: str, message: bytes, key: str = "", timeout_s: float = 60.0, *, streams: bool = True
) -> tuple[grpc.StatusCode, str]:
    """Makes a call of any bytes and returns its status and details."""
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    try:
        if streams:
            call = made.unary_stream(method, request_serializer=bytes, response_deserializer=bytes)
            async for _ in call(message, timeout=timeout_s, metadata=metadata):
                pass
        else:
            await made.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)(
                message, timeout=timeout_s, metadata=metadata
            )
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""
