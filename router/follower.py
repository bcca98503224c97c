"""Follows one worker: who it is, its load and KV events, and for a decode worker the link. Reconnects until retired."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

import grpc
import grpc.aio

from penstock import wire
from penstock.errors import Unavailable
from penstock.grpc_server import Dial, log_level
from penstock.kv_events import KvEventBatch, decode_events
from penstock.types import Epoch, Member, Role, WorkerId, WorkerLoad
from penstock.v1 import worker_pb2, worker_pb2_grpc
from router.backoff import Backoff
from router.cost_model import CostBook
from router.health import FleetHealth
from router.inflight import InflightLedger
from router.link import Link
from router.prefix_index import PrefixIndex
from router.tickets import Tickets
from router.topology import LinkBook
from router.views import Limits

log = logging.getLogger(__name__)

_DESCRIBE_TIMEOUT_S = 5.0
_SILENCE_S = 10.0  # workers send a batch at least every second


class Follower:
    """Owns the channel to one worker and what is known of it. `member` is None where only the address is known."""

    def __init__(
        self,
        address: str,
        member: Member | None,
        index: PrefixIndex,
        ledger: InflightLedger,
        health: FleetHealth,
        costs: CostBook,
        links: LinkBook,
        tickets: Tickets,
        on_change: Callable[[], None],
        dial: Dial,
        on_load: Callable[[], None],
    ) -> None:
        self.address = address
        self.description = worker_pb2.WorkerDescription()
        self.worker_id = WorkerId("")
        self.limits = Limits()
        self.load = WorkerLoad()
        self.link: Link | None = None
        self.cohort = member.cohort if member else ""  # the membership may change it
        self.is_mute = False  # its cache is used and it tells nothing of it
        self._member = member
        self._index = index
        self._ledger = ledger
        self._health = health
        self._costs = costs
        self._links = links
        self._tickets = tickets
        self._on_change = on_change
        self._dial = dial
        self._on_load = on_load
        self._heard = False  # a load report has come since the connection was made
        self._doubts = False  # the index says what is not so
        self._retired = False
        self._task: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> Epoch:
        return Epoch(self.description.epoch)

    @property
    def page_size(self) -> int:
        return self.description.page_size

    @property
    def takes_work(self) -> bool:
        """Whether a request sent now would be served."""
        if self._retired or not self._heard or self.load.leaving:
            return False
        return self.description.role == Role.PREFILL or (self.link is not None and self.link.is_open)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"follow {self.address}")

    def retire(self) -> asyncio.Task[None]:
        """No new work for this worker; requests that it has may end. The task returned ends with the last of them."""
        self._retired = True
        self._forget_worker()
        self._on_change()
        return asyncio.create_task(self._finish(), name=f"retire {self.address}")

    def ask_anew(self) -> None:
        """The worker's cache is not what its events say: drops them, and has it told whole with the next batch."""
        log.warning("worker %s does not hold the pages that its events name; asking for all of them", self.worker_id)
        self._doubts = True

    async def stop(self) -> None:
        """At once; requests on the link are lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _finish(self) -> None:
        if self.link is not None:
            await self.link.wait_idle()
            await self._tickets.wait_idle(self.epoch)
        await self.stop()

    async def _run(self) -> None:
        backoff = Backoff(random.Random())
        while not self._retired:
            # A new channel each time: an old one would wait out its own, longer backoff.
            async with self._dial(self.address) as channel:
                try:
                    await self._describe(channel)
                    backoff.reset()
                    await self._follow(channel)
                except (grpc.RpcError, Unavailable, TimeoutError) as error:
                    log.log(log_level(error), "worker at %s is out of reach: %s", self.address, _reason(error))
                except Exception:
                    # Whatever went wrong in one answer: giving up would take a healthy worker out for good.
                    log.exception("following the worker at %s failed", self.address)
                finally:
                    self._heard = False
                    self._on_change()
            await asyncio.sleep(backoff.next_s())

    async def _describe(self, channel: grpc.aio.Channel) -> None:
        stub = worker_pb2_grpc.WorkerStub(channel)
        description = await stub.Describe(worker_pb2.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S)
        member = self._member
        if member is not None and (description.worker_id, description.epoch) != (member.worker_id, member.epoch):
            raise Unavailable(
                f"{self.address} is {description.worker_id} epoch {description.epoch}, "
                f"not {member.worker_id} epoch {member.epoch}"
            )
        if self.description.epoch not in (0, description.epoch):
            self._forget_worker()
        self.description = description
        self.worker_id = WorkerId(description.worker_id)
        self.limits = _limits(description)
        self._links.set_labels(self.worker_id, wire.labels_from_wire(description.labels))
        log.info("worker %s epoch %d: %s", description.worker_id, description.epoch, description.role)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        """Until the worker is lost: for a decode worker that is when its link breaks."""
        if self.description.role != Role.DECODE:
            await self._watch(channel)
            return
        self.link = Link(self.worker_id, self._on_change)
        watcher = asyncio.create_task(self._keep_watching(channel, self.link))
        try:
            await self.link.run(worker_pb2_grpc.DecodeWorkerStub(channel))
        finally:
            self._tickets.on_away(self.epoch)
            watcher.cancel()
            await asyncio.wait([watcher])

    async def _keep_watching(self, channel: grpc.aio.Channel, link: Link) -> None:
        """Events may break off while the link lives: requests go on, new ones go elsewhere until they are back."""
        backoff = Backoff(random.Random())
        while True:
            try:
                await self._watch(channel)
            except (grpc.RpcError, Unavailable, TimeoutError) as error:
                log.info("events of %s broke off: %s", self.worker_id, _reason(error))
            self._heard = False
            self._on_change()
            if not link.is_open:
                return
            await asyncio.sleep(backoff.next_s())

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Applies event batches; after a gap asks again from there. Raises when the stream breaks or falls silent."""
        stub = worker_pb2_grpc.WorkerStub(channel)
        while True:
            next_seq = self._index.next_seq(self.worker_id)
            wanted = worker_pb2.WatchEventsRequest(epoch=self.epoch, next_seq=next_seq, router=self._tickets.epoch)
            call = stub.WatchEvents(wanted)
            try:
                while (batch := await _read(call)) is not None:
                    if batch.epoch != self.epoch:
                        raise Unavailable(f"{self.address} is now epoch {batch.epoch}")
                    if not self._apply(batch):
                        break
                else:
                    raise Unavailable(f"{self.worker_id} ended its events")
            finally:
                call.cancel()

    def _apply(self, message: worker_pb2.EventBatch) -> bool:
        """False on a gap."""
        self._tickets.on_states(self.epoch, message.tickets)
        if self._retired:
            return True
        if self._doubts:
            self._doubts = False
            self._index.drop(self.worker_id)
            return False
        try:
            events = decode_events(message.payload)
        except ValueError as error:
            raise Unavailable(f"{self.worker_id} sent events that are none: {error}") from error
        num_merged = 0 if message.snapshot else max(0, message.num_events - len(events))
        num_strays = message.num_strays if message.HasField("num_strays") else None
        batch = KvEventBatch(
            message.first_seq, events, message.snapshot, num_merged, message.part, message.more, num_strays
        )
        if not self.description.silent_cache and not self._index.apply(self.worker_id, batch):
            log.info("events of %s are missing from %d on", self.worker_id, self._index.next_seq(self.worker_id))
            return False
        load = wire.load_from_wire(message.load)
        self._listen_for_silence(load)
        changed = load.leaving != self.load.leaving
        self.load = load
        self._ledger.on_report(self.worker_id, time.monotonic())
        self._costs.on_load(self.worker_id, self.load, self.description.page_size)
        self._on_load()
        if changed or (not self._heard and not message.more):
            self._heard = self._heard or not message.more
            self._on_change()
        return True

    def _listen_for_silence(self, load: WorkerLoad) -> None:
        """Cache hits of a worker that has told of no page yet: its events do not come, and nobody is sent there."""
        told = self.description.silent_cache or self._index.next_seq(self.worker_id) > 1
        told = told or self._index.pages_of(self.worker_id) > 0
        if self._heard and not told and not self.is_mute and load.cache.num_hits > self.load.cache.num_hits:
            log.warning("%s reports prefix cache hits but no KV events: it is taken for empty", self.worker_id)
            self.is_mute = True
        elif told:
            self.is_mute = False

    def _forget_worker(self) -> None:
        self._index.drop(self.worker_id)
        self._ledger.forget(self.worker_id)
        self._health.forget(self.epoch)
        self.is_mute = False
        self._costs.forget(self.worker_id)
        self._links.forget(self.worker_id)


def _limits(description: worker_pb2.WorkerDescription) -> Limits:
    max_local = description.max_local_tokens if description.HasField("max_local_tokens") else None
    return Limits(description.chunk_tokens, description.max_running, max_local)


async def _read(call: grpc.aio.UnaryStreamCall) -> worker_pb2.EventBatch | None:
    """None at the end."""
    # Not wait_for: before Python 3.12 it forgets a cancellation that comes together with a result.
    async with asyncio.timeout(_SILENCE_S):
        batch = await call.read()
        return None if batch is grpc.aio.EOF else batch


def _reason(error: Exception) -> str:
    return error.details() or "" if isinstance(error, grpc.aio.AioRpcError) else str(error) or "no answer"
