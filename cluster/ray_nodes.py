"""What Ray knows of nodes that are about to go, and how it is told of one.

Ray's autoscalers, KubeRay and `ray drain-node` say so where a node is idle, is preempted or was told to end. Ray tells
nobody of it, so it is asked once a second. Every call here blocks on Ray's head, hence runs on a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]  # made at run time

from cluster.node_leave import Notice
from penstock.errors import InvalidInput, Unavailable

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_ASK_TIMEOUT_S = 5.0


class RayNodes:
    """Implements `evacuating.Nodes`."""

    def __init__(self, own_node: str) -> None:
        """`own_node` holds the controller and the routers."""
        self._own_node = own_node

    async def watch(self, note: Callable[[Sequence[Notice]], None]) -> None:
        """Tells of all nodes that are about to go, each time that they have changed."""
        told: dict[str, int] = {}
        away = False
        while True:
            try:
                found = await asyncio.to_thread(_draining)
                away = False
            except Exception as error:  # whatever Ray raises while its head is away
                if not away:
                    log.info("Ray does not say which nodes go: %s", type(error).__name__)
                found, away = told, True
            if found != told:
                told = found
                note([_notice(node, deadline_ms) for node, deadline_ms in found.items()])
            await asyncio.sleep(_LOOK_S)

    async def leave(self, name: str, within_s: float | None) -> Notice:
        """Tells Ray that a node goes, so that nothing is placed there any more. `name`: its id or the beginning of it,
        its address or its host's name. Raises InvalidInput and Unavailable."""
        node = await asyncio.to_thread(_find, name)
        if node == self._own_node:
            raise InvalidInput("node", f"is {name!r}, which holds the controller and the routers; they do not move")
        deadline_ms = 0 if within_s is None else int((time.time() + within_s) * 1e3)
        try:
            refusal = await asyncio.to_thread(_drain, node, deadline_ms)
        except Exception as error:  # as above
            raise Unavailable(f"Ray's head cannot be told that {name} goes: {error}") from error
        if refusal:
            raise Unavailable(f"Ray does not let {name} go: {refusal}")
        return _notice(node, deadline_ms, "an operator drains it")


def _notice(node: str, deadline_ms: int, reason: str = "Ray drains it") -> Notice:
    now_s = time.monotonic()
    return Notice(node, now_s, now_s + deadline_ms / 1e3 - time.time() if deadline_ms else None, reason)


def _client() -> Any:
    worker: Any = ray._private.worker.global_worker  # Ray has no public way to ask
    return worker.gcs_client


def _draining() -> dict[str, int]:
    """Deadlines in ms since 1970 by node id; 0: none."""
    return dict(_client().get_draining_nodes(timeout=_ASK_TIMEOUT_S))


def _drain(node: str, deadline_ms: int) -> str:
    """Why not, if it is refused."""
    reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION  # which Ray does not refuse
    accepted, refusal = _client().drain_node(node, reason, "penstock drain --node", deadline_ms, timeout=_ASK_TIMEOUT_S)
    return "" if accepted else str(refusal)


def _find(name: str) -> str:
    nodes = [one for one in ray.nodes() if one["Alive"]]
    found = [one for one in nodes if name and one["NodeID"].startswith(name)]
    found = found or [one for one in nodes if name in (one["NodeManagerAddress"], one["NodeManagerHostname"])]
    if len(found) == 1:
        return str(found[0]["NodeID"])
    known = ", ".join(sorted(f"{one['NodeID'][:12]} ({one['NodeManagerAddress']})" for one in nodes))
    problem = f"{name!r} is none of them" if not found else f"{name!r} is the name of {len(found)} of them"
    raise InvalidInput("node", f"must be one of {known}; {problem}")
