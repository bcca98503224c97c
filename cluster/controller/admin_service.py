"""The Admin gRPC service: translates between protobuf and the controller, and decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import replace

import grpc.aio

from cluster.controller.controller import Controller
from cluster.controller.event_log import ClusterEvent
from cluster.diagnose.findings import Finding
from cluster.diagnose.ray_checks import check_ray
from cluster.lifecycle.drain import TIMEOUT_S, DrainProgress
from cluster.lifecycle.flip import FlipProgress, RoleFlip
from cluster.lifecycle.relocation_service import Relocation
from cluster.lifecycle.upgrade.gate_policy import UpgradeGate
from cluster.lifecycle.upgrade.rolling_upgrade import UpgradePlan
from cluster.lifecycle.weights.weight_update import WAIT_S, WeightsProgress, WeightUpdate
from cluster.scaling.runner import record_to_wire
from penstock.client.broadcast.manifest import WeightsBroadcast
from penstock.errors import InvalidInput, Unavailable
from penstock.rpc.addresses import LOOPBACK, needs_loopback_too
from penstock.rpc.secret import ADMIN, PEER
from penstock.rpc.server import GrpcServer, typed_errors
from penstock.rpc.trust import Trust
from penstock.types import PauseMode, Role
from penstock.v1 import admin_pb2, admin_pb2_grpc

_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
_FOR_ROUTERS = {f"/{_SERVICE.full_name}/{method}" for method in ("WatchMembership", "ReportDemand")}


class AdminService(admin_pb2_grpc.AdminServicer):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def Status(
        self, request: admin_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.StatusResponse:
        return self._controller.status()

    async def WatchMembership(
        self, request: admin_pb2.WatchMembershipRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.Membership]:
        async for membership in self._controller.membership.watch(request.router):
            yield membership

    async def Stop(self, request: admin_pb2.StopRequest, context: grpc.aio.ServicerContext) -> admin_pb2.StopResponse:
        """Responds once every worker has ended."""
        await self._controller.stop()
        return admin_pb2.StopResponse()

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.DrainProgress]:
        async with typed_errors(context):
            drain = self._controller.draining.drain(
                request.worker_id, request.timeout_s or TIMEOUT_S, replaced=request.replace
            )
            async for progress in drain.follow():
                yield _progress_to_wire(request.worker_id, progress)

    async def DrainNode(
        self, request: admin_pb2.DrainNodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.DrainProgress]:
        async with typed_errors(context):
            relocations = await self._controller.relocation.drain_node(request.node, request.within_s or None)
            messages: asyncio.Queue[admin_pb2.DrainProgress | None] = asyncio.Queue()  # None at the end

            async def follow(relocation: Relocation) -> None:
                async for progress in relocation.follow():
                    messages.put_nowait(_progress_to_wire(relocation.worker_id, progress))

            async def follow_all() -> None:
                await asyncio.gather(*map(follow, relocations))
                messages.put_nowait(None)

            following = asyncio.create_task(follow_all())
            try:
                while (message := await messages.get()) is not None:
                    yield message
                if self._controller.relocation.is_moving:
                    yield admin_pb2.DrainProgress(worker_id="controller", stage="moving")
            finally:
                following.cancel()

    async def Flip(
        self, request: admin_pb2.FlipRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.FlipProgress]:
        async with typed_errors(context):
            if request.role not in list(Role):
                raise InvalidInput("role", f"is {request.role!r}; give {' or '.join(Role)}")
            with contextlib.suppress(Unavailable):  # a flip starts nothing, so it may continue without Ray's head
                await self._controller.pool_service.refresh()
            flip = self._controller.pool_service.flip(
                request.worker_id, Role(request.role), request.timeout_s or TIMEOUT_S, force=request.force
            )
            async for progress in flip.follow():
                yield _flip_to_wire(flip, progress)

    async def Upgrade(
        self, request: admin_pb2.UpgradeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.UpgradeProgress]:
        async with typed_errors(context):
            if request.abort:
                upgrade = self._controller.upgrading.abort()
            else:
                upgrade = await self._controller.upgrading.begin(_plan_from_wire(request), force=request.force)
            async for progress in upgrade.follow():
                yield admin_pb2.UpgradeProgress(
                    stage=progress.stage.value,
                    num_old=progress.num_old,
                    num_new=progress.num_new,
                    elapsed_s=progress.elapsed_s,
                    detail=progress.detail,
                )

    async def UpdateWeights(
        self, request: admin_pb2.UpdateWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.WeightsProgress]:
        async with typed_errors(context):
            mode = request.mode or PauseMode.WAIT
            if mode not in list(PauseMode):
                raise InvalidInput("mode", f"is {mode!r}; give {', '.join(PauseMode)}")
            if not request.path.startswith("/"):
                raise InvalidInput(
                    "path", f"is {request.path!r}; give its absolute path, which must be the same on every machine"
                )
            broadcast = WeightsBroadcast.from_wire(request.broadcast) if request.HasField("broadcast") else None
            update = await self._controller.weights.begin(
                request.path, request.version, PauseMode(mode), request.timeout_s or WAIT_S, broadcast
            )
            async for progress in update.follow():
                yield _weights_to_wire(update, progress)

    async def WeightsStatus(
        self, request: admin_pb2.WeightsStatusRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.WeightsStatusResponse:
        service = self._controller.weights
        answer = admin_pb2.WeightsStatusResponse(
            workers=[
                admin_pb2.WorkerWeights(worker_id=slot.worker_id, state=slot.state.value, version=slot.weights_version)
                for slot in self._controller.pools.worker_slots
            ]
        )
        if (held := service.weights) is not None:
            answer.version, answer.path, answer.digest = held.version, held.path, held.digest
        if service.last is not None:
            answer.last.CopyFrom(_weights_to_wire(service.last, service.last.progress))
        return answer

    async def Scale(
        self, request: admin_pb2.ScaleRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ScaleResponse:
        async with typed_errors(context):
            before = self._controller.pool_service.replicas(request.pool)
            self._check_bounds(request)
            if request.replicas > before and not request.force:
                await self._controller.pool_service.refresh()
            draining = self._controller.pool_service.scale(
                request.pool, request.replicas, request.timeout_s or TIMEOUT_S, force=request.force
            )
            self._controller.scaling.hold(request.pool, request.replicas, request.hold_s)
        return admin_pb2.ScaleResponse(replicas_before=before, replicas=request.replicas, draining=draining)

    def _check_bounds(self, request: admin_pb2.ScaleRequest) -> None:
        """Raises InvalidInput for a size beyond the bounds of the autoscaler, which would undo it."""
        scaling = self._controller.scaling
        bounds = scaling.bounds[Role(request.pool)]
        if scaling.config.mode == "on" and bounds.clip(request.replicas) != request.replicas:
            raise InvalidInput(
                "replicas",
                f"is {request.replicas}; the {request.pool} pool's min_replicas is {bounds.lowest} and its "
                f"max_replicas {bounds.highest}: stay within them, or change them",
            )

    async def ReportDemand(
        self, request_iterator: AsyncIterator[admin_pb2.DemandReport], context: grpc.aio.ServicerContext
    ) -> admin_pb2.DemandAccepted:
        async for report in request_iterator:
            self._controller.scaling.demand.on_report(report, time.monotonic())
        return admin_pb2.DemandAccepted()

    async def Explain(
        self, request: admin_pb2.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ExplainResponse:
        scaling = self._controller.scaling
        async with typed_errors(context):
            records = scaling.explain(request.pool, request.limit, changes=request.changes)
        return admin_pb2.ExplainResponse(mode=scaling.config.mode, records=map(record_to_wire, records))

    async def Doctor(
        self, request: admin_pb2.DoctorRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.Finding]:
        async with typed_errors(context):
            for finding in check_ray("the controller's Ray"):
                yield _finding_to_wire(finding)
            async for finding in self._controller.examine(transfers=request.transfers):
                yield _finding_to_wire(finding)

    async def Events(
        self, request: admin_pb2.EventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.ClusterEvent]:
        events = self._controller.events
        if request.follow:
            async for event in events.follow(request.after):
                yield _event_to_wire(event)
        else:
            for event in events.after(request.after):
                yield _event_to_wire(event)


def _progress_to_wire(worker_id: str, progress: DrainProgress) -> admin_pb2.DrainProgress:
    return admin_pb2.DrainProgress(
        worker_id=worker_id,
        stage=progress.stage.value,
        num_left=progress.num_left,
        num_migrated=progress.num_migrated,
        num_failed_migrations=progress.num_failed_migrations,
        num_cut_short=progress.num_cut_short,
        num_pages_handed=progress.num_pages_handed,
        elapsed_s=progress.elapsed_s,
        detail=progress.detail,
    )


def _plan_from_wire(request: admin_pb2.UpgradeRequest) -> UpgradePlan:
    """Fields that are 0 get their defaults. Raises InvalidInput."""
    if not 0.0 <= request.share < 1.0:
        raise InvalidInput("share", f"is {request.share:g}; give a fraction of the requests, below 1")
    default = UpgradeGate()
    gate = UpgradeGate(
        window_s=request.window_s or default.window_s,
        min_requests=request.min_requests or default.min_requests,
        max_error_rate=request.max_error_rate or default.max_error_rate,
        max_slowdown=request.max_slowdown or default.max_slowdown,
        ttft_s=request.ttft_s or None,
        itl_s=request.itl_s or None,
        without_evidence=request.without_evidence,
    )
    plan = UpgradePlan(request.model, gate)
    return replace(plan, share=request.share or plan.share, drain_timeout_s=request.drain_timeout_s or TIMEOUT_S)


def _flip_to_wire(flip: RoleFlip, progress: FlipProgress) -> admin_pb2.FlipProgress:
    return admin_pb2.FlipProgress(
        worker_id=flip.target.worker_id,
        stage=progress.stage.value,
        drain=_progress_to_wire(flip.source.worker_id, progress.drain),
        flip_s=progress.flip_s,
        detail=progress.detail,
    )


def _weights_to_wire(update: WeightUpdate, progress: WeightsProgress) -> admin_pb2.WeightsProgress:
    return admin_pb2.WeightsProgress(
        stage=progress.stage.value,
        version=update.plan.weights.version,
        num_workers=progress.num_workers,
        num_received=progress.num_received,
        num_prepared=progress.num_prepared,
        num_updated=progress.num_updated,
        elapsed_s=progress.elapsed_s,
        detail=progress.detail,
    )


def _finding_to_wire(finding: Finding) -> admin_pb2.Finding:
    return admin_pb2.Finding(
        check=finding.check,
        subject=finding.subject,
        verdict=finding.severity.value,
        text=finding.text,
        advice=finding.advice,
    )


def _event_to_wire(event: ClusterEvent) -> admin_pb2.ClusterEvent:
    return admin_pb2.ClusterEvent(
        number=event.number,
        unix_time_s=event.unix_time_s,
        subject=event.subject,
        epoch=event.epoch,
        what=event.what,
        reason=event.reason,
    )


async def start_admin_server(
    controller: Controller, host: str, port: int, trust: Trust | None = None
) -> tuple[GrpcServer, str]:
    """Returns the server and the host:port at which this machine calls it: operators' commands always find it on
    loopback. Raises ConfigError if the port is taken.

    Routers may watch the membership and report their traffic; everything else needs the operator's token. Without
    `trust` every method is open.
    """
    trust = trust or Trust()

    def accept(method: str) -> Collection[str]:
        return (*trust.tokens(ADMIN), *(trust.tokens(PEER) if method in _FOR_ROUTERS else ()))

    server = trust.server([_SERVICE], accept)
    admin_pb2_grpc.add_AdminServicer_to_server(AdminService(controller), server.server)
    also_on = LOOPBACK if needs_loopback_too(host) else ""
    bound = await server.start(host, port, key="admin_port", also_on=also_on)
    await server.set_serving(True)
    return server, f"{LOOPBACK}:{bound}"
