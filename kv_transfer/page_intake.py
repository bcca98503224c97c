"""Cached pages that come from other workers, until they are in the prefix cache here. Runs on the step loop.

A batch gets pages reserved and fenced, arrives like a prompt's KV, and is cached once it is verified: the hashes and
checksums of the manifest are those that were announced and those of what arrived. Nobody waits for it, so it takes
only what this worker can spare, and whatever goes wrong ends it without a trace. As everywhere, only a sender that is
over lets a fence be lifted.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.engine import Engine
from kv_transfer.group_receiver import GroupReceiver
from kv_transfer.lease import Lease, Sweeper, heartbeat_s
from kv_transfer.session import ENDED, Effect, Manifest, TransferSession
from penstock.errors import Cancelled, DeadlineExceeded, InvalidInput, Overloaded, PenstockError, TransferRefused
from penstock.types import Epoch, PageHash, PageId, TransferKey, WorkerId

log = logging.getLogger(__name__)

_WATERMARK = 16  # a part of the pool that stays available for those who are served here
_RETRY_AFTER_S = 1.0


class TakeCall(Protocol):
    """The way back to the source; `handover_service.TakeCall`."""

    def destination(self, wanted: Sequence[int], pages: Sequence[PageId]) -> None: ...

    def taken(self, num_pages: int) -> None: ...

    def refused(self, error: PenstockError) -> None: ...

    def compute(self, work: Callable[[], list[int]], then: Callable[[list[int]], None]) -> None:
        """Runs `work` on some thread and posts `then` to the step loop."""
        ...


@dataclass(slots=True, eq=False)
class _Batch:
    session: TransferSession
    call: TakeCall
    announced: list[tuple[PageHash, PageHash | None]]  # those that are to come, with their parents
    holds: bool = True  # references on its pages


class PageIntake:
    """Implements `handover_service.Intake`. Owns the batches, their pages and fences."""

    def __init__(
        self,
        engine: Engine,
        make_receiver: Callable[[], GroupReceiver],
        lease_s: float,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make_receiver` is called when the first batch comes; `post` runs a call on the step loop."""
        self._engine = engine
        self._make_receiver = make_receiver
        self._lease_s = lease_s
        self._post = post
        self._clock = clock
        self._sweeper = Sweeper(heartbeat_s(lease_s))
        self._batches: dict[TransferKey, _Batch] = {}
        self._making = threading.Lock()
        self._receiver: GroupReceiver | None = None
        self.num_taken = 0  # pages

    @property
    def num_open(self) -> int:
        return len(self._batches)

    @property
    def layout_digest(self) -> str:
        return self._engine.model_layout.digest()

    def offer(self, peer: WorkerId, epoch: Epoch, num_ranks: int) -> bytes:
        """How the source, of so many ranks, can write here. Blocks where it is the first one; not on the step loop.
        Raises TransferError."""
        with self._making:
            self._receiver = self._receiver or self._make_receiver()
        return self._receiver.offer(peer, epoch, num_ranks)

    def shutdown(self) -> None:
        with self._making:
            if self._receiver is not None:
                self._receiver.shutdown()

    # What the source says.

    def ask(
        self,
        key: TransferKey,
        layout_digest: str,
        pages: Sequence[tuple[PageHash, PageHash | None]],
        call: TakeCall,
    ) -> None:
        """The source has these (page, parent): it is told which are wanted and where they go, or refused."""
        try:
            wanted, fresh = self._reserve(key, layout_digest, pages)
        except PenstockError as error:
            call.refused(error)
            return
        if not wanted:
            call.destination([], [])
            call.taken(0)
            return
        session = TransferSession(key, Lease(self._lease_s, self._clock()))
        self._batches[key] = _Batch(session, call, [pages[index] for index in wanted])
        assert self._receiver is not None
        self._engine.pool.fence(fresh, key)
        self._receiver.open(key, fresh, timeout_s=math.inf)  # the session's lease bounds it
        session.on_reserved(fresh, self._clock())
        call.destination(wanted, fresh)

    def _reserve(
        self, key: TransferKey, layout_digest: str, pages: Sequence[tuple[PageHash, PageHash | None]]
    ) -> tuple[list[int], list[PageId]]:
        own, pool = self.layout_digest, self._engine.pool
        if layout_digest != own:
            raise TransferRefused(f"layout_digest is {layout_digest} at the source and {own} here; nothing is taken")
        if key in self._batches:
            raise InvalidInput("transfer", f"{key.transfer_id} is known already; give each batch its own id")
        wanted = self._engine.prefix_cache.lacking(pages)
        room = pool.num_available - pool.num_pages // _WATERMARK
        if wanted and room <= 0:
            raise Overloaded("no page can be spared for a peer's cache now", _RETRY_AFTER_S)
        wanted = wanted[:room]
        return wanted, pool.allocate(len(wanted))

    def on_told(
        self, key: TransferKey, num_pages: int, page_hashes: Sequence[PageHash], checksums: Sequence[int]
    ) -> None:
        """The manifest: what must be here once every page has landed."""
        batch = self._batches.get(key)
        if batch is not None:
            manifest = Manifest(0, num_pages, tuple(page_hashes), tuple(checksums))
            self._apply(batch, batch.session.on_manifest(manifest))

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> None:
        """The source writes no more. What it has sent may still be on its way."""
        batch = self._batches.get(key)
        if batch is not None:
            effects = batch.session.on_closed()
            if error is None and batch.session.phase not in ENDED:
                self._apply(batch, effects)
            else:
                self._end(batch, error, effects)

    def on_lost(self, key: TransferKey, error: PenstockError) -> None:
        """The call broke, or the wire failed: the source may still write."""
        batch = self._batches.get(key)
        if batch is not None:
            self._end(batch, error)

    def on_quiesced(self, key: TransferKey) -> None:
        """The source's incarnation is over, or has told that it writes no more."""
        batch = self._batches.get(key)
        if batch is not None:
            self._end(batch, None, batch.session.on_sender_dead())

    # Arrival.

    def on_arrival(self, key: TransferKey, first_index: int, num_pages: int) -> None:
        batch = self._batches.get(key)
        if batch is not None:
            self._apply(batch, batch.session.on_arrival(first_index, num_pages, self._clock()))

    def _verify(self, batch: _Batch) -> None:
        manifest, pages = batch.session.manifest, batch.session.pages
        assert manifest is not None
        if list(manifest.page_hashes) != [page_hash for page_hash, _ in batch.announced] or not manifest.checksums:
            self._on_verified(batch, "its hashes are not those that were announced")
            return
        receiver, told = self._receiver, list(manifest.checksums)
        assert receiver is not None

        def compare(found: list[int]) -> None:
            self._on_verified(batch, "" if found == told else "its checksums differ from the source's")

        batch.call.compute(lambda: receiver.checksums(batch.session.key, pages), compare)

    def _on_verified(self, batch: _Batch, problem: str) -> None:
        session = batch.session
        if not batch.holds:
            return  # it was given up meanwhile
        effects = [*session.on_verified(not problem), *session.on_admitted()]
        if problem:
            log.error("a batch of cached pages is dropped: %s", problem)
            self._end(batch, InvalidInput("manifest", f"is refused: {problem}"), effects)
            return
        cache = self._engine.prefix_cache
        num_grafted = sum(
            cache.graft(page_hash, parent, page)
            for (page_hash, parent), page in zip(batch.announced, session.pages, strict=True)
        )
        self.num_taken += num_grafted
        self._let_go(batch)
        self._apply(batch, effects)
        batch.call.taken(num_grafted)

    # The end.

    def sweep(self, now_s: float) -> float | None:
        """Ends the wait for sources that have fallen silent; their fences stay. When to look again."""
        if self._sweeper.is_due(now_s, bool(self._batches)):
            for batch in list(self._batches.values()):
                effects = batch.session.expire(now_s)
                if effects:
                    self._end(batch, DeadlineExceeded(f"no page for {self._lease_s:g} s"), effects)
            deadlines = (batch.session.deadline_s for batch in self._batches.values())
            self._sweeper.looked(now_s, (one_s for one_s in deadlines if one_s is not None))
        return self._sweeper.next_s

    def _end(self, batch: _Batch, error: PenstockError | None, effects: Iterable[Effect] = ()) -> None:
        """Whatever has not been cached by now will not be."""
        if batch.holds:
            self._let_go(batch)
            batch.call.refused(error or Cancelled("the source gave it up"))
        self._apply(batch, [*effects, *batch.session.on_abort()])

    def _let_go(self, batch: _Batch) -> None:
        batch.holds = False
        self._engine.pool.release(batch.session.pages)

    def _apply(self, batch: _Batch, effects: Iterable[Effect]) -> None:
        key, verify = batch.session.key, False
        assert self._receiver is not None
        for effect in effects:
            match effect:
                case Effect.VERIFY:
                    verify = True  # last: the fence is lifted by then
                case Effect.CANCEL:
                    pass  # `refused` has told the source
                case Effect.CLOSE:
                    self._receiver.close(key)
                    del self._batches[key]
                case Effect.LIFT if batch.session.landed:
                    self._engine.pool.lift(key)
                case Effect.LIFT:
                    self._receiver.when_quiet(lambda: self._post(lambda: self._engine.pool.lift(key)))
        if verify:
            self._verify(batch)
