"""How soon a worker comes to life: cold, from a warm spare, and as the successor of one that was killed or frozen.

A local Ray with the bundled model, once without spares and once with one for each pool, side by side in one run. Every
figure ends with a worker that is a member: it has answered its canary, eight tokens through the real path.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil

from benchmarks.report import Row, publish
from cluster.launch import RayDeployment, launch
from penstock.config import PoolConfig, ServeConfig
from penstock.v1 import admin_pb2, admin_pb2_grpc

MODEL = str(Path(__file__).resolve().parent.parent / "models" / "penstock-tiny")
WITHIN_S = 90.0
SERVING_TARGET_S, WARM_TARGET = 5.0, 1 / 20


@dataclass(slots=True)
class Found:
    """Seconds of each repeat."""

    ready: list[float] = field(default_factory=list)  # of the deployment: Ray, controller, workers, first request
    scaled: list[float] = field(default_factory=list)
    killed: list[float] = field(default_factory=list)
    frozen: list[float] = field(default_factory=list)
    spare_bytes: list[float] = field(default_factory=list)


def config(spares: int) -> ServeConfig:
    return ServeConfig(
        model=MODEL,
        http_port=0,
        grpc_port=0,
        admin_port=0,
        prefill_pool=PoolConfig(replicas=1, num_cpus=0.5),
        decode_pool=PoolConfig(replicas=2, num_cpus=0.5, spares=spares),
        engine={"kv_memory_bytes": 64 * 1024 * 1024},
    )


class Deployment:
    def __init__(self, running: RayDeployment, spares: int) -> None:
        self._running, self._spares = running, spares

    def until(self, condition: Callable[[admin_pb2.StatusResponse], bool]) -> admin_pb2.StatusResponse:
        version, deadline_s, status = -1, time.monotonic() + WITHIN_S, None
        while time.monotonic() < deadline_s:
            version, status, _ = self._running.wait(version, 1.0)
            if condition(status):
                return status
        raise TimeoutError(f"not within {WITHIN_S:g} s: {status}")

    def settled(self, replicas: int = 2) -> admin_pb2.StatusResponse:
        """Every worker ready, and as many spares warm as there should be."""

        def is_settled(status: admin_pb2.StatusResponse) -> bool:
            decode = [one.state for one in status.workers if one.member.role == "decode"]
            spares = [one.state for one in status.spares]
            return status.ready and decode == ["ready"] * replicas and spares == ["warm"] * self._spares

        return self.until(is_settled)

    def scale(self, replicas: int) -> None:
        with grpc.insecure_channel(self._running.admin_address) as channel:
            token = (("authorization", f"Bearer {self._running.admin_token}"),)
            request = admin_pb2.ScaleRequest(pool="decode", replicas=replicas, timeout_s=10.0)
            admin_pb2_grpc.AdminStub(channel).Scale(request, timeout=WITHIN_S, metadata=token)

    def scale_up(self) -> float:
        self.settled()
        began_s = time.monotonic()
        self.scale(3)
        self.until(lambda status: sum(_serves(one) for one in status.workers) == 3)
        took_s = time.monotonic() - began_s
        self.settled(3)
        self.scale(2)
        self.settled()
        return took_s

    def strike(self, number: signal.Signals) -> float:
        """From the blow until its successor is a member."""
        victim = next(one for one in self.settled().workers if one.member.worker_id == "decode-1")
        began_s = time.monotonic()
        os.kill(victim.pid, number)

        def is_replaced(status: admin_pb2.StatusResponse) -> bool:
            return any(
                one.member.worker_id == "decode-1" and one.state == "ready" and one.pid != victim.pid
                for one in status.workers
            )

        self.until(is_replaced)
        return time.monotonic() - began_s

    def spare_bytes(self) -> float:
        """What one spare takes of the machine's memory for itself."""
        return float(psutil.Process(self.settled().spares[0].pid).memory_full_info().uss)


def _serves(one: admin_pb2.WorkerStatus) -> bool:
    return one.member.role == "decode" and one.state == "ready"


def measure(spares: int, repeats: int, found: Found) -> None:
    began_s = time.monotonic()
    with launch(config(spares)) as running:
        found.ready.append(time.monotonic() - began_s)
        one = Deployment(running, spares)
        for _ in range(repeats):
            found.scaled.append(one.scale_up())
            found.killed.append(one.strike(signal.SIGKILL))
            found.frozen.append(one.strike(signal.SIGSTOP))
        if spares:
            found.spare_bytes.append(one.spare_bytes())


def rows(cold: Found, warm: Found) -> list[Row]:
    median = statistics.median
    to_token = [warm_s / cold_s for warm_s, cold_s in zip(warm.scaled, cold.scaled, strict=True)]
    return [
        Row("deployment ready, its first request answered", median(cold.ready), "s"),
        Row("worker asked for to first tokens, cold", median(cold.scaled), "s, median"),
        Row("the same from a spare", median(warm.scaled), "s, median", "cold", median(cold.scaled)),
        Row("spare / cold", median(to_token), "median of pairs", "target", WARM_TARGET),
        Row("killed to successor serving, cold", median(cold.killed), "s, median", "target", SERVING_TARGET_S),
        Row("killed to successor serving, spare", median(warm.killed), "s, median", "target", SERVING_TARGET_S),
        Row("frozen to successor serving, cold", median(cold.frozen), "s, median", "target", SERVING_TARGET_S),
        Row("frozen to successor serving, spare", median(warm.frozen), "s, median", "target", SERVING_TARGET_S),
        Row("frozen to successor serving, spare", max(warm.frozen), "s, worst", "target", SERVING_TARGET_S),
        Row("a spare's own memory", median(warm.spare_bytes) / 2**20, "MiB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="deployments of each kind, in turn")
    parser.add_argument("--repeats", type=int, default=2, help="in each deployment")
    arguments = parser.parse_args()
    cold, warm = Found(), Found()
    for _ in range(arguments.rounds):
        measure(0, arguments.repeats, cold)
        measure(1, arguments.repeats, warm)
    publish("startup", f"bundled model, local Ray, {arguments.rounds} x {arguments.repeats} of each", rows(cold, warm))


if __name__ == "__main__":
    main()
