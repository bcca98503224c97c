"""Ends a process of ours at once, on whichever node it is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

log = logging.getLogger(__name__)

_TIMEOUT_S = 3.0


async def kill_process(node_id: str, pid: int) -> None:
    """SIGKILL, which a stopped process cannot put off. Of a node that is gone there is nothing to end."""
    if node_id == ray.get_runtime_context().get_node_id():
        _kill(pid)
        return
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await ray.remote(_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pid)
    except (RayError, TimeoutError) as error:
        log.info("process %d of node %s was not signalled: %s", pid, node_id, type(error).__name__)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
