"""Measures how soon a worker serves: cold, from a warm spare, and as the successor of a killed or frozen one.

A local Ray serves the bundled model, alternately without spares and with one for each pool. Every figure ends when the
worker is a member, that is, has answered its canary of eight tokens through the real path.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from dataclasses import dataclass, field

import grpc
import psutil

from benchmarks.cluster.status_follower import WITHIN_S, StatusFollower, admin_metadata, worker
from benchmarks.common.report import Row, publish
from benchmarks.common.shapes import BUNDLED
from benchmarks.common.timing import Stopwatch
from cluster.ray.launch import RayDeployment, launch
from penstock.config import PoolConfig, ServeConfig
from penstock.v1 import admin_pb2, admin_pb2_grpc

SERVING_TARGET_S, WARM_TARGET = 5.0, 1 / 20


@dataclass(slots=True)
class StartTimes:
    """The seconds of each repeat."""

    ready: list[float] = field(default_factory=list)  # start of the deployment: Ray, controller, workers, first request
    scaled: list[float] = field(default_factory=list)
    killed: list[float] = field(default_factory=list)
    frozen: list[float] = field(default_factory=list)
    spare_bytes: list[float] = field(default_factory=list)


def config(spares: int) -> ServeConfig:
    return ServeConfig(
        model=str(BUNDLED),
        http_port=0,
        grpc_port=0,
        admin_port=0,
        prefill_pool=PoolConfig(replicas=1, num_cpus=0.5),
        decode_pool=PoolConfig(replicas=2, num_cpus=0.5, spares=spares),
        engine={"kv_memory_bytes": 64 * 1024 * 1024},
    )


class MeasuredDeployment:
    """A running deployment whose decode workers are scaled up, killed and frozen."""

    def __init__(self, running: RayDeployment, spares: int) -> None:
        self._running, self._spares = running, spares
        self._follower = StatusFollower(running)

    def settled(self, replicas: int = 2) -> admin_pb2.StatusResponse:
        """Waits until every worker is ready and every spare is warm."""

        def is_settled(status: admin_pb2.StatusResponse) -> bool:
            decode = [each.state for each in status.workers if each.member.role == "decode"]
            spares = [each.state for each in status.spares]
            return status.ready and decode == ["ready"] * replicas and spares == ["warm"] * self._spares

        return self._follower.until(is_settled)

    def scale(self, replicas: int) -> None:
        with grpc.insecure_channel(self._running.admin_address) as channel:
            request = admin_pb2.ScaleRequest(pool="decode", replicas=replicas, timeout_s=10.0)
            admin_pb2_grpc.AdminStub(channel).Scale(request, timeout=WITHIN_S, metadata=admin_metadata(self._running))

    def scale_up(self) -> float:
        """Returns the seconds from asking for a third decode worker until it serves, and scales down again."""
        self.settled()
        with Stopwatch() as watch:
            self.scale(3)
            self._follower.until(lambda status: sum(map(_serves, status.workers)) == 3)
        self.settled(3)
        self.scale(2)
        self.settled()
        return watch.seconds

    def strike(self, number: signal.Signals) -> float:
        """Sends decode-1 a signal and returns the seconds until its successor is a member."""
        victim = worker(self.settled(), "decode-1")
        with Stopwatch() as watch:
            os.kill(victim.pid, number)
            self._follower.until_replaced("decode-1", victim.pid)
        return watch.seconds

    def spare_bytes(self) -> float:
        """Returns the memory that one spare shares with no other process."""
        return float(psutil.Process(self.settled().spares[0].pid).memory_full_info().uss)


def _serves(status: admin_pb2.WorkerStatus) -> bool:
    return status.member.role == "decode" and status.state == "ready"


def measure(spares: int, repeats: int, found: StartTimes) -> None:
    began_s = time.monotonic()
    with launch(config(spares)) as running:
        found.ready.append(time.monotonic() - began_s)
        deployment = MeasuredDeployment(running, spares)
        for _ in range(repeats):
            found.scaled.append(deployment.scale_up())
            found.killed.append(deployment.strike(signal.SIGKILL))
            found.frozen.append(deployment.strike(signal.SIGSTOP))
        if spares:
            found.spare_bytes.append(deployment.spare_bytes())


def rows(cold: StartTimes, warm: StartTimes) -> list[Row]:
    median = statistics.median
    ratios = [warm_s / cold_s for warm_s, cold_s in zip(warm.scaled, cold.scaled, strict=True)]
    return [
        Row("deployment ready, its first request answered", median(cold.ready), "s"),
        Row("worker asked for to first tokens, cold", median(cold.scaled), "s, median"),
        Row("the same from a spare", median(warm.scaled), "s, median", "cold", median(cold.scaled)),
        Row("spare / cold", median(ratios), "median of pairs", "target", WARM_TARGET),
        Row("killed to successor serving, cold", median(cold.killed), "s, median", "target", SERVING_TARGET_S),
        Row("killed to successor serving, spare", median(warm.killed), "s, median", "target", SERVING_TARGET_S),
        Row("frozen to successor serving, cold", median(cold.frozen), "s, median", "target", SERVING_TARGET_S),
        Row("frozen to successor serving, spare", median(warm.frozen), "s, median", "target", SERVING_TARGET_S),
        Row("frozen to successor serving, spare", max(warm.frozen), "s, worst", "target", SERVING_TARGET_S),
        Row("a spare's own memory", median(warm.spare_bytes) / 2**20, "MiB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="deployments of each kind, alternating")
    parser.add_argument("--repeats", type=int, default=2, help="in each deployment")
    arguments = parser.parse_args()
    cold, warm = StartTimes(), StartTimes()
    for _ in range(arguments.rounds):
        measure(0, arguments.repeats, cold)
        measure(1, arguments.repeats, warm)
    publish("startup", f"bundled model, local Ray, {arguments.rounds} x {arguments.repeats} of each", rows(cold, warm))


if __name__ == "__main__":
    main()
