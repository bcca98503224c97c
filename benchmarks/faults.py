"""How soon a fault is noticed, how soon its victim is replaced, and what clients see of it all.

A Ray of several nodes on this machine, the bundled model. Noticed: the membership that routers follow no longer has
the victim (of a router: the status no longer calls it ready). Serving again: a successor is a member, having answered
its canary. Then streams run while one of the two decode workers is killed every few seconds, and each one's tokens are
compared with those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from benchmarks.report import Row, publish
from cluster.heartbeats import LOST_AFTER_S
from cluster.launch import RayDeployment, launch
from cluster.raylets import Raylets
from penstock import AsyncClient
from penstock.config import DecodeConfig, PoolConfig, ServeConfig
from penstock.errors import PenstockError
from penstock.v1 import admin_pb2, admin_pb2_grpc

MODEL = str(Path(__file__).resolve().parent.parent / "models" / "penstock-tiny")
PROMPT = "Once upon a time there was a careful boy named Paul. He lived in a small village. " * 3
WITHIN_S = 60.0
NUM_KINDS = 8  # different requests
MAX_TOKENS = 200
CONCURRENCY = 32
KILL_TARGET_S, FREEZE_TARGET_S, SERVING_TARGET_S = 0.5, 3.0, 5.0


@dataclass(frozen=True, slots=True)
class Fault:
    detected_s: float
    serving_s: float  # again, since the fault


class Watch:
    """Follows the status. What it waits for is looked at again with each change."""

    def __init__(self, deployment: RayDeployment) -> None:
        self._deployment = deployment

    def until(self, condition: Callable[[admin_pb2.StatusResponse], bool]) -> admin_pb2.StatusResponse:
        deadline_s = time.monotonic() + WITHIN_S
        version = -1
        while time.monotonic() < deadline_s:
            version, status, _ = self._deployment.wait(version, 1.0)
            if condition(status):
                return status
        raise TimeoutError(f"not within {WITHIN_S:g} s: {status}")

    def whole(self) -> admin_pb2.StatusResponse:
        return self.until(lambda status: status.ready and all(one.state == "ready" for one in status.workers))


def worker(status: admin_pb2.StatusResponse, name: str) -> admin_pb2.WorkerStatus:
    return next(one for one in status.workers if one.member.worker_id == name)


def measure(watch: Watch, name: str, strike: Callable[[psutil.Process], None]) -> Fault:
    victim = worker(watch.whole(), name)
    began_s = time.monotonic()
    strike(psutil.Process(victim.pid))
    watch.until(lambda status: worker(status, name).state != "ready")
    detected_s = time.monotonic() - began_s

    def is_replaced(status: admin_pb2.StatusResponse) -> bool:
        now = worker(status, name)
        return now.state == "ready" and now.pid != victim.pid

    watch.until(is_replaced)
    return Fault(detected_s, time.monotonic() - began_s)


def freeze_and_wake(watch: Watch, name: str, freeze_s: float) -> Fault:
    """One that wakes before it counts as lost: it is a member again, and nothing was started."""
    victim = worker(watch.whole(), name)
    began_s = time.monotonic()
    os.kill(victim.pid, signal.SIGSTOP)
    waking = threading.Timer(freeze_s, os.kill, (victim.pid, signal.SIGCONT))
    waking.start()
    watch.until(lambda status: worker(status, name).state != "ready")
    detected_s = time.monotonic() - began_s
    back = watch.until(lambda status: worker(status, name).state == "ready")
    if worker(back, name).pid != victim.pid:
        raise RuntimeError(f"{name} was replaced although it woke after {freeze_s:g} s")
    return Fault(detected_s, time.monotonic() - began_s)


def kill_controller(deployment: RayDeployment) -> float:
    """Seconds until its successor knows everything that runs."""
    port = int(deployment.admin_address.rpartition(":")[2])
    before = {one.pid for one in deployment.status().workers}
    for process in psutil.process_iter(["cmdline"]):
        if "ControllerActor" in " ".join(process.info["cmdline"] or []) and _listens(process, port):
            process.kill()
    began_s = time.monotonic()
    with grpc.insecure_channel(deployment.admin_address) as channel:
        token = (("authorization", f"Bearer {deployment.admin_token}"),)
        stub = admin_pb2_grpc.AdminStub(channel)
        status = stub.Status(admin_pb2.StatusRequest(), timeout=WITHIN_S, metadata=token, wait_for_ready=True)
    if {one.pid for one in status.workers} != before:
        raise RuntimeError("the successor did not take over what ran")
    return time.monotonic() - began_s


def _listens(process: psutil.Process, port: int) -> bool:
    return any(one.laddr and one.laddr.port == port for one in process.net_connections())


class Killer(threading.Thread):
    """Kills one of the decode workers every `interval_s`, while both are there."""

    def __init__(self, watch: Watch, interval_s: float) -> None:
        super().__init__(daemon=True)
        self._watch, self._interval_s = watch, interval_s
        self._over = threading.Event()
        self.num_kills = 0

    def run(self) -> None:
        rng = random.Random(7)
        while not self._over.wait(self._interval_s):
            name = f"decode-{rng.randrange(2)}"
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker(self._watch.whole(), name).pid, signal.SIGKILL)
                self.num_kills += 1

    def end(self) -> None:
        self._over.set()
        self.join()


async def run_streams(address: str, number: int) -> tuple[int, int]:
    """How many ended with the right tokens, and how many were taken to another worker on their way."""
    async with AsyncClient(address, timeout_s=120) as client:
        right = [await _stream(client, kind) for kind in range(NUM_KINDS)]
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(index: int) -> tuple[bool, bool]:
            async with gate:
                try:
                    tokens, redispatches = await _stream(client, index % NUM_KINDS)
                except PenstockError as error:
                    print(f"stream {index}: {error.message}")
                    return False, False
                return tokens == right[index % NUM_KINDS][0], redispatches > 0

        outcomes = await asyncio.gather(*(one(index) for index in range(number)))
    return sum(exact for exact, _ in outcomes), sum(moved for _, moved in outcomes)


async def _stream(client: AsyncClient, kind: int) -> tuple[list[int], int]:
    result = await client.complete(PROMPT, max_tokens=MAX_TOKENS, temperature=0.8, seed=kind, ignore_eos=True)
    return list(result.token_ids), result.timing.num_redispatches


@contextlib.contextmanager
def deployed() -> Iterator[tuple[Raylets, RayDeployment]]:
    with Raylets() as raylets:
        raylets.add({"prefill": 1, "decode": 1})
        for _ in range(2):
            raylets.add({"decode": 1})
        config = ServeConfig(
            model=MODEL,
            http_port=0,
            grpc_port=0,
            admin_port=0,
            address=raylets.address,
            prefill_pool=PoolConfig(replicas=1, num_cpus=0.1, resources={"prefill": 1}),
            decode_pool=PoolConfig(replicas=2, num_cpus=0.1, resources={"decode": 1}),
            decode=DecodeConfig(placement="remote"),
            engine={"kv_memory_bytes": 64 * 1024 * 1024},
        )
        with launch(config) as deployment:
            yield raylets, deployment


def faults(watch: Watch, deployment: RayDeployment, repeats: int) -> list[Row]:
    rows = []
    cases: tuple[tuple[str, str, Callable[[psutil.Process], None], float], ...] = (
        ("decode worker killed", "decode-0", lambda process: process.kill(), KILL_TARGET_S),
        ("prefill worker killed", "prefill-0", lambda process: process.kill(), KILL_TARGET_S),
        ("router killed", "router-0", lambda process: process.kill(), KILL_TARGET_S),
        ("decode worker frozen for good", "decode-1", lambda process: process.suspend(), FREEZE_TARGET_S),
        ("router frozen for good", "router-0", lambda process: process.suspend(), FREEZE_TARGET_S),
    )
    for what, name, strike, target_s in cases:
        found = [measure(watch, name, strike) for _ in range(repeats)]
        rows.append(Row(f"{what}: noticed", worst(found, "detected_s"), "s, worst", "target", target_s))
        serving = statistics.median(one.serving_s for one in found)
        patience_s = (
            LOST_AFTER_S if what == "router frozen for good" else 0.0
        )  # in which it may wake; workers get stand-ins
        rows.append(Row(f"{what}: serving again", serving, "s, median", "target", patience_s + SERVING_TARGET_S))
    found = [freeze_and_wake(watch, "decode-0", 3.0) for _ in range(repeats)]
    rows.append(Row("decode worker frozen for 3 s: noticed", worst(found, "detected_s"), "s, worst", "target", 3.0))
    rows.append(Row("the same: serving again", worst(found, "serving_s"), "s, worst"))
    controllers = [kill_controller(deployment) for _ in range(repeats)]
    rows.append(Row("controller killed: successor answers", max(controllers), "s, worst"))
    return rows


def worst(found: list[Fault], field: str) -> float:
    return max(float(getattr(one, field)) for one in found)


def node_killed(watch: Watch, raylets: Raylets) -> list[Row]:
    """One that does not hold the only place for a prefill worker; another has room for its decode worker."""
    workers = {one.member.worker_id: raylets.node_of(one.pid) for one in watch.whole().workers if one.member.epoch}
    node = next(one for one in workers.values() if one is not workers["prefill-0"])
    began_s = time.monotonic()
    raylets.kill(node)
    watch.until(lambda status: any(one.state != "ready" for one in status.workers))
    detected_s = time.monotonic() - began_s
    watch.whole()
    serving_s = time.monotonic() - began_s
    return [
        Row("node killed: noticed", detected_s, "s", "target", KILL_TARGET_S),
        Row("node killed: serving again", serving_s, "s", "target", SERVING_TARGET_S),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kill-every", type=float, default=10.0, metavar="SECONDS")
    arguments = parser.parse_args()
    with deployed() as (raylets, deployment):
        watch = Watch(deployment)
        rows = faults(watch, deployment, arguments.repeats)
        killer = Killer(watch, arguments.kill_every)
        watch.whole()
        killer.start()
        began_s = time.monotonic()
        exact, moved = asyncio.run(run_streams(deployment.grpc_address, arguments.streams))
        took_s = time.monotonic() - began_s
        killer.end()
        rows += node_killed(watch, raylets)
    rows += [
        Row("streams with the exact tokens", exact / arguments.streams, "share", "target", 0.999),
        Row("streams taken to another decode worker", moved, "streams"),
        Row("decode workers killed meanwhile", killer.num_kills, f"in {took_s:.0f} s"),
    ]
    each = f"one of two decode workers killed every {arguments.kill_every:g} s"
    publish("faults", f"bundled model on 4 Ray nodes; {arguments.streams} streams of {MAX_TOKENS} tokens, {each}", rows)


if __name__ == "__main__":
    main()
