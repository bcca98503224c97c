"""Empties one worker: no new requests, running sequences migrate, hot cached pages are handed over.

Routers stop choosing the worker because the controller removes it from the membership; they keep their open streams.
A decode worker's running sequences migrate with their KV, round after round; a prefill worker's prompts end soon.
Meanwhile the hottest pages of its cache are handed over to the remaining workers, which receive its traffic at once;
pages cached since then follow when it is empty. A worker that is empty or out of time may be stopped; routers then
dispatch the requests that it still holds to other workers.

Runs between the controller, which owns the pools, and the workers' own services; no Ray. Each round follows a load
report, so nothing is polled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import grpc.aio

from cluster.lifecycle.migrate.migration_calls import MigrationCalls
from cluster.lifecycle.migrate.migration_policy import (
    MigratableSequence,
    PlannedMigration,
    TargetRoom,
    plan_migrations,
)
from cluster.lifecycle.progress import ProgressStream
from penstock.rpc.server import Dial, make_channel
from penstock.types import Member, Role
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0
_SETTLE_S = 0.1  # for what a router sent to an empty worker just before it learned of the drain
_ROUTERS_S = 1.0  # how long an empty worker waits for routers that still follow it, such as a frozen one
_HANDOVER_SHARE = 4  # at most a quarter of a target's pool: its own cached pages are wanted too
_HANDOVER_GRACE_S = 3.0  # for the batch in flight when the hand-over's time is up


class DrainStage(StrEnum):
    """The present stage of a drain."""

    WAITING = "waiting"  # for a successor on another node; the worker still serves
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """The state of a drain at one moment."""

    stage: DrainStage = DrainStage.DRAINING
    num_left: int = 0  # requests
    num_migrated: int = 0  # sequences that migrated
    num_failed_migrations: int = 0
    num_cut_short: int = 0  # requests still open when the worker is stopped
    num_pages_handed: int = 0  # cached pages that other workers now hold
    elapsed_s: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class HandoverBounds:
    """Limits of each hand-over of cached pages to other workers; 0 bytes or 0 seconds disable it."""

    max_bytes: int = 0
    timeout_s: float = 0.0


class WorkerLoads(Protocol):
    """The part of the deployment that a drain sees."""

    def is_here(self, member: Member) -> bool:
        """Returns whether that incarnation still lives."""
        ...

    def load_of(self, member: Member) -> worker_pb2.Load | None:
        """Returns its latest report, or None."""
        ...

    def members(self, role: Role) -> Sequence[Member]:
        """Returns the workers that may be given requests, and so may receive sequences and pages."""
        ...

    async def next_report(self, member: Member, seen: worker_pb2.Load | None) -> None:
        """Returns once its latest report is another one than `seen`, or the worker is gone."""
        ...


class Drain:
    """The drain of one incarnation. `run` empties it; the caller then stops the worker and calls `end`."""

    def __init__(
        self,
        member: Member,
        timeout_s: float,
        max_sequences: int,
        view: WorkerLoads,
        dial: Dial = make_channel,
        handover: HandoverBounds = HandoverBounds(),
    ) -> None:
        """`max_sequences` is what a decode worker holds at most."""
        self.member = member
        self._calls = MigrationCalls(max_sequences, view, dial)
        self._view = view
        self._dial = dial
        self._handover = handover
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + timeout_s
        self._stream = ProgressStream(DrainProgress(), lambda progress: progress.stage is DrainStage.ENDED)

    @property
    def progress(self) -> DrainProgress:
        return self._stream.latest

    def follow(self) -> AsyncIterator[DrainProgress]:
        """Yields the progress now and after each change, until the end."""
        return self._stream.follow()

    async def run(self) -> None:
        """Returns when the worker holds nothing, is gone, or the time is up."""
        try:
            async with asyncio.timeout(self._deadline_s - time.monotonic()), self._dial(self.member.address) as channel:
                await asyncio.gather(self._empty(channel), self._hand_over(channel))
                await self._hand_over(channel)  # pages cached since the first hand-over
        except TimeoutError:
            log.warning("%s was not empty in time: %d requests left", self.member.worker_id, self.progress.num_left)
        left = self.progress.num_left
        detail = f"{left} requests are recomputed elsewhere" if left else ""
        self._update(stage=DrainStage.STOPPING, num_cut_short=left, detail=detail)

    def end(self) -> None:
        """Marks the drain as over: the worker is gone."""
        self._update(stage=DrainStage.ENDED, num_left=0)

    async def _empty(self, channel: grpc.aio.Channel) -> None:
        """Returns when the worker holds nothing and gets nothing any more, or is gone."""
        empty_since_s: float | None = None
        while self._view.is_here(self.member):
            seen = self._view.load_of(self.member)
            if seen is not None and seen.num_open and self.member.role is Role.DECODE:
                await self._migrate_round(channel)
            await self._view.next_report(self.member, seen)
            load = self._view.load_of(self.member)
            if load is None:
                continue
            self._update(num_left=load.num_open)
            if load.num_open:
                empty_since_s = None
                continue
            empty_since_s = empty_since_s or time.monotonic()
            if time.monotonic() - empty_since_s >= _ROUTERS_S or (_has_no_router(load) and await self._stays_empty()):
                return

    async def _stays_empty(self) -> bool:
        """Returns whether the worker still holds nothing after `_SETTLE_S`."""
        await asyncio.sleep(_SETTLE_S)
        load = self._view.load_of(self.member)
        return load is None or not load.num_open

    async def _migrate_round(self, channel: grpc.aio.Channel) -> None:
        try:
            sequences = await self._calls.list_sequences(channel)
            rooms = await self._calls.find_rooms(self.member, self._view.members(Role.DECODE)) if sequences else []
        except grpc.aio.AioRpcError as error:
            log.info("%s: a round of migrations failed: %s", self.member.worker_id, error.details())
            return
        migrations = plan_migrations(sequences, rooms)
        self._update(detail=_describe_staying(sequences, rooms, migrations))
        await asyncio.gather(*(self._migrate(channel, migration) for migration in migrations))

    async def _migrate(self, channel: grpc.aio.Channel, migration: PlannedMigration) -> None:
        num_migrated, num_failed = await self._calls.migrate(channel, self.member, migration)
        self._update(
            num_migrated=self.progress.num_migrated + num_migrated,
            num_failed_migrations=self.progress.num_failed_migrations + num_failed,
            num_left=max(0, self.progress.num_left - num_migrated),
        )

    async def _hand_over(self, channel: grpc.aio.Channel) -> None:
        """Hands hot cached pages over. A failure costs later prefills, never a request."""
        bounds = self._handover
        if not bounds.max_bytes or not bounds.timeout_s or not self._view.is_here(self.member):
            return
        try:
            targets = await self._find_handover_targets()
            if not targets:
                return
            request = worker_pb2.HandOverRequest(
                targets=targets,
                max_bytes=bounds.max_bytes,
                timeout_ms=int(bounds.timeout_s * 1e3),
                source_address=self.member.address,
            )
            stub = worker_pb2_grpc.PageHandoverStub(channel)
            response = await stub.HandOver(request, timeout=bounds.timeout_s + _HANDOVER_GRACE_S)
        except grpc.aio.AioRpcError as error:
            log.info("%s: cached pages could not be handed over: %s", self.member.worker_id, error.details())
            return
        for problem in response.problems:
            log.info("%s: not every cached page was handed over: %s", self.member.worker_id, problem)
        if response.num_pages:
            elapsed_s = response.elapsed_ms / 1e3
            log.info("%s: %d cached pages handed over in %.3f s", self.member.worker_id, response.num_pages, elapsed_s)
        self._update(num_pages_handed=self.progress.num_pages_handed + response.num_pages)

    async def _find_handover_targets(self) -> list[worker_pb2.HandOverTarget]:
        """Returns the workers that will receive its traffic and have exactly its layout: revisions never mix."""
        own = await self._calls.describe(self.member)
        peers = [member for member in self._view.members(self.member.role) if member.epoch != self.member.epoch]
        if not peers and self.member.role is Role.PREFILL:
            peers = list(self._view.members(Role.DECODE))  # from now on they compute prompts themselves
        targets = []
        for member in peers:
            load = self._view.load_of(member)
            if load is None or (await self._calls.describe(member)).layout_digest != own.layout_digest:
                continue
            max_pages = load.total_pages // _HANDOVER_SHARE
            targets.append(
                worker_pb2.HandOverTarget(
                    worker_id=member.worker_id, epoch=member.epoch, address=member.address, max_pages=max_pages
                )
            )
        return targets

    def _update(self, **changes: object) -> None:
        changed = replace(self.progress, **changes)  # type: ignore[arg-type]
        if changed != self.progress:
            self._stream.update(replace(changed, elapsed_s=time.monotonic() - self._began_s))


def _has_no_router(load: worker_pb2.Load) -> bool:
    """Returns whether every router has left the worker; unknown of a worker with older code."""
    return load.HasField("num_routers") and not load.num_routers


def _describe_staying(
    sequences: Sequence[MigratableSequence], rooms: Sequence[TargetRoom], migrations: Sequence[PlannedMigration]
) -> str:
    num_staying = len(sequences) - sum(len(migration.request_ids) for migration in migrations)
    if not num_staying:
        return ""
    reason = "have no room elsewhere, or end soon" if rooms else "have no other decode worker to go to"
    return f"{num_staying} running sequences {reason}; they end here"
