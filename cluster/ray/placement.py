"""Reserves resources for a worker: one placement group with a bundle for each rank, all on one node.

A pending group is also how Ray's autoscaler learns that a node is missing. Every call here blocks on Ray's head and
therefore runs on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group

from cluster.controller.supervised_process import OnUnplaced
from cluster.pools.resources import NodeResources, ResourceShare, why_unplaced

log = logging.getLogger(__name__)

_MAKE_TIMEOUT_S = 5.0  # for a request in flight, once its worker is no longer wanted
_REPORT_INTERVAL_S = 2.0  # before an unplaced worker is reported, and between two reports


async def place(name: str, share: ResourceShare, on_unplaced: OnUnplaced, num_ranks: int = 1) -> PlacementGroup:
    """Returns once the group is reserved, however long that takes; reports meanwhile why it is not."""
    making = asyncio.ensure_future(asyncio.to_thread(_make, name, share, num_ranks))
    try:
        group = await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making], timeout=_MAKE_TIMEOUT_S)  # else it would be made after its release, and stay
        raise
    while True:
        placed, _ = await asyncio.wait([asyncio.ensure_future(group.ready())], timeout=_REPORT_INTERVAL_S)
        if placed:
            placed.pop().result()
            return group
        on_unplaced(why_unplaced(share, await asyncio.to_thread(_nodes), num_ranks))


def _make(name: str, share: ResourceShare, num_ranks: int) -> PlacementGroup:
    selectors = [dict(share.node_labels)] * num_ranks if share.node_labels else None
    return placement_group(
        [share.bundle()] * num_ranks,
        strategy="STRICT_PACK",
        name=name,
        lifetime="detached",  # outlives the controller, like the worker in it
        bundle_label_selector=selectors,
    )


def _nodes() -> list[NodeResources]:
    return [NodeResources(node["Resources"], node["Labels"] or {}) for node in ray.nodes() if node["Alive"]]


def release(name: str) -> None:
    """Gives the reservation of that name back, if there is one."""
    with contextlib.suppress(ValueError):  # there is none of that name
        remove_placement_group(get_placement_group(name))


def group_names() -> list[str]:
    """Returns the names of all groups that hold or want resources; ours are named after their workers."""
    table: dict[str, Any] = ray.util.placement_group_table()
    return [str(group["name"]) for group in table.values() if group["state"] != "REMOVED" and group["name"]]
