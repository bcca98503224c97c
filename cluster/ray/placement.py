"""Reserves resources for a worker: one placement group with a bundle for each rank, all on one node.

Ray's autoscaler learns from a pending group that a node is missing. Every call here blocks on Ray's head and therefore
runs on a thread.
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

_MAKE_TIMEOUT_S = 5.0  # how long to wait for a reservation in flight that is no longer wanted
_REPORT_INTERVAL_S = 2.0  # delay before the first report of an unplaced worker and between reports


async def place(name: str, share: ResourceShare, on_unplaced: OnUnplaced, num_ranks: int = 1) -> PlacementGroup:
    """Returns once the group is reserved, however long that takes; until then reports why it is not."""
    making = asyncio.ensure_future(asyncio.to_thread(_make, name, share, num_ranks))
    try:
        group = await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making], timeout=_MAKE_TIMEOUT_S)  # else the group could outlive its release
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
        lifetime="detached",  # the group outlives the controller, like the worker in it
        bundle_label_selector=selectors,
    )


def _nodes() -> list[NodeResources]:
    return [NodeResources(node["Resources"], node["Labels"] or {}) for node in ray.nodes() if node["Alive"]]


def release(name: str) -> None:
    """Releases the reservation of that name, if there is one."""
    with contextlib.suppress(ValueError):  # there is no group of that name
        remove_placement_group(get_placement_group(name))


def group_names() -> list[str]:
    """Returns the names of all groups that hold or want resources; a worker's group is named after the worker."""
    table: dict[str, Any] = ray.util.placement_group_table()
    return [str(group["name"]) for group in table.values() if group["state"] != "REMOVED" and group["name"]]
