"""A worker's reservation: one placement group, a bundle for each rank, all on one node.

A pending group is also how Ray's autoscaler hears that a node is missing. Every call here blocks on Ray's head, hence
runs on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group

from cluster.feasibility import Node, why_unplaced
from cluster.shares import Share

log = logging.getLogger(__name__)

_PATIENCE_S = 2.0  # before an unplaced worker is spoken of, and between two looks at the nodes


async def place(name: str, share: Share, on_unplaced: Callable[[str], None], num_ranks: int = 1) -> PlacementGroup:
    """Returns once the group is reserved, however long that takes; meanwhile tells why it is not."""
    group = await asyncio.to_thread(_make, name, share, num_ranks)
    while True:
        placed, _ = await asyncio.wait([asyncio.ensure_future(group.ready())], timeout=_PATIENCE_S)
        if placed:
            placed.pop().result()
            return group
        on_unplaced(why_unplaced(share, await asyncio.to_thread(_nodes), num_ranks))


def _make(name: str, share: Share, num_ranks: int) -> PlacementGroup:
    selectors = [dict(share.node_labels)] * num_ranks if share.node_labels else None
    return placement_group(
        [share.bundle()] * num_ranks,
        strategy="STRICT_PACK",
        name=name,
        lifetime="detached",  # outlives the controller, as the worker in it does
        bundle_label_selector=selectors,
    )


def _nodes() -> list[Node]:
    return [Node(node["Resources"], node["Labels"] or {}) for node in ray.nodes() if node["Alive"]]


async def release(name: str) -> None:
    """Gives the reservation of that name back, if there is one."""
    await asyncio.to_thread(release_now, name)


def release_now(name: str) -> None:
    with contextlib.suppress(ValueError):  # there is none of that name
        remove_placement_group(get_placement_group(name))


def group_names() -> list[str]:
    """Of all groups that hold or want something; ours are told by their workers' names."""
    table: dict[str, Any] = ray.util.placement_group_table()
    return [str(one["name"]) for one in table.values() if one["state"] != "REMOVED" and one["name"]]
