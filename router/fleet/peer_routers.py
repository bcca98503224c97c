"""Exchanges reports with the other routers: requests in flight, so that routers do not all flood the same idle worker,
and the usage of tenants with limits, so that a quota holds for all routers together.

Any number of routers works without a leader or a shared store. A router learns the others' addresses from the
membership or from its configuration. While a peer is unreachable, its requests are unknown: placements are slightly
worse, quotas count only this router and the reachable peers, and nothing waits for the peer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio

from penstock.rpc.server import GrpcServer
from penstock.rpc.trust import Trust
from penstock.types import Epoch, WorkerId, new_epoch
from penstock.v1 import peer_pb2, peer_pb2_grpc
from router.fleet.backoff import Backoff
from router.fleet.tenant_use import QuotaExchange, TenantUse
from router.routing.costs.inflight import STALE_S, InflightLedger, InflightWork, PeerInflight

log = logging.getLogger(__name__)

_MAX_GAP_S = 0.5  # longest time between two reports
_MIN_GAP_S = 0.01  # shortest time between two reports; changes in between are reported together
_TENANTS_GAP_S = 0.05  # shortest time between two reports of tenants' usage, since there may be many tenants


class PeerService(peer_pb2_grpc.RouterPeerServicer):
    """Reports this router's work in flight and its tenants' usage to the other routers."""

    def __init__(self, ledger: InflightLedger, epoch: Epoch, quotas: QuotaExchange) -> None:
        self._ledger = ledger
        self._epoch = epoch
        self._changed = asyncio.Event()
        self._number = 0
        self.quotas = quotas
        ledger.watch(self.note_change)

    def note_change(self) -> None:
        """Makes every stream send a new report soon."""
        self._changed.set()

    async def WatchInflight(
        self, request: peer_pb2.WatchInflightRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[peer_pb2.InflightReport]:
        sent: peer_pb2.TenantUses | None = None
        sent_s = 0.0
        while True:
            changed, now_s = self._changed, time.monotonic()
            report, tenants = self._report(), self._tenants()
            is_pending = tenants != sent
            if is_pending and now_s - sent_s >= _TENANTS_GAP_S:
                report.tenants.CopyFrom(tenants)
                sent, sent_s, is_pending = tenants, now_s, False
            yield report
            await asyncio.sleep(_MIN_GAP_S)
            try:
                async with asyncio.timeout(_TENANTS_GAP_S if is_pending else _MAX_GAP_S):
                    await changed.wait()
            except TimeoutError:
                continue  # an unchanged report shows that this router is alive
            if changed is self._changed:
                self._changed = asyncio.Event()

    def _tenants(self) -> peer_pb2.TenantUses:
        return peer_pb2.TenantUses(
            tenants=[
                peer_pb2.TenantUse(
                    tenant=tenant,
                    num_requests=use.num_requests,
                    inflight_tokens=use.inflight_tokens,
                    spent_tokens=use.spent_tokens,
                )
                for tenant, use in sorted(self.quotas.tenant_uses().items())
            ]
        )

    def _report(self) -> peer_pb2.InflightReport:
        self._number += 1
        report = peer_pb2.InflightReport(epoch=self._epoch, number=self._number)
        for worker_id, work in self._ledger.totals():
            report.workers.add(
                worker_id=worker_id,
                num_requests=work.num_requests,
                num_pages=work.num_pages,
                prefill_tokens=work.prefill_tokens,
            )
        return report


class PeerRouters:
    """Owns this router's peer service and one task for each other router."""

    def __init__(self, ledger: InflightLedger, load: PeerInflight, trust: Trust) -> None:
        self.epoch = new_epoch()
        self._ledger = ledger
        self._load = load
        self._trust = trust
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._service: PeerService | None = None  # None before `start`
        self._server: GrpcServer | None = None
        self.address = ""

    def note_change(self) -> None:
        """Reports the tenants' usage to the other routers soon, because it changed."""
        if self._service is not None:
            self._service.note_change()

    async def start(self, host: str, port: int, quotas: QuotaExchange) -> None:
        """Starts serving the other routers. Tenants' usage is exchanged with them through `quotas`.

        Raises ConfigError if the port is taken.
        """
        self._service = PeerService(self._ledger, self.epoch, quotas)
        self._server = self._trust.server([peer_pb2.DESCRIPTOR.services_by_name["RouterPeer"]])
        peer_pb2_grpc.add_RouterPeerServicer_to_server(self._service, self._server.server)
        bound = await self._server.start(host, port, "peer_port")
        self.address = f"{host}:{bound}"

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Follows exactly the routers at these addresses, without this router's own. Call it after `start`."""
        assert self._service is not None
        quotas = self._service.quotas
        wanted = {address for address in addresses if address != self.address}
        for address in self._tasks.keys() - wanted:
            self._tasks.pop(address).cancel()
            self._load.drop(address)
            quotas.on_peer_away(address)
        for address in wanted - self._tasks.keys():
            self._tasks[address] = asyncio.create_task(self._follow(address, quotas), name=f"peer {address}")

    async def _follow(self, address: str, quotas: QuotaExchange) -> None:
        backoff = Backoff(random.Random())
        while True:
            async with self._trust.channel(address) as channel:
                call = peer_pb2_grpc.RouterPeerStub(channel).WatchInflight(peer_pb2.WatchInflightRequest())
                try:
                    while True:
                        async with asyncio.timeout(2 * STALE_S):
                            report = await call.read()
                        if report is grpc.aio.EOF:
                            break
                        backoff.reset()
                        self._load.apply(
                            address, Epoch(report.epoch), report.number, _work_of(report), time.monotonic()
                        )
                        if report.HasField("tenants"):
                            quotas.on_peer_uses(address, Epoch(report.epoch), _uses_of(report.tenants))
                except (grpc.RpcError, TimeoutError):
                    log.info("the router at %s is unreachable", address)
                finally:
                    call.cancel()
            quotas.on_peer_away(address)
            await asyncio.sleep(backoff.next_s())

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        if self._server is not None:
            await self._server.stop()


def _work_of(report: peer_pb2.InflightReport) -> dict[WorkerId, InflightWork]:
    return {
        WorkerId(worker.worker_id): InflightWork(worker.num_requests, worker.num_pages, worker.prefill_tokens)
        for worker in report.workers
    }


def _uses_of(tenants: peer_pb2.TenantUses) -> dict[str, TenantUse]:
    return {use.tenant: TenantUse(use.num_requests, use.inflight_tokens, use.spent_tokens) for use in tenants.tenants}
