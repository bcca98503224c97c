"""Asks Ray which nodes are about to go, and makes Ray drain a node.

Ray's autoscalers, KubeRay and `ray drain-node` mark a node that is idle, preempted or asked to stop. Ray sends no
notice of it, so this module polls once a second. Every call blocks on Ray's head and therefore runs on a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import ray
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]  # generated at run time

from cluster.lifecycle.relocation_policy import NodeNotice
from penstock.errors import InvalidInput, Unavailable

log = logging.getLogger(__name__)

HEAD = "node:__internal_head__"  # a resource that only Ray's head node offers
_POLL_S = 1.0
_ASK_TIMEOUT_S = 5.0


class RayNodes:
    """Implements `relocation_service.NodeWatch`."""

    def __init__(self, own_node: str, exit_process: Callable[[], Awaitable[None]]) -> None:
        """`own_node` is the id of the node with the controller and the routers. `exit_process` exits the controller
        such that Ray restarts it.
        """
        self.own_node = own_node
        self._exit_process = exit_process
        self._is_stuck = False  # Ray started this controller on a node that was already about to go

    async def watch(self, note: Callable[[Sequence[NodeNotice]], None]) -> None:
        """Calls `note` with all nodes that are about to go, each time the set changes."""
        noted: dict[str, int] = {}
        away, is_first = False, True
        while True:
            try:
                found = await asyncio.to_thread(_draining)
                self._is_stuck |= is_first and self.own_node in found
                away = is_first = False
            except Exception as error:  # Ray raises various types while its head is down
                if not away:
                    log.info("Ray does not answer which nodes are leaving: %s", type(error).__name__)
                found, away = noted, True
            if found != noted:
                noted = found
                note([_notice(node, deadline_ms) for node, deadline_ms in found.items()])
            await asyncio.sleep(_POLL_S)

    async def find_dead(self, nodes: Collection[str]) -> Collection[str]:
        """Returns which of the nodes are dead, according to Ray; none while Ray's head is down. A node stays dead: if
        it comes back, it gets a new id.
        """
        try:
            known = await asyncio.to_thread(ray.nodes)
        except Exception as error:  # as above
            log.info("Ray does not answer which nodes are dead: %s", type(error).__name__)
            return ()
        return {node["NodeID"] for node in known if not node["Alive"]}.intersection(nodes)

    async def leave(self, name: str, within_s: float | None) -> NodeNotice:
        """Makes Ray drain a node, so that Ray places nothing more there. `name` is the node's address, its host name,
        its id or a prefix of the id. Raises InvalidInput and Unavailable.
        """
        node = await asyncio.to_thread(_find, name)
        if await asyncio.to_thread(is_head, node):
            problem = f"is {name!r}, Ray's head: Ray ends with it, so nothing there can move"
            raise InvalidInput("node", f"{problem}; stop the deployment, or give Ray's head a fault-tolerant store")
        if node == self.own_node and not await asyncio.to_thread(_others, node):
            raise InvalidInput("node", f"is {name!r}, which holds the controller and the routers; add a node for them")
        deadline_ms = 0 if within_s is None else int((time.time() + within_s) * 1e3)
        try:
            refusal = await asyncio.to_thread(_drain, node, deadline_ms)
        except Exception as error:  # as above
            raise Unavailable(f"Ray's head does not answer, so {name} is not drained: {error}") from error
        if refusal:
            raise Unavailable(f"Ray refuses to drain {name}: {refusal}")
        return _notice(node, deadline_ms, "an operator drains it")

    async def move_controller(self) -> str:
        if self._is_stuck:
            return "Ray has started it again on a node that goes"
        try:
            if not await asyncio.to_thread(_others, self.own_node):
                return "no other node can hold it"
        except Exception as error:  # as above
            return f"Ray's head does not answer: {error}"
        await self._exit_process()
        return ""


def _notice(node: str, deadline_ms: int, reason: str = "Ray drains it") -> NodeNotice:
    now_s = time.monotonic()
    return NodeNotice(node, now_s, now_s + deadline_ms / 1e3 - time.time() if deadline_ms else None, reason)


def _client() -> Any:
    worker: Any = ray._private.worker.global_worker  # Ray has no public interface for its dashboard client
    return worker.gcs_client


def _draining() -> dict[str, int]:
    """Returns the draining nodes' deadlines in Unix milliseconds by node id; 0 means no deadline."""
    return dict(_client().get_draining_nodes(timeout=_ASK_TIMEOUT_S))


def _drain(node: str, deadline_ms: int) -> str:
    """Asks Ray to drain the node. Returns why Ray refuses, or ""."""
    reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION  # Ray never refuses this reason
    accepted, refusal = _client().drain_node(node, reason, "penstock drain --node", deadline_ms, timeout=_ASK_TIMEOUT_S)
    return "" if accepted else str(refusal)


def is_head(node: str) -> bool:
    """Returns whether the node is Ray's head."""
    return any(HEAD in each["Resources"] for each in ray.nodes() if each["NodeID"] == node)


def _others(node: str) -> list[str]:
    """Returns the other nodes that are alive and not about to go."""
    draining = _draining()
    return [each["NodeID"] for each in ray.nodes() if each["Alive"] and each["NodeID"] not in {node, *draining}]


def _find(name: str) -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    found = [node for node in nodes if name and node["NodeID"].startswith(name)]
    found = found or [node for node in nodes if name in (node["NodeManagerAddress"], node["NodeManagerHostname"])]
    if len(found) == 1:
        return str(found[0]["NodeID"])
    known = ", ".join(sorted(f"{node['NodeID'][:12]} ({node['NodeManagerAddress']})" for node in nodes))
    problem = f"{name!r} is none of them" if not found else f"{name!r} is the name of {len(found)} of them"
    raise InvalidInput("node", f"must be one of {known}; {problem}")
