"""How many warm processes a pool should have now. Pure.

Those that are configured come up once nothing else does, so that they take no core from a worker that is starting, and
give way to a worker that finds no place. A worker that has fallen silent gets a stand-in at once: by the time it counts
as lost, its successor's process is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.pool import Slot, WorkerState

_COMING = (WorkerState.STARTING, WorkerState.LOST)


def choose_count(configured: int, present: int, pool: Sequence[Slot], deployment: Sequence[Slot]) -> int:
    """`pool` are the workers that the processes are for, `deployment` all workers and routers."""
    if any(slot.state is WorkerState.UNPLACED for slot in deployment):
        return 0
    if any(slot.state is WorkerState.SILENT for slot in pool):
        return max(configured, present, 1)
    if any(slot.state in _COMING for slot in deployment):
        return present  # one that stands in may be wanted in a moment
    return configured
