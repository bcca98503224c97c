"""Builds the status that operators and launchers see. Owns the routers' public endpoints."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from cluster.controller.load_reports import LoadReportStore
from cluster.controller.supervised_process import Started
from cluster.lifecycle.upgrade.served_models import ServedModels
from cluster.pools.pool import COMING, ROUTER, Pools, Slot, WorkerState
from cluster.pools.spares import Spares
from penstock.types import WorkerId
from penstock.v1 import admin_pb2

_PEERS_KEPT = 64


class StatusReporter:
    def __init__(
        self,
        pools: Pools,
        reports: LoadReportStore,
        spares: Spares,
        served: ServedModels,
        list_followers: Callable[[], list[str]],
    ) -> None:
        """`list_followers` returns the peer addresses of all routers that follow the membership."""
        self._pools = pools
        self._reports = reports
        self._spares = spares
        self._served = served
        self._list_followers = list_followers
        # Peer addresses of the routers that are supervised here; a dead one's watch ends a moment after it.
        self._own_peers: deque[str] = deque(maxlen=_PEERS_KEPT)
        self._endpoints: dict[WorkerId, tuple[str, str]] = {}  # gRPC and HTTP for callers of each router
        self._metrics_urls: dict[WorkerId, str] = {}  # of each router that has a port for them
        self._began_s = time.monotonic()

    def note_router(self, worker_id: WorkerId, started: Started) -> None:
        self._own_peers.append(started.peer_address)
        schemes = ("grpcs", "https") if started.encrypted else ("grpc", "http")
        self._endpoints[worker_id] = (
            f"{schemes[0]}://{started.public_address or started.address}",
            f"{schemes[1]}://{started.http_address}",
        )
        if started.metrics_address:
            self._metrics_urls[worker_id] = f"{schemes[1]}://{started.metrics_address}/metrics"

    def report(self, balance: admin_pb2.BalanceStatus, *, ready: bool) -> admin_pb2.StatusResponse:
        return admin_pb2.StatusResponse(
            model=self._served.config.model_name,
            ready=ready,
            workers=[self._of_worker(slot) for slot in self._pools.slots],
            endpoints=self._list_endpoints(),
            uptime_s=time.monotonic() - self._began_s,
            spares=self._spares.status(),
            balance=balance,
            routers_elsewhere=self._list_elsewhere(),
        )

    def _list_elsewhere(self) -> list[str]:
        """Returns the peer addresses of the routers that follow the membership and are not supervised here."""
        if any(slot.state in COMING for slot in self._pools[ROUTER].slots):
            return []  # a supervised router follows before it has reported its address
        return [address for address in self._list_followers() if address not in self._own_peers]

    def _list_endpoints(self) -> list[str]:
        """Returns the callers' endpoints, each once where routers share them, then the URLs of the routers' metrics."""
        public = [url for worker_id in sorted(self._endpoints) for url in self._endpoints[worker_id]]
        metrics = [self._metrics_urls[worker_id] for worker_id in sorted(self._metrics_urls)]
        return list(dict.fromkeys([*public, *metrics]))

    def _of_worker(self, slot: Slot) -> admin_pb2.WorkerStatus:
        role = slot.incarnation.pool_name
        status = admin_pb2.WorkerStatus(
            member=admin_pb2.Member(worker_id=slot.worker_id, epoch=slot.epoch, role=role, address=slot.address),
            state=slot.state.value,
            pid=slot.pid,
            num_restarts=slot.num_restarts,
            detail=slot.detail,
            node=slot.node,
            num_ranks=self._served.num_ranks_of(slot.incarnation),
        )
        load = self._reports.get(slot.incarnation)
        if load is not None and slot.state in (WorkerState.READY, WorkerState.DRAINING):
            status.load.CopyFrom(load)
        return status
