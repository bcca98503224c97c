"""Measures how soon a fault is noticed, how soon its victim is replaced, and how both affect clients.

The bundled model runs on a Ray of several nodes on this machine. A fault is noticed when the membership that routers
follow no longer lists the victim (for a router: when the status no longer reports it as ready). The victim is replaced
when a successor has answered its canary and is a member. Then streams run while one of the two decode workers is killed
every few seconds, and the tokens of each stream are compared with those of an undisturbed run.
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

import grpc
import psutil

from benchmarks.cluster.status_follower import WITHIN_S, StatusFollower, admin_metadata, worker
from benchmarks.common.report import Row, publish
from benchmarks.common.shapes import BUNDLED
from cluster.health.silence_policy import LOST_AFTER_S
from cluster.ray.launch import RayDeployment, launch
from penstock import AsyncClient
from penstock.config import DecodeConfig, PoolConfig, ServeConfig
from penstock.errors import PenstockError
from penstock.v1 import admin_pb2, admin_pb2_grpc
from tests.support.ray_nodes import LocalRayNodes

PROMPT = "Once upon a time there was a careful boy named Paul. He lived in a small village. " * 3
NUM_PROMPT_SEEDS = 8  # different requests
MAX_TOKENS = 200
CONCURRENCY = 32
KILL_TARGET_S, FREEZE_TARGET_S, SERVING_TARGET_S = 0.5, 3.0, 5.0


@dataclass(frozen=True, slots=True)
class FaultTimes:
    """Seconds since the fault."""

    detected_s: float
    serving_s: float  # time until the worker, or its successor, serves again


def measure(follower: StatusFollower, name: str, strike: Callable[[psutil.Process], None]) -> FaultTimes:
    victim = worker(follower.until_all_ready(), name)
    began_s = time.monotonic()
    strike(psutil.Process(victim.pid))
    follower.until(lambda status: worker(status, name).state != "ready")
    detected_s = time.monotonic() - began_s
    follower.until_replaced(name, victim.pid)
    return FaultTimes(detected_s, time.monotonic() - began_s)


def freeze_and_wake(follower: StatusFollower, name: str, freeze_s: float) -> FaultTimes:
    """Freezes a worker that wakes before it counts as lost, and checks that it is a member again, not replaced."""
    victim = worker(follower.until_all_ready(), name)
    began_s = time.monotonic()
    os.kill(victim.pid, signal.SIGSTOP)
    waking = threading.Timer(freeze_s, os.kill, (victim.pid, signal.SIGCONT))
    waking.start()
    follower.until(lambda status: worker(status, name).state != "ready")
    detected_s = time.monotonic() - began_s
    back = follower.until(lambda status: worker(status, name).state == "ready")
    if worker(back, name).pid != victim.pid:
        raise RuntimeError(f"{name} was replaced although it woke after {freeze_s:g} s")
    return FaultTimes(detected_s, time.monotonic() - began_s)


def kill_controller(deployment: RayDeployment) -> float:
    """Kills the controller and returns the seconds until its successor knows all running workers."""
    port = int(deployment.admin_address.rpartition(":")[2])
    before = {each.pid for each in deployment.status().workers}
    for process in psutil.process_iter(["cmdline"]):
        if "ControllerActor" in " ".join(process.info["cmdline"] or []) and _listens(process, port):
            process.kill()
    began_s = time.monotonic()
    with grpc.insecure_channel(deployment.admin_address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        status = stub.Status(
            admin_pb2.StatusRequest(), timeout=WITHIN_S, metadata=admin_metadata(deployment), wait_for_ready=True
        )
    if {each.pid for each in status.workers} != before:
        raise RuntimeError("the new controller does not know all running workers")
    return time.monotonic() - began_s


def _listens(process: psutil.Process, port: int) -> bool:
    return any(each.laddr and each.laddr.port == port for each in process.net_connections())


class Killer(threading.Thread):
    """Kills one of the two decode workers every `interval_s` seconds, as soon as both are ready."""

    def __init__(self, follower: StatusFollower, interval_s: float) -> None:
        super().__init__(daemon=True)
        self._follower, self._interval_s = follower, interval_s
        self._over = threading.Event()
        self.num_kills = 0

    def run(self) -> None:
        rng = random.Random(7)
        while not self._over.wait(self._interval_s):
            name = f"decode-{rng.randrange(2)}"
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker(self._follower.until_all_ready(), name).pid, signal.SIGKILL)
                self.num_kills += 1

    def end(self) -> None:
        self._over.set()
        self.join()


async def run_streams(address: str, number: int) -> tuple[int, int]:
    """Runs `number` streams; returns how many had the right tokens, and how many were re-dispatched."""
    async with AsyncClient(address, timeout_s=120) as client:
        expected = [await _stream(client, seed) for seed in range(NUM_PROMPT_SEEDS)]
        limit = asyncio.Semaphore(CONCURRENCY)

        async def run_stream(index: int) -> tuple[bool, bool]:
            async with limit:
                try:
                    tokens, redispatches = await _stream(client, index % NUM_PROMPT_SEEDS)
                except PenstockError as error:
                    print(f"stream {index}: {error.message}")
                    return False, False
                return tokens == expected[index % NUM_PROMPT_SEEDS][0], redispatches > 0

        outcomes = await asyncio.gather(*(run_stream(index) for index in range(number)))
    return sum(exact for exact, _ in outcomes), sum(moved for _, moved in outcomes)


async def _stream(client: AsyncClient, seed: int) -> tuple[list[int], int]:
    result = await client.complete(PROMPT, max_tokens=MAX_TOKENS, temperature=0.8, seed=seed, ignore_eos=True)
    return list(result.token_ids), result.timing.num_redispatches


@contextlib.contextmanager
def deployed() -> Iterator[tuple[LocalRayNodes, RayDeployment]]:
    with LocalRayNodes() as ray_nodes:
        ray_nodes.add({"prefill": 1, "decode": 1})
        for _ in range(2):
            ray_nodes.add({"decode": 1})
        config = ServeConfig(
            model=str(BUNDLED),
            http_port=0,
            grpc_port=0,
            admin_port=0,
            address=ray_nodes.address,
            security=ray_nodes.security,
            prefill_pool=PoolConfig(replicas=1, num_cpus=0.1, resources={"prefill": 1}),
            decode_pool=PoolConfig(replicas=2, num_cpus=0.1, resources={"decode": 1}),
            decode=DecodeConfig(placement="remote"),
            engine={"kv_memory_bytes": 64 * 1024 * 1024},
        )
        with launch(config) as deployment:
            yield ray_nodes, deployment


def faults(follower: StatusFollower, deployment: RayDeployment, repeats: int) -> list[Row]:
    rows = []
    cases: tuple[tuple[str, str, Callable[[psutil.Process], None], float], ...] = (
        ("decode worker killed", "decode-0", lambda process: process.kill(), KILL_TARGET_S),
        ("prefill worker killed", "prefill-0", lambda process: process.kill(), KILL_TARGET_S),
        ("router killed", "router-0", lambda process: process.kill(), KILL_TARGET_S),
        ("decode worker frozen for good", "decode-1", lambda process: process.suspend(), FREEZE_TARGET_S),
        ("router frozen for good", "router-0", lambda process: process.suspend(), FREEZE_TARGET_S),
    )
    for fault, name, strike, target_s in cases:
        found = [measure(follower, name, strike) for _ in range(repeats)]
        rows.append(Row(f"{fault}: noticed", worst(found, "detected_s"), "s, worst", "target", target_s))
        serving = statistics.median(each.serving_s for each in found)
        # A frozen router may wake until it counts as lost; a frozen worker is replaced by a spare at once.
        patience_s = LOST_AFTER_S if fault == "router frozen for good" else 0.0
        rows.append(Row(f"{fault}: serving again", serving, "s, median", "target", patience_s + SERVING_TARGET_S))
    found = [freeze_and_wake(follower, "decode-0", 3.0) for _ in range(repeats)]
    rows.append(Row("decode worker frozen for 3 s: noticed", worst(found, "detected_s"), "s, worst", "target", 3.0))
    rows.append(Row("the same: serving again", worst(found, "serving_s"), "s, worst"))
    controllers = [kill_controller(deployment) for _ in range(repeats)]
    rows.append(Row("controller killed: successor answers", max(controllers), "s, worst"))
    return rows


def worst(found: list[FaultTimes], field: str) -> float:
    return max(float(getattr(each, field)) for each in found)


def node_killed(follower: StatusFollower, ray_nodes: LocalRayNodes) -> list[Row]:
    """Kills a node without the prefill worker; another node has room for its decode worker."""
    workers = {
        each.member.worker_id: ray_nodes.node_of(each.pid)
        for each in follower.until_all_ready().workers
        if each.member.epoch
    }
    node = next(each for each in workers.values() if each is not workers["prefill-0"])
    began_s = time.monotonic()
    ray_nodes.kill(node)
    follower.until(lambda status: any(each.state != "ready" for each in status.workers))
    detected_s = time.monotonic() - began_s
    follower.until_all_ready()
    serving_s = time.monotonic() - began_s
    return [
        Row("node killed: noticed", detected_s, "s", "target", KILL_TARGET_S),
        Row("node killed: serving again", serving_s, "s", "target", SERVING_TARGET_S),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.faults", description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kill-every", type=float, default=10.0, metavar="SECONDS")
    arguments = parser.parse_args()
    with deployed() as (ray_nodes, deployment):
        follower = StatusFollower(deployment)
        rows = faults(follower, deployment, arguments.repeats)
        killer = Killer(follower, arguments.kill_every)
        follower.until_all_ready()
        killer.start()
        began_s = time.monotonic()
        exact, moved = asyncio.run(run_streams(deployment.grpc_address, arguments.streams))
        took_s = time.monotonic() - began_s
        killer.end()
        rows += node_killed(follower, ray_nodes)
    rows += [
        Row("streams with the exact tokens", exact / arguments.streams, "share", "target", 0.999),
        Row("streams moved to another decode worker", moved, "streams"),
        Row("decode workers killed meanwhile", killer.num_kills, f"in {took_s:.0f} s"),
    ]
    each = f"one of two decode workers killed every {arguments.kill_every:g} s"
    publish("faults", f"bundled model on 4 Ray nodes; {arguments.streams} streams of {MAX_TOKENS} tokens, {each}", rows)


if __name__ == "__main__":
    main()
