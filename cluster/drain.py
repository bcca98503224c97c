"""One worker's way out of service: it gets no new requests, what can move moves, the rest ends where it is.

Routers stop choosing the worker because it leaves the membership, which the controller sees to; they keep the streams
that it has. Of a decode worker the running sequences go to others, KV and all, round after round; a prefill worker's
prompts end soon. Meanwhile the pages of its cache that are wanted most go to the workers that stay, since its traffic
goes there from the first moment on, and once it is empty those that have come since. Empty, or out of time, it may be
stopped: what it still has then, routers serve elsewhere.

Between the controller, which owns the pools, and the workers' own services; no Ray. Each round follows a report of
load, so nothing is polled.
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

from cluster.mover import Mover
from cluster.moves import Movable, Move, Room, plan_moves
from penstock.grpc_server import Dial, make_channel
from penstock.types import Member, Role
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0
_QUIET_REPORTS = 2  # with nothing open: a router may hear of the drain only after the first
_HANDOVER_SHARE = 4  # a part of a target's pool: what is cached there already is wanted, too
_HANDOVER_GRACE_S = 3.0  # for what is under way when the hand-over's time is up


class Stage(StrEnum):
    WAITING = "waiting"  # for a successor on another node: it still serves
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Progress:
    stage: Stage = Stage.DRAINING
    num_left: int = 0  # requests
    num_moved: int = 0
    num_failed_moves: int = 0
    num_cut_short: int = 0
    num_pages_handed: int = 0  # cached ones, that other workers have in their caches for it
    elapsed_s: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Handover:
    """Bounds of what a drained worker gives to other caches, each time."""

    max_bytes: int = 0  # none
    timeout_s: float = 0.0


class View(Protocol):
    """What a drain sees of the deployment."""

    def is_here(self, member: Member) -> bool:
        """Whether that incarnation still lives."""
        ...

    def load_of(self, member: Member) -> worker_pb2.Load | None:
        """Its last report; None where there is none."""
        ...

    def members(self, role: Role) -> Sequence[Member]:
        """That may be given what another one has: those that may be given requests, and stay."""
        ...

    async def next_report(self, member: Member) -> None:
        """Until it has reported again, or gone."""
        ...


class Drain:
    """Of one incarnation. `run` empties it; whoever runs it stops the worker and then calls `end`."""

    def __init__(
        self,
        member: Member,
        timeout_s: float,
        max_sequences: int,
        view: View,
        dial: Dial = make_channel,
        handover: Handover = Handover(),
    ) -> None:
        """`max_sequences` is what a decode worker holds at most."""
        self.member = member
        self.progress = Progress()
        self._mover = Mover(max_sequences, view, dial)
        self._view = view
        self._dial = dial
        self._handover = handover
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + timeout_s
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Returns once the worker has nothing left, is gone, or time is up."""
        try:
            async with asyncio.timeout(self._deadline_s - time.monotonic()), self._dial(self.member.address) as own:
                await asyncio.gather(self._empty(own), self._hand_over(own))
                await self._hand_over(own)  # what has been cached meanwhile
        except TimeoutError:
            log.warning("%s is not empty in time: %d requests left", self.member.worker_id, self.progress.num_left)
        left = self.progress.num_left
        detail = f"{left} requests go on elsewhere, computed anew" if left else ""
        self._tell(stage=Stage.STOPPING, num_cut_short=left, detail=detail)

    def end(self) -> None:
        """The worker is gone."""
        self._tell(stage=Stage.ENDED, num_left=0)

    async def follow(self) -> AsyncIterator[Progress]:
        """The progress now and after each change, until the end."""
        while True:
            changed, progress = self._changed, self.progress
            yield progress
            if progress.stage is Stage.ENDED:
                return
            if progress is self.progress:
                await changed.wait()

    async def _empty(self, own: grpc.aio.Channel) -> None:
        num_quiet = 0
        while num_quiet < _QUIET_REPORTS and self._view.is_here(self.member):
            load = self._view.load_of(self.member)
            if load is not None and load.num_open and self.member.role is Role.DECODE:
                await self._move_round(own)
            await self._view.next_report(self.member)
            load = self._view.load_of(self.member)
            if load is not None:
                self._tell(num_left=load.num_open)
                num_quiet = 0 if load.num_open else num_quiet + 1

    async def _move_round(self, own: grpc.aio.Channel) -> None:
        try:
            sequences = await self._mover.sequences(own)
            rooms = await self._mover.rooms(self.member, self._view.members(Role.DECODE)) if sequences else []
        except grpc.aio.AioRpcError as error:
            log.info("%s: a round of moves failed: %s", self.member.worker_id, error.details())
            return
        moves = plan_moves(sequences, rooms)
        self._tell(detail=_say_what_stays(sequences, rooms, moves))
        await asyncio.gather(*(self._migrate(own, move) for move in moves))

    async def _migrate(self, own: grpc.aio.Channel, move: Move) -> None:
        num_moved, num_failed = await self._mover.migrate(own, self.member, move)
        self._tell(
            num_moved=self.progress.num_moved + num_moved,
            num_failed_moves=self.progress.num_failed_moves + num_failed,
            num_left=max(0, self.progress.num_left - num_moved),
        )

    async def _hand_over(self, own: grpc.aio.Channel) -> None:
        """Whatever fails here costs prefills later on, and no request."""
        limits = self._handover
        if not limits.max_bytes or not limits.timeout_s or not self._view.is_here(self.member):
            return
        try:
            targets = await self._find_caches()
            if not targets:
                return
            request = worker_pb2.HandOverRequest(
                targets=targets,
                max_bytes=limits.max_bytes,
                timeout_ms=int(limits.timeout_s * 1e3),
                source_address=self.member.address,
            )
            stub = worker_pb2_grpc.PageHandoverStub(own)
            answer = await stub.HandOver(request, timeout=limits.timeout_s + _HANDOVER_GRACE_S)
        except grpc.aio.AioRpcError as error:
            log.info("%s: handing cached pages over failed: %s", self.member.worker_id, error.details())
            return
        for problem in answer.problems:
            log.info("%s: not every cached page was taken: %s", self.member.worker_id, problem)
        if answer.num_pages:
            seconds = answer.elapsed_ms / 1e3
            log.info("%s: %d cached pages handed over in %.3f s", self.member.worker_id, answer.num_pages, seconds)
        self._tell(num_pages_handed=self.progress.num_pages_handed + answer.num_pages)

    async def _find_caches(self) -> list[worker_pb2.HandOverTarget]:
        """Of the workers that will get its traffic, which have pages of the very same kind: revisions never mix."""
        own = await self._mover.describe(self.member)
        peers = [one for one in self._view.members(self.member.role) if one.epoch != self.member.epoch]
        if not peers and self.member.role is Role.PREFILL:
            peers = list(self._view.members(Role.DECODE))  # who compute prompts themselves from now on
        targets = []
        for member in peers:
            load = self._view.load_of(member)
            if load is None or (await self._mover.describe(member)).layout_digest != own.layout_digest:
                continue
            max_pages = load.total_pages // _HANDOVER_SHARE
            targets.append(
                worker_pb2.HandOverTarget(
                    worker_id=member.worker_id, epoch=member.epoch, address=member.address, max_pages=max_pages
                )
            )
        return targets

    def _tell(self, **changes: object) -> None:
        told = replace(self.progress, **changes)  # type: ignore[arg-type]
        if told != self.progress:
            self.progress = replace(told, elapsed_s=time.monotonic() - self._began_s)
            self._changed.set()
            self._changed = asyncio.Event()


def _say_what_stays(sequences: Sequence[Movable], rooms: Sequence[Room], moves: Sequence[Move]) -> str:
    staying = len(sequences) - sum(len(move.request_ids) for move in moves)
    if not staying:
        return ""
    reason = "have no room elsewhere, or end soon" if rooms else "have no other decode worker to go to"
    return f"{staying} running sequences {reason}; they end here"
