"""Which workers leave a pool that is to be smaller. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.pool import Slot, WorkerState
from penstock.types import WorkerId
from penstock.v1 import worker_pb2

_ORDER = {WorkerState.LOST: 0, WorkerState.STARTING: 1, WorkerState.READY: 2}


def choose_victims(slots: Sequence[Slot], loads: Mapping[WorkerId, worker_pb2.Load], count: int) -> list[Slot]:
    """`count` of them, or as many as there are that do not leave anyway: first those that serve nobody, then those with
    least KV to move; of equals the newest places."""

    def cost(slot: Slot) -> tuple[int, int, int, int]:
        load = loads.get(slot.worker_id, worker_pb2.Load())
        used_pages = load.total_pages - load.free_pages
        return (
            _ORDER.get(slot.state, 3),
            used_pages + load.queued_prefill_tokens,
            load.num_open,
            -slot.incarnation.place,
        )

    return sorted((slot for slot in slots if not slot.is_leaving), key=cost)[: max(0, count)]
