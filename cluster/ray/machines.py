"""Reads the resources of Ray's nodes, and the memory of a single machine.

Implements `capacity_check.Machines`. Calls to Ray block on its head and run on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil
import ray

from cluster.pools.capacity_policy import Capacity, MemoryRoom, WorkerNeed
from cluster.pools.resources import NodeResources
from penstock.errors import Unavailable
from penstock.types import Role

log = logging.getLogger(__name__)

_READ_TIMEOUT_S = 5.0
_CGROUP = Path("/sys/fs/cgroup")


class RayMachines:
    def __init__(self, needs: Mapping[Role, WorkerNeed], *, embedded: bool, grows_to: Mapping[str, float]) -> None:
        """`embedded`: Ray belongs to this deployment and spans only this machine. `grows_to` are resources in all that
        Ray's autoscaler may grow the cluster to; empty: it has none.
        """
        self.needs = needs
        self._growth = grows_to or None
        self.num_cores = float(len(os.sched_getaffinity(0)))
        self._embedded = embedded

    async def read(self, pids: Iterable[int]) -> Capacity:
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                nodes = await asyncio.to_thread(_read_nodes)
        except Exception as error:  # Ray raises various types while its head is down
            raise Unavailable(
                f"Ray's head does not answer which resources the nodes have: {type(error).__name__}"
            ) from error
        if not self._embedded:
            self.num_cores = sum(node.resources.get("CPU", 0.0) for node in nodes.values())
            return Capacity(nodes, self._growth)
        return Capacity(nodes, memory=await asyncio.to_thread(_read_memory, list(pids)))


def _read_nodes() -> dict[str, NodeResources]:
    return {
        str(node["NodeID"]): NodeResources(node["Resources"], node["Labels"] or {})
        for node in ray.nodes()
        if node["Alive"]
    }


def _read_memory(pids: list[int]) -> MemoryRoom | None:
    """Returns the free memory and the private memory of the largest of these processes; None if none of them runs."""
    taken = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            taken.append(psutil.Process(pid).memory_full_info().uss)
    if not any(taken):
        return None
    return MemoryRoom(min(psutil.virtual_memory().available, _free_in_cgroup()), max(taken))


def _free_in_cgroup() -> float:
    """Returns how much more memory the container may use, counting page cache as free; infinite without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))
