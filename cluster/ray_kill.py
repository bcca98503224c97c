"""Ends a process of ours at once, on whichever node it is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

log = logging.getLogger(__name__)

_TIMEOUT_S = 3.0


async def kill_process(node_id: str, pid: int) -> bool:
    """SIGKILL, which a stopped process cannot put off. Returns whether it is certain to end; of a node that is gone
    nothing is."""
    if node_id == ray.get_runtime_context().get_node_id():
        _kill(pid)
        return True
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await (await asyncio.to_thread(_kill_there, node_id, pid))
    except (RayError, TimeoutError) as error:
        log.info("process %d of node %s was not signalled: %s", pid, node_id, type(error).__name__)
        return False
    return True


def _kill_there(node_id: str, pid: int) -> Any:
    """Blocks on Ray's head, which may be away."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
