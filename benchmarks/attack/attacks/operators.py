"""Attacks on the ports behind the public ones: calls without a token, with a tenant's key, and garbage."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import grpc
import psutil

from benchmarks.attack.sockets import connection, http_request, is_closed
from benchmarks.attack.target import AttackTarget, call_code, channel
from benchmarks.attack.verdict import Breach
from penstock.v1 import admin_pb2, peer_pb2, worker_pb2

_REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED}
_WORKER_SERVICES = ("Worker", "PrefillWorker", "DecodeWorker", "PageHandover", "WorkerHost")


def _methods(file: object, services: tuple[str, ...]) -> list[str]:
    found = file.DESCRIPTOR.services_by_name  # type: ignore[attr-defined]
    return [f"/{found[name].full_name}/{method.name}" for name in services for method in found[name].methods]


async def _must_refuse(address: str, methods: list[str], keys: tuple[str, ...], what: str) -> None:
    async with channel(address) as made:
        for method in methods:
            for key in keys:
                code, details = await call_code(made, method, b"", key, timeout_s=10.0)
                if code not in _REFUSED:
                    raise Breach(f"{what} answered {method} {code.name}: {details[:100]}")


async def calls_to_workers(target: AttackTarget) -> None:
    """Calls every method of the workers without a token, with a tenant's key and with a made-up one."""
    methods = _methods(worker_pb2, _WORKER_SERVICES)
    for each in (await target.status()).workers:
        if each.member.role in ("prefill", "decode"):
            keys = ("", target.key, "0" * 64)
            await _must_refuse(each.member.address, methods, keys, each.member.worker_id)


async def calls_to_the_controller(target: AttackTarget) -> None:
    """Calls every method of the Admin service, such as Stop, without a token and with a tenant's key."""
    keys = ("", target.key, target.credentials.metrics_token)
    await _must_refuse(target.admin, _methods(admin_pb2, ("Admin",)), keys, "the Admin service")


async def calls_to_router_peers(target: AttackTarget) -> None:
    """Calls the services for peers at each port of the router with a tenant's key."""
    methods = _methods(peer_pb2, ("RouterPeer",)) + _methods(worker_pb2, ("Worker",))
    pids = await target.pids()
    for address in target.listening(pids["router-0"]):
        if address != target.http:
            async with channel(address) as made:
                for method in methods:
                    code, details = await call_code(made, method, b"", target.key, timeout_s=3.0)
                    if code is grpc.StatusCode.OK:
                        raise Breach(f"{address} of the router answered {method}: {details}")


async def metrics_without_a_token(target: AttackTarget) -> None:
    """Reads the metrics of all tenants without a token, with a tenant's key and with a wrong one."""
    for key in ("", target.key, "x" * 64, "Bearer " * 100):
        head = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n".encode()
        for each in (head, b"GET /metrics HTTP/1.1\r\nHost: x\r\n"):
            status, answer = await http_request(target.http, each)
            if status not in (401, 403) or b"penstock:" in answer:
                raise Breach(f"the metrics were answered {status}")


async def models_without_a_key(target: AttackTarget) -> None:
    """Generates, tokenizes and lists models without a key and with unknown ones."""
    for method in ("Generate", "Route", "Tokenize", "ListModels"):
        path = f"/penstock.v1.Inference/{method}"
        async with channel(target.grpc) as made:
            for key in ("", "psk-" + "A" * 43, "x" * 5000):
                code, details = await call_code(made, path, b"", key, streams=method == "Generate")
                if code is not grpc.StatusCode.UNAUTHENTICATED:
                    raise Breach(f"{method} with a wrong key was answered {code.name}: {details}")


_BOMBS = (
    b"\xff" * 4096,
    struct.pack("<I", 0xFFFFFFFF) + b"x" * 1000,
    struct.pack("<I", 60_000) + b"\x91" * 60_000,  # msgpack: arrays in arrays
    struct.pack("<I", 60_000) + b"\xdd\xff\xff\xff\xff" + b"\xc0" * 59_995,  # an array of 4 billion
    struct.pack("<I", 5) + b"\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
    struct.pack("<I", 60_000) + b"\x81" * 60_000,  # maps as keys of maps
    struct.pack("<I", 10) + b"\x91\xc4\x20" + b"\0" * 7,  # truncated bytes
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 10_000,
    b"GET / HTTP/1.1\r\n\r\n",
    b"",
)


async def garbage_to_inner_ports(target: AttackTarget) -> None:
    """Sends noise and msgpack bombs to every port that any process of the deployment listens on, Ray's among them."""
    addresses = {address for each in (await target.pids()).values() for address in target.listening(each)}
    addresses.add(target.admin)
    addresses -= {target.http, target.grpc}
    for address in sorted(addresses):
        for bomb in _BOMBS:
            with contextlib.suppress(OSError):
                async with connection(address) as (reader, writer):
                    writer.write(bomb)
                    if bomb:
                        writer.write_eof()
                    await is_closed(reader, 0.2)


async def silent_peers_at_inner_ports(target: AttackTarget) -> None:
    """Holds 300 silent connections to each inner port of the decode worker; a transfer must still succeed."""
    pids = await target.pids()
    opened: list[asyncio.StreamWriter] = []
    try:
        for address in target.listening(pids["decode-0"]):
            for _ in range(300):
                with contextlib.suppress(OSError, TimeoutError):
                    _, writer = await asyncio.open_connection(*address.rsplit(":", 1))
                    opened.append(writer)
        await asyncio.sleep(2.0)
        from benchmarks.attack.attacks.messages import GENERATE
        from penstock.v1 import inference_pb2

        prompt = "".join(f"{rank} apples. " for rank in range(200))
        request = inference_pb2.GenerateRequest(text=prompt, sampling={"max_tokens": 4})
        async with channel(target.grpc) as made:
            key = target.credentials.victim_key
            code, details = await call_code(made, GENERATE, request.SerializeToString(), key, timeout_s=20.0)
        if code is not grpc.StatusCode.OK:
            raise Breach(f"a prompt for a prefill worker was answered {code.name}: {details}")
    finally:
        for writer in opened:
            writer.transport.abort()


_RAY_METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/GetSystemConfig",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)


async def calls_to_ray(target: AttackTarget) -> None:
    """Calls every gRPC port of Ray, which runs code for callers that it trusts, without its token."""
    for process in target.processes():
        with contextlib.suppress(psutil.Error):
            if process.name() not in ("gcs_server", "raylet") and "ray::" not in " ".join(process.cmdline()):
                continue
            for address in target.listening(process.pid):
                async with channel(address) as made:
                    for method in _RAY_METHODS:
                        code, _ = await call_code(made, method, b"", timeout_s=3.0, streams=False)
                        if code is grpc.StatusCode.OK:
                            raise Breach(f"{process.name()} at {address} answers {method} without a token")


async def ports_beyond_loopback(target: AttackTarget) -> None:
    """Looks for ports on other interfaces than loopback, of which this deployment has none."""
    found: dict[str, int] = {}
    for process in target.processes():
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN and not each.laddr.ip.removeprefix("::ffff:").startswith("127."):
                    found[process.name()] = found.get(process.name(), 0) + 1
    if found:
        listed = ", ".join(f"{count} of {name}" for name, count in sorted(found.items()))
        raise Breach(f"ports that other machines reach: {listed}")


ATTACKS = (
    models_without_a_key,
    metrics_without_a_token,
    calls_to_workers,
    calls_to_the_controller,
    calls_to_router_peers,
    garbage_to_inner_ports,
    silent_peers_at_inner_ports,
    calls_to_ray,
    ports_beyond_loopback,
)
