"""Measures the router's costs: requests/s, added latency, token fan-out and memory, compared with a plain grpc.aio
relay.

The router, or the relay, is one process on core 0. The null worker and the clients are two more processes and share
core 1, so wall-clock figures include the whole chain. Figures "a core" divide by the processor time of the router's
threads, and hold on a busy machine, too. Every figure alternates with its baseline in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from benchmarks.common.process_group import ROOT
from benchmarks.common.report import Row, publish, show
from benchmarks.common.shapes import BUNDLED
from benchmarks.common.timing import print_duration
from benchmarks.router.load import LoadOutcome, RouterLoad
from benchmarks.router.sglang import start_sglang_router
from benchmarks.router.tokenizing import tokenizing_rows
from penstock.config import AdmissionConfig, RouterConfig
from penstock.config.admission import TenantLimits
from penstock.config.security import SecurityConfig
from penstock.rpc.secret import ClusterSecret
from tests.support.plain_processes import Deployment

_ROUTER_CORE, _OTHER_CORE = 0, 1
_STREAMS = 256
_SIZES = (512, 4096, 16384)
_DYNAMO = {512: 1300.0, 4096: 300.0, 16384: 100.0}  # its frontend's requests/s on one such core; quoted, not run here
_QUOTED_HTTP = ("sglang-router, quoted", 0.3)  # used if it is not installed
_CHARACTERS_PER_TOKEN = 2.17  # measured for `make_text` with the bundled tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """An address to send a load to, and the process whose time counts."""

    name: str
    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """The outcome of a load, and the processor time that its target took."""

    outcome: LoadOutcome
    target_cpu_s: float

    @property
    def requests_a_core(self) -> float:
        return self.outcome.num_requests / self.target_cpu_s

    @property
    def tokens_a_core(self) -> float:
        return self.outcome.num_tokens / self.target_cpu_s


def run(target: Target, load: RouterLoad) -> MeasuredLoad:
    """Runs one load in its own process on the other core."""
    process = psutil.Process(target.pid)
    before = process.cpu_times()
    plan = asdict(replace(load, address=target.address, characters_per_token=_CHARACTERS_PER_TOKEN))
    command = _pinned(_OTHER_CORE, "benchmarks.router.peers", "load", json.dumps(plan))
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, check=True, timeout=300)
    after = process.cpu_times()
    target_cpu_s = after.user + after.system - before.user - before.system
    return MeasuredLoad(LoadOutcome(**json.loads(done.stdout)), target_cpu_s)


def request_rows(targets: Sequence[Target], num_clients: int, tokens: int, form: str, count: int) -> list[Row]:
    """Compares Penstock with the others: `targets` are the router, the relay and the null worker itself."""
    load = RouterLoad("", num_clients, count, tokens, form=form)
    rounds = [{target.name: run(target, replace(load, seed=seed)) for target in targets} for seed in range(2)]
    names = [target.name for target in targets]
    best = {name: min((found[name] for found in rounds), key=lambda load: load.outcome.p50_s) for name in names}
    router, relayed = best["penstock"], best["relay"]
    ours, relay, direct = router.outcome, relayed.outcome, best["direct"].outcome
    unit = "tokens of text" if form == "text" else "token ids"
    at = f"{tokens} {unit}, {num_clients} client{'s' if num_clients > 1 else ''}"
    rows = [
        Row(f"added p50, {at}", (ours.p50_s - direct.p50_s) * 1e3, "ms", "relay", (relay.p50_s - direct.p50_s) * 1e3),
        Row(f"added p99, {at}", (ours.p99_s - direct.p99_s) * 1e3, "ms", "relay", (relay.p99_s - direct.p99_s) * 1e3),
        Row(f"requests, {at}", ours.requests_per_s, "1/s", "relay", relay.requests_per_s),
        Row(f"requests a core, {at}", router.requests_a_core, "1/s", "relay", relayed.requests_a_core),
    ]
    if form == "text" and num_clients > 1:
        quoted = "Dynamo's frontend, quoted"
        rows.append(Row(f"requests, {at}", ours.requests_per_s, "1/s", quoted, _DYNAMO[tokens]))
    return rows


def fan_out_rows(targets: Sequence[Target], num_streams: int, tokens: int) -> list[Row]:
    load = RouterLoad("", num_streams, num_streams, 32, max_tokens=tokens, form="token_ids")
    rounds = [{target.name: run(target, load) for target in targets} for _ in range(3)]
    ours, relay = (
        max((found[name] for found in rounds), key=lambda load: load.tokens_a_core) for name in ("penstock", "relay")
    )
    at = f"{num_streams} streams"
    return [
        Row(f"token fan-out, {at}", ours.outcome.tokens_per_s, "tokens/s", "relay", relay.outcome.tokens_per_s),
        Row(f"token fan-out a core, {at}", ours.tokens_a_core, "tokens/s", "relay", relay.tokens_a_core),
        _lookaside_row(targets[0], replace(load, lookaside=True), ours),
        Row(f"messages to clients, {at}", ours.outcome.messages_per_s, "1/s", "relay", relay.outcome.messages_per_s),
    ]


def _lookaside_row(router: Target, load: RouterLoad, through: MeasuredLoad) -> Row:
    """Measures the tokens per second of the router's processor time when clients read them at the worker."""
    lookaside = max((run(router, load) for _ in range(3)), key=lambda measured: measured.tokens_a_core)
    metric = f"token fan-out a router core, lookaside, {load.num_clients} streams"
    return Row(metric, lookaside.tokens_a_core, "tokens/s", "through the router", through.tokens_a_core)


def http_rows(router: str, direct: str, sglang: str | None) -> list[Row]:
    """Compares the latency that the router's HTTP API adds with sglang-router's, if it runs; one client alternates
    between them.
    """
    rows = []
    for tokens in _SIZES:
        addresses = [direct, router, *([sglang] if sglang else [])]
        plan = {"addresses": addresses, "num_requests": 300, "num_characters": int(tokens * _CHARACTERS_PER_TOKEN)}
        command = _pinned(_OTHER_CORE, "benchmarks.router.peers", "http-load", json.dumps(plan))
        done = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, check=True, timeout=300)
        base_s, ours_s, *theirs_s = json.loads(done.stdout)
        name, theirs_ms = ("sglang-router", (theirs_s[0] - base_s) * 1e3) if theirs_s else _QUOTED_HTTP
        metric = f"added p50 over HTTP, {tokens} tokens of text, 1 client"
        rows.append(Row(metric, (ours_s - base_s) * 1e3, "ms", name, theirs_ms))
    return rows


def measure(deployment: Deployment, quick: bool, sglang_python: str | None, secrets: str) -> list[Row]:
    """Starts all processes and measures; `secrets` is a folder for the secret that signs tickets."""
    worker = _start("worker", {"num_streams": _STREAMS}, _OTHER_CORE)
    relay = _start("relay", {"upstream": worker.address}, _ROUTER_CORE)
    http_worker = _start("http-worker", {}, _OTHER_CORE)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        config = RouterConfig(
            model=str(BUNDLED),
            served_model="null",
            grpc_port=0,
            http_port=0,
            workers=(worker.address,),
            admission=AdmissionConfig(tenant=TenantLimits(max_unused_tickets=_STREAMS)),
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
        rows.append(Row("memory after the run", _memory_mb(targets[0]), "MB", "before", before))
        return rows
    finally:
        for target in (relay, worker, http_worker):
            psutil.Process(target.pid).terminate()
        for popen in processes:
            popen.terminate()


def _start(kind: str, settings: dict[str, object], core: int) -> Target:
    command = _pinned(core, "benchmarks.router.peers", kind, json.dumps(settings))
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="measure only the shortest prompts and write no result")
    parser.add_argument("--sglang-python", help="python of an environment that has sglang-router")
    given = parser.parse_args()
    quick = given.quick
    with print_duration():
        with Deployment() as deployment, tempfile.TemporaryDirectory() as secrets:
            rows = measure(deployment, quick, given.sglang_python, secrets)
        rows += asyncio.run(tokenizing_rows(BUNDLED))
        workload = "one router process on core 0; null worker and clients on core 1; prompts without a common prefix"
        show("router", workload, rows) if quick else publish("router", workload, rows)


if __name__ == "__main__":
    main()
