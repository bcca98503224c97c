"""Follows one worker's description, load and KV events and, for a decode worker, runs the link that carries tokens.

Reconnects until the worker is retired.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import grpc
import grpc.aio

from penstock import wire
from penstock.errors import Unavailable
from penstock.kv.events import KvEventBatch, decode_events
from penstock.kv.page_hash import HASH_BYTES
from penstock.rpc.server import Dial, log_level
from penstock.types import Member, PageHash, Role, WorkerId, WorkerLoad
from penstock.v1 import worker_pb2, worker_pb2_grpc
from router.fleet.backoff import Backoff
from router.fleet.decode_link import DecodeLink
from router.fleet.fleet_worker import FleetWorker, WorkerRecords
from router.routing.policy.interface import WorkerLimits

log = logging.getLogger(__name__)

_DESCRIBE_TIMEOUT_S = 5.0
_SILENCE_S = 10.0  # workers send a batch at least every second


class WorkerFollower(FleetWorker):
    """Owns the channel to one of our own workers."""

    def __init__(
        self,
        address: str,
        member: Member | None,
        records: WorkerRecords,
        dial: Dial,
        *,
        on_change: Callable[[], None],
        on_load: Callable[[], None],
    ) -> None:
        """`member` is None if only the address is known."""
        cohort = member.cohort if member else ""
        super().__init__(address, WorkerId(""), cohort, records, on_change=on_change, on_load=on_load)
        self._link: DecodeLink | None = None
        self._member = member
        self._dial = dial
        self._needs_snapshot = False  # set when the index was found wrong about the worker's cache

    @property
    def link(self) -> DecodeLink | None:
        return self._link

    @property
    def takes_work(self) -> bool:
        if not super().takes_work or self.load.leaving:
            return False
        return self.description.role == Role.PREFILL or (self._link is not None and self._link.is_open)

    def request_snapshot(self) -> None:
        """Drops the worker's pages from the index when its next batch arrives, and then requests a snapshot."""
        log.warning("worker %s lacks pages that its events announced; requesting a snapshot", self.worker_id)
        self._needs_snapshot = True

    async def _run(self) -> None:
        backoff = Backoff(random.Random())
        while not self._retired:
            # An old channel would first wait out its own, longer backoff: open a new one each time.
            async with self._dial(self.address) as channel:
                try:
                    await self._describe(channel)
                    backoff.reset()
                    await self._follow_all(channel)
                except (grpc.RpcError, Unavailable, TimeoutError) as error:
                    log.log(log_level(error), "worker at %s is unreachable: %s", self.address, _reason(error))
                except Exception:
                    # A single bad answer must not end this task, which would exclude a healthy worker for good.
                    log.exception("following the worker at %s failed", self.address)
                finally:
                    self._has_reported = False
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
            self._forget()
        self.description = description
        self.worker_id = WorkerId(description.worker_id)
        self.limits = _limits(description)
        for links in (self._records.links, self._records.pulls.links):
            links.set_labels(self.worker_id, wire.labels_from_wire(description.labels))
        log.info("worker %s epoch %d: %s", description.worker_id, description.epoch, description.role)

    async def _follow_all(self, channel: grpc.aio.Channel) -> None:
        """Follows the worker and its shared store. Returns or raises when the worker is lost."""
        store = asyncio.create_task(self._follow_store(channel))
        try:
            await self._follow(channel)
        finally:
            store.cancel()
            await asyncio.wait([store])

    async def _follow_store(self, channel: grpc.aio.Channel) -> None:
        """Records what the worker's shared store holds, if it has one and no other worker reports that store."""
        backoff, stub = Backoff(random.Random()), worker_pb2_grpc.WorkerStub(channel)
        while (store := self.store) is not None:
            async with self._records.store_turns[store]:
                try:
                    async for runs in stub.WatchStore(worker_pb2.WatchStoreRequest()):
                        backoff.reset()
                        self._records.stored.apply(store, _hashes(runs.added), _hashes(runs.removed))
                except grpc.RpcError as error:
                    log.info("the report of %s about its store ended: %s", self.worker_id, _reason(error))
                finally:
                    self._records.stored.drop(store)
            await asyncio.sleep(backoff.next_s())

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        """Returns or raises when the worker is lost; a decode worker is lost when its link breaks."""
        if self.description.role != Role.DECODE:
            await self._watch(channel)
            return
        self._link = DecodeLink(self.worker_id, self._on_change)
        watcher = asyncio.create_task(self._keep_watching(channel, self._link))
        try:
            await self._link.run(worker_pb2_grpc.DecodeWorkerStub(channel))
        finally:
            self._records.tickets.on_away(self.epoch)
            watcher.cancel()
            await asyncio.wait([watcher])

    async def _keep_watching(self, channel: grpc.aio.Channel, link: DecodeLink) -> None:
        """Watches events while the link is open. If the event stream breaks, running requests continue, but the worker
        gets no new ones until events resume.
        """
        backoff = Backoff(random.Random())
        while True:
            try:
                await self._watch(channel)
            except (grpc.RpcError, Unavailable, TimeoutError) as error:
                log.info("the event stream of %s ended: %s", self.worker_id, _reason(error))
            self._has_reported = False
            self._on_change()
            if not link.is_open:
                return
            await asyncio.sleep(backoff.next_s())

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Applies event batches; after a gap, requests events from there again. Raises when the stream breaks or is
        silent for too long.
        """
        stub = worker_pb2_grpc.WorkerStub(channel)
        while True:
            next_seq = self._records.index.next_seq(self.worker_id)
            router = self._records.tickets.epoch
            call = stub.WatchEvents(worker_pb2.WatchEventsRequest(epoch=self.epoch, next_seq=next_seq, router=router))
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
        """Returns False if events must be requested again, because of a gap or for a snapshot."""
        records = self._records
        records.tickets.on_states(self.epoch, message.tickets)
        if self._retired:
            self.load = wire.load_from_wire(message.load)  # for the live page
            return True
        if self._needs_snapshot:
            self._needs_snapshot = False
            records.index.drop(self.worker_id)
            return False
        batch = self._decode(message)
        if not self.description.silent_cache and not records.index.apply(self.worker_id, batch):
            log.info(
                "events of %s are missing from number %d on", self.worker_id, records.index.next_seq(self.worker_id)
            )
            return False
        load = wire.load_from_wire(message.load)
        self._detect_missing_events(load)
        changed = load.leaving != self.load.leaving
        self._take_load(load)
        if changed or (not self._has_reported and not message.more):
            self._has_reported = self._has_reported or not message.more
            self._on_change()
        return True

    def _decode(self, message: worker_pb2.EventBatch) -> KvEventBatch:
        try:
            events = decode_events(message.payload)
        except ValueError as error:
            raise Unavailable(f"{self.worker_id} sent events that cannot be decoded: {error}") from error
        num_merged = 0 if message.snapshot else max(0, message.num_events - len(events))
        num_strays = message.num_strays if message.HasField("num_strays") else None
        return KvEventBatch(
            message.first_seq, events, message.snapshot, num_merged, message.part, message.more, num_strays
        )

    def _detect_missing_events(self, load: WorkerLoad) -> None:
        """Marks a worker as mute if it reports new cache hits but has sent no page event: its cache counts as empty."""
        index = self._records.index
        has_events = self.description.silent_cache or index.next_seq(self.worker_id) > 1
        has_events = has_events or index.pages_of(self.worker_id) > 0
        has_new_hits = load.cache.num_hits > self.load.cache.num_hits
        if self._has_reported and not has_events and not self.is_mute and has_new_hits:
            log.warning(
                "worker %s reports prefix cache hits but sends no KV events; its cache counts as empty", self.worker_id
            )
            self.is_mute = True
        elif has_events:
            self.is_mute = False


def _limits(description: worker_pb2.WorkerDescription) -> WorkerLimits:
    max_local = description.max_local_tokens if description.HasField("max_local_tokens") else None
    return WorkerLimits(
        description.chunk_tokens,
        description.max_running,
        max_local,
        description.max_held_tokens,
        itl_target_s=description.itl_target_s,
    )


async def _read(call: grpc.aio.UnaryStreamCall) -> worker_pb2.EventBatch | None:
    """Returns the next batch, or None at the end of the stream. Raises TimeoutError if the worker stays silent."""
    # Not wait_for: before Python 3.12 it swallows a cancellation that arrives together with a result.
    async with asyncio.timeout(_SILENCE_S):
        batch = await call.read()
        return None if batch is grpc.aio.EOF else batch


def _hashes(joined: bytes) -> list[PageHash]:
    return [PageHash(joined[start : start + HASH_BYTES]) for start in range(0, len(joined), HASH_BYTES)]


def _reason(error: Exception) -> str:
    return error.details() or "" if isinstance(error, grpc.aio.AioRpcError) else str(error) or "no answer"
