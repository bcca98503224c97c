"""Chooses which workers leave a shrinking pool, and how many spares a pool should have now. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.pools.pool import Slot, WorkerState
from penstock.types import WorkerId
from penstock.v1 import worker_pb2

_REMOVAL_ORDER = {WorkerState.STARTING: 1, WorkerState.READY: 2, WorkerState.SILENT: 2}  # 0: nothing runs there
_COMING = (WorkerState.WAITING, WorkerState.STARTING, WorkerState.LOST)


def choose_workers_to_remove(
    slots: Sequence[Slot], loads: Mapping[WorkerId, worker_pb2.Load], count: int
) -> list[Slot]:
    """Returns `count` workers, or as many as are not leaving already: first those that serve no request, then those
    with the least KV to migrate; among equals the highest numbers.
    """

    def cost(slot: Slot) -> tuple[int, int, int, int]:
        load = loads.get(slot.worker_id, worker_pb2.Load())
        used_pages = load.total_pages - load.free_pages
        return (
            _REMOVAL_ORDER.get(slot.state, 0),
            used_pages + load.queued_prefill_tokens,
            load.num_open,
            -slot.incarnation.place,
        )

    return sorted((slot for slot in slots if not slot.is_leaving), key=cost)[: max(0, count)]


def choose_num_spares(configured: int, present: int, pool: Sequence[Slot], deployment: Sequence[Slot]) -> int:
    """Returns how many spares a pool should have now.

    Configured spares start only while nothing else does, so that they take no core from a starting worker, and they
    give way to a worker that finds no node. A silent worker gets a spare at once: by the time the worker counts as
    lost, its successor's process is warm. `pool` holds the slots of the spares' own pool, `deployment` those of all
    workers and routers.
    """
    if any(slot.state is WorkerState.UNPLACED for slot in deployment):
        return 0
    if any(slot.state is WorkerState.SILENT for slot in pool):
        return max(configured, present, 1)
    if any(slot.state in _COMING for slot in deployment):
        return present  # a silent worker's spare may be needed at any moment
    return configured
