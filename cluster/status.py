"""The deployment as an operator sees it at a glance. Owns the routers' endpoints."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.pool import Incarnation, Slot, WorkerState
from cluster.pools import Pools
from cluster.reports import Reports
from cluster.spares import Spares
from cluster.supervised import Started
from penstock.types import WorkerId
from penstock.v1 import admin_pb2


class Status:
    def __init__(
        self, model_name: str, pools: Pools, reports: Reports, spares: Spares, num_ranks: Callable[[Incarnation], int]
    ) -> None:
        """`num_ranks`: that an incarnation is spread over."""
        self._num_ranks = num_ranks
        self._spares = spares
        self._model_name = model_name
        self._pools = pools
        self._reports = reports
        self._endpoints: dict[WorkerId, tuple[str, str]] = {}  # of each router
        self._began_s = time.monotonic()

    def note_router(self, worker_id: WorkerId, started: Started) -> None:
        schemes = ("grpcs", "https") if started.encrypted else ("grpc", "http")
        self._endpoints[worker_id] = (
            f"{schemes[0]}://{started.public_address or started.address}",
            f"{schemes[1]}://{started.http_address}",
        )

    def tell(self, *, ready: bool) -> admin_pb2.StatusResponse:
        return admin_pb2.StatusResponse(
            model=self._model_name,
            ready=ready,
            workers=[self._of_worker(slot) for slot in self._pools.slots],
            endpoints=[one for worker_id in sorted(self._endpoints) for one in self._endpoints[worker_id]],
            uptime_s=time.monotonic() - self._began_s,
            spares=self._spares.tell(),
        )

    def _of_worker(self, slot: Slot) -> admin_pb2.WorkerStatus:
        role = slot.incarnation.pool_name
        status = admin_pb2.WorkerStatus(
            member=admin_pb2.Member(worker_id=slot.worker_id, epoch=slot.epoch, role=role, address=slot.address),
            state=slot.state.value,
            pid=slot.pid,
            num_restarts=slot.num_restarts,
            detail=slot.detail,
            node=slot.node,
            num_ranks=self._num_ranks(slot.incarnation),
        )
        load = self._reports.get(slot.incarnation)
        if load is not None and slot.state in (WorkerState.READY, WorkerState.DRAINING):
            status.load.CopyFrom(load)
        return status
