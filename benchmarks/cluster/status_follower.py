"""Waits for states of a running Ray deployment, for the benchmarks of faults and of start-up."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.ray.launch import RayDeployment
from penstock.v1 import admin_pb2

WITHIN_S = 90.0


class StatusFollower:
    """Follows the status of a deployment and checks conditions at each change."""

    def __init__(self, deployment: RayDeployment) -> None:
        self._deployment = deployment

    def until(self, condition: Callable[[admin_pb2.StatusResponse], bool]) -> admin_pb2.StatusResponse:
        """Returns the first status that fulfils the condition. Raises TimeoutError after WITHIN_S seconds."""
        version, deadline_s, status = -1, time.monotonic() + WITHIN_S, None
        while time.monotonic() < deadline_s:
            version, status, _ = self._deployment.wait(version, 1.0)
            if condition(status):
                return status
        raise TimeoutError(f"not within {WITHIN_S:g} s: {status}")

    def until_all_ready(self) -> admin_pb2.StatusResponse:
        return self.until(lambda status: status.ready and all(each.state == "ready" for each in status.workers))

    def until_replaced(self, name: str, old_pid: int) -> None:
        """Waits until another process serves as the worker `name`."""
        self.until(lambda status: (now := worker(status, name)).state == "ready" and now.pid != old_pid)


def worker(status: admin_pb2.StatusResponse, name: str) -> admin_pb2.WorkerStatus:
    return next(each for each in status.workers if each.member.worker_id == name)


def admin_metadata(deployment: RayDeployment) -> tuple[tuple[str, str]]:
    """Returns the call metadata that authenticates to the admin API."""
    return (("authorization", f"Bearer {deployment.admin_token}"),)
