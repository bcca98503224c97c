"""What the router costs: requests/s, added latency, token fan-out and memory, beside a plain grpc.aio relay.

The router, or the relay, is one process on core 0. The null worker and the clients are two more processes and share
core 1, so wall-clock figures are of the whole chain; figures "a core" divide by the processor time that the router
itself took, in all its threads, and hold on a busy machine too. Every figure is measured in the same run as its
baseline, turn by turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from benchmarks.report import Row, publish, show
from benchmarks.router_http import start_sglang_router
from benchmarks.router_load import Load
from benchmarks.tokenizing import tokenizing_rows
from cluster.processes import Deployment
from penstock.config import RouterConfig
from penstock.secret import ClusterSecret
from penstock.security_config import SecurityConfig

_ROOT = Path(__file__).resolve().parent.parent
_MODEL = _ROOT / "models" / "penstock-tiny"
_ROUTER_CORE, _OTHER_CORE = 0, 1
_STREAMS = 256
_SIZES = (512, 4096, 16384)
_DYNAMO = {512: 1300.0, 4096: 300.0, 16384: 100.0}  # its frontend's requests/s on one such core, quoted, not run here
_QUOTED_HTTP = ("sglang-router, quoted", 0.3)  # where it is not installed
_CHARACTERS_PER_TOKEN = 2.17  # of `make_text` with the bundled tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """Somebody to send a load to, and the process whose time counts."""

    name: str
    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class Outcome:
    requests_per_s: float
    p50_s: float
    p99_s: float
    tokens_per_s: float
    messages_per_s: float
    elapsed_s: float
    num_requests: int
    num_tokens: int
    target_cpu_s: float

    @property
    def requests_a_core(self) -> float:
        return self.num_requests / self.target_cpu_s

    @property
    def tokens_a_core(self) -> float:
        return self.num_tokens / self.target_cpu_s


def run(target: Target, load: Load) -> Outcome:
    """One load, in a process of its own on the other core."""
    process = psutil.Process(target.pid)
    before = process.cpu_times()
    plan = asdict(replace(load, address=target.address, characters_per_token=_CHARACTERS_PER_TOKEN))
    command = _pinned(_OTHER_CORE, "benchmarks.router_peers", "load", json.dumps(plan))
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=_ROOT, check=True, timeout=300)
    after = process.cpu_times()
    told = json.loads(done.stdout)
    told.pop("cpu_s")
    return Outcome(**told, target_cpu_s=after.user + after.system - before.user - before.system)


def request_rows(targets: Sequence[Target], num_clients: int, tokens: int, form: str, count: int) -> list[Row]:
    """Penstock's figures beside the others': `targets` are the router, the relay and the null worker itself."""
    load = Load("", num_clients, count, tokens, form=form)
    turns = [{one.name: run(one, replace(load, seed=seed)) for one in targets} for seed in range(2)]
    best = {one.name: min((turn[one.name] for turn in turns), key=lambda outcome: outcome.p50_s) for one in targets}
    ours, relay, direct = best["penstock"], best["relay"], best["direct"]
    what = "tokens of text" if form == "text" else "token ids"
    at = f"{tokens} {what}, {num_clients} client{'s' if num_clients > 1 else ''}"
    rows = [
        Row(f"added p50, {at}", (ours.p50_s - direct.p50_s) * 1e3, "ms", "relay", (relay.p50_s - direct.p50_s) * 1e3),
        Row(f"added p99, {at}", (ours.p99_s - direct.p99_s) * 1e3, "ms", "relay", (relay.p99_s - direct.p99_s) * 1e3),
        Row(f"requests, {at}", ours.requests_per_s, "1/s", "relay", relay.requests_per_s),
        Row(f"requests a core, {at}", ours.requests_a_core, "1/s", "relay", relay.requests_a_core),
    ]
    if form == "text" and num_clients > 1:
        quoted = "Dynamo's frontend, quoted"
        rows.append(Row(f"requests, {at}", ours.requests_per_s, "1/s", quoted, _DYNAMO[tokens]))
    return rows


def fan_out_rows(targets: Sequence[Target], num_streams: int, tokens: int) -> list[Row]:
    load = Load("", num_streams, num_streams, 32, max_tokens=tokens, form="token_ids")
    turns = [{one.name: run(one, load) for one in targets} for _ in range(3)]
    ours = max((turn["penstock"] for turn in turns), key=lambda one: one.tokens_a_core)
    relay = max((turn["relay"] for turn in turns), key=lambda one: one.tokens_a_core)
    at = f"{num_streams} streams"
    return [
        Row(f"token fan-out, {at}", ours.tokens_per_s, "tokens/s", "relay", relay.tokens_per_s),
        Row(f"token fan-out a core, {at}", ours.tokens_a_core, "tokens/s", "relay", relay.tokens_a_core),
        _lookaside_row(targets[0], replace(load, lookaside=True), ours),
        Row(f"messages to clients, {at}", ours.messages_per_s, "1/s", "relay", relay.messages_per_s),
    ]


def _lookaside_row(router: Target, load: Load, through: Outcome) -> Row:
    """Tokens that clients get for a second of the router's processor time, when they read them at the worker."""
    aside = max((run(router, load) for _ in range(3)), key=lambda one: one.tokens_a_core)
    what = f"token fan-out a router core, lookaside, {load.num_clients} streams"
    return Row(what, aside.tokens_a_core, "tokens/s", "through the router", through.tokens_a_core)


def http_rows(router: str, direct: str, sglang: str | None) -> list[Row]:
    """What the HTTP front adds, beside sglang-router where it runs; one client, turn by turn."""
    rows = []
    for tokens in _SIZES:
        addresses = [direct, router, *([sglang] if sglang else [])]
        plan = {"addresses": addresses, "num_requests": 300, "num_characters": int(tokens * _CHARACTERS_PER_TOKEN)}
        command = _pinned(_OTHER_CORE, "benchmarks.router_peers", "http-load", json.dumps(plan))
        done = subprocess.run(command, stdout=subprocess.PIPE, cwd=_ROOT, check=True, timeout=300)
        base_s, ours_s, *theirs_s = json.loads(done.stdout)
        name, theirs_ms = ("sglang-router", (theirs_s[0] - base_s) * 1e3) if theirs_s else _QUOTED_HTTP
        what = f"added p50 over HTTP, {tokens} tokens of text, 1 client"
        rows.append(Row(what, (ours_s - base_s) * 1e3, "ms", name, theirs_ms))
    return rows


def measure(deployment: Deployment, quick: bool, sglang_python: str | None, secrets: str) -> list[Row]:
    """`secrets` is a folder for what tickets are signed with."""
    worker = _start("worker", {"num_streams": _STREAMS}, _OTHER_CORE)
    relay = _start("relay", {"upstream": worker.address}, _ROUTER_CORE)
    http_worker = _start("http-worker", {}, _OTHER_CORE)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        config = RouterConfig(
            model=str(_MODEL),
            served_model="null",
            grpc_port=0,
            http_port=0,
            workers=(worker.address,),
            security=SecurityConfig(secret_file=_make_secret(secrets)),
        )
        router = deployment.start_router(config, cpu=_ROUTER_CORE)
        targets = [Target("penstock", router.address, int(str(router.ready["pid"]))), relay, worker]
        sglang = start_sglang_router(http_worker.address, _ROUTER_CORE, sglang_python)
        if sglang is not None:
            processes.append(sglang[0])
        before = _memory_mb(targets[0])
        rows = []
        for tokens in _SIZES[:1] if quick else _SIZES:
            count = {512: 300, 4096: 150, 16384: 75}[tokens]
            for form in ("text", "token_ids"):
                rows += request_rows(targets, 1, tokens, form, count)
                rows += request_rows(targets, 32, tokens, form, 3 * count)
        rows += fan_out_rows(targets[:2], _STREAMS, 100 if quick else 300)
        rows += http_rows(router.http, http_worker.address, sglang[1] if sglang else None)
        rows.append(Row("memory after all of it", _memory_mb(targets[0]), "MB", "before", before))
        return rows
    finally:
        for one in (relay, worker, http_worker):
            psutil.Process(one.pid).terminate()
        for popen in processes:
            popen.terminate()


def _start(kind: str, settings: dict[str, object], core: int) -> Target:
    command = _pinned(core, "benchmarks.router_peers", kind, json.dumps(settings))
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=_ROOT)
    assert popen.stdout is not None
    return Target("direct" if kind == "worker" else kind, json.loads(popen.stdout.readline())["address"], popen.pid)


def _make_secret(folder: str) -> str:
    path = Path(folder, "secret")
    path.touch(0o600)
    path.write_text(ClusterSecret.make().reveal())
    return str(path)


def _pinned(core: int, module: str, *arguments: str) -> list[str]:
    return ["taskset", "-c", str(core), sys.executable, "-m", module, *arguments]


def _memory_mb(target: Target) -> float:
    return float(psutil.Process(target.pid).memory_info().rss) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the shortest prompts only, nothing written")
    parser.add_argument("--sglang-python", help="python of an environment that has sglang-router")
    given = parser.parse_args()
    quick = given.quick
    started_s = time.perf_counter()
    with Deployment() as deployment, tempfile.TemporaryDirectory() as secrets:
        rows = measure(deployment, quick, given.sglang_python, secrets)
    rows += asyncio.run(tokenizing_rows(_MODEL))
    workload = "one router process on core 0; null worker and clients on core 1; prompts without a common prefix"
    show("router", workload, rows) if quick else publish("router", workload, rows)
    print(f"took {time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
