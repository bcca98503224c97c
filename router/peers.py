"""The other routers: what each has under way is told to all, so that together they do not flood the idlest worker.

Any number of routers, no leader, no shared store. A router learns of the others from the membership, or from its
configuration. While a peer is out of reach its share is unknown, and choices are a little worse; nothing waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio

from penstock.grpc_server import GrpcServer
from penstock.trust import Trust
from penstock.types import Epoch, WorkerId
from penstock.v1 import peer_pb2, peer_pb2_grpc
from router.backoff import Backoff
from router.inflight import InflightLedger, Work
from router.peer_load import STALE_S, PeerLoad

log = logging.getLogger(__name__)

_BEAT_S = 0.5  # between two reports at most
_MIN_GAP_S = 0.01  # and at least: what changes meanwhile is told together


class PeerService(peer_pb2_grpc.RouterPeerServicer):
    """Tells this router's work under way."""

    def __init__(self, ledger: InflightLedger, epoch: Epoch) -> None:
        self._ledger = ledger
        self._epoch = epoch
        self._changed = asyncio.Event()
        self._number = 0
        ledger.on_change = self._note

    def _note(self) -> None:
        self._changed.set()

    async def WatchInflight(
        self, request: peer_pb2.WatchInflightRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[peer_pb2.InflightReport]:
        while True:
            changed = self._changed
            yield self._report()
            await asyncio.sleep(_MIN_GAP_S)
            try:
                async with asyncio.timeout(_BEAT_S):
                    await changed.wait()
            except TimeoutError:
                continue  # a beat
            if changed is self._changed:
                self._changed = asyncio.Event()

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


class Peers:
    """Owns this router's peer service and one task for each other router."""

    def __init__(self, ledger: InflightLedger, load: PeerLoad, trust: Trust) -> None:
        self.epoch = Epoch(time.time_ns())
        self._service = PeerService(ledger, self.epoch)
        self._load = load
        self._trust = trust
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._server: GrpcServer | None = None
        self.address = ""

    async def start(self, host: str, port: int) -> None:
        """Raises ConfigError where the port is taken."""
        self._server = self._trust.server([peer_pb2.DESCRIPTOR.services_by_name["RouterPeer"]])
        peer_pb2_grpc.add_RouterPeerServicer_to_server(self._service, self._server.server)
        bound = await self._server.start(host, port, "peer_port")
        self.address = f"{host}:{bound}"

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Follows these, this router itself left out, and no other."""
        wanted = {address for address in addresses if address != self.address}
        for address in self._tasks.keys() - wanted:
            self._tasks.pop(address).cancel()
            self._load.drop(address)
        for address in wanted - self._tasks.keys():
            self._tasks[address] = asyncio.create_task(self._follow(address), name=f"peer {address}")

    async def _follow(self, address: str) -> None:
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
                except (grpc.RpcError, TimeoutError):
                    log.info("the router at %s is out of reach", address)
                finally:
                    call.cancel()
            await asyncio.sleep(backoff.next_s())

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        if self._server is not None:
            await self._server.stop()


def _work_of(report: peer_pb2.InflightReport) -> dict[WorkerId, Work]:
    return {
        WorkerId(one.worker_id): Work(one.num_requests, one.num_pages, one.prefill_tokens) for one in report.workers
    }
