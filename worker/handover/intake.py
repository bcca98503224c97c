"""Receives batches of cached pages from other workers into this worker's prefix cache. Runs on the step loop.

Pages are reserved and fenced for a batch, which arrives like a prompt's KV and is cached once it is verified: its
manifest must match the announced hashes and the checksums of what arrived. No request waits for a batch, so it only
takes pages that this worker can spare, and is dropped on any problem. A fence is lifted only once the sender can no
longer write.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.engine import Engine
from kv_transfer.endpoints import KvReceiver
from kv_transfer.session.lease import Lease, Sweeper, heartbeat_s
from kv_transfer.session.transfer_session import ENDED, Effect, Manifest, TransferSession
from penstock.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    Overloaded,
    PenstockError,
    TransferRefused,
)
from penstock.types import Epoch, PageHash, PageId, TransferKey, WorkerId

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


class BatchReplies(Protocol):
    """Sends the answers to the source of one batch; `worker.handover.service.ReceivePagesCall` implements it."""

    def destination(self, wanted: Sequence[int], pages: Sequence[PageId]) -> None: ...

    def cached(self, num_pages: int) -> None: ...

    def refused(self, error: PenstockError) -> None: ...

    def compute(self, work: Callable[[], list[int]], then: Callable[[list[int] | None], None]) -> None:
        """Runs `work` on another thread and posts `then` to the step loop with its result, or None if it failed."""
        ...


@dataclass(slots=True, eq=False)
class _Batch:
    session: TransferSession
    replies: BatchReplies
    announced: list[tuple[PageHash, PageHash | None]]  # the wanted pages with their parents
    holds_pages: bool = True


class PageIntake:
    """Owns the open batches with their pages and fences."""

    def __init__(
        self,
        engine: Engine,
        open_receiver: Callable[[], KvReceiver],
        lease_s: float,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_receiver` blocks on its first call, when the first batch comes; `post` runs a call on the step loop."""
        self._engine = engine
        self._open_receiver = open_receiver
        self._lease_s = lease_s
        self._post = post
        self._clock = clock
        self._sweeper = Sweeper(heartbeat_s(lease_s))
        self._batches: dict[TransferKey, _Batch] = {}
        self._receiver: KvReceiver | None = None
        self.num_received = 0  # pages received and cached here

    @property
    def num_open(self) -> int:
        return len(self._batches)

    @property
    def _opened(self) -> KvReceiver:
        if self._receiver is None:
            raise InternalError("a batch came before an offer was made")
        return self._receiver

    @property
    def layout_digest(self) -> str:
        return self._engine.model_layout.digest()

    def owns(self, key: TransferKey) -> bool:
        """Returns whether the transfer belongs to a batch that is open here."""
        return key in self._batches

    def offer(self, peer: WorkerId, epoch: Epoch, num_ranks: int) -> bytes:
        """Returns the offer by which a source of `num_ranks` ranks can write here. Its first call blocks, so it must
        not run on the step loop. Raises TransferError.
        """
        self._receiver = self._open_receiver()
        return self._receiver.offer(peer, epoch, num_ranks)

    # Commands of the source.

    def begin(
        self,
        key: TransferKey,
        layout_digest: str,
        pages: Sequence[tuple[PageHash, PageHash | None]],
        replies: BatchReplies,
    ) -> None:
        """Answers a source that announces these (page, parent) pairs, with the wanted ones and their destinations or a
        refusal.
        """
        try:
            wanted, fresh = self._reserve(key, layout_digest, pages)
        except PenstockError as error:
            replies.refused(error)
            return
        if not wanted:
            replies.destination([], [])
            replies.cached(0)
            return
        session = TransferSession(key, Lease(self._lease_s, self._clock()))
        self._engine.pool.fence(fresh, key)
        try:
            self._opened.open(key, fresh, timeout_s=math.inf)  # the session's lease bounds it
        except PenstockError as error:  # the source was forgotten in the meantime
            self._engine.pool.lift(key)
            self._engine.pool.release(fresh)
            replies.refused(error)
            return
        self._batches[key] = _Batch(session, replies, [pages[index] for index in wanted])
        session.on_reserved(fresh, self._clock())
        replies.destination(wanted, fresh)

    def _reserve(
        self, key: TransferKey, layout_digest: str, pages: Sequence[tuple[PageHash, PageHash | None]]
    ) -> tuple[list[int], list[PageId]]:
        own, pool = self.layout_digest, self._engine.pool
        if layout_digest != own:
            raise TransferRefused(f"layout_digest is {layout_digest} at the source and {own} here; pages must match")
        if key in self._batches:
            raise InvalidInput("transfer", f"{key.transfer_id} is in use; give each batch its own id")
        wanted = self._engine.prefix_cache.lacking(pages)
        num_spare = pool.num_available - pool.num_reserve
        if wanted and num_spare <= 0:
            raise Overloaded("no page can be spared for another worker's cache now", _RETRY_AFTER_S)
        wanted = wanted[:num_spare]
        return wanted, pool.allocate(len(wanted))

    def on_manifest(
        self, key: TransferKey, num_pages: int, page_hashes: Sequence[PageHash], checksums: Sequence[int]
    ) -> None:
        """Records the expected content once every page has landed."""
        batch = self._batches.get(key)
        if batch is not None:
            manifest = Manifest(0, num_pages, tuple(page_hashes), tuple(checksums))
            self._apply(batch, batch.session.on_manifest(manifest))

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> None:
        """Records that the source has stopped writing; its last writes may still be in flight."""
        batch = self._batches.get(key)
        if batch is not None:
            effects = batch.session.on_closed()
            if error is None and batch.session.phase not in ENDED:
                self._apply(batch, effects)
            else:
                self._drop(batch, error, effects)

    # Events of the transport and of the fence keeper.

    def on_lost(self, key: TransferKey, error: PenstockError) -> None:
        """Handles a broken call or a failed transport; the source may still write."""
        batch = self._batches.get(key)
        if batch is not None:
            self._drop(batch, error)

    def on_quiesced(self, key: TransferKey) -> None:
        """Ends a batch whose source is gone or has confirmed that it has stopped writing."""
        batch = self._batches.get(key)
        if batch is not None:
            self._drop(batch, None, batch.session.on_sender_dead())

    def on_arrival(self, key: TransferKey, first_index: int, num_pages: int) -> None:
        batch = self._batches.get(key)
        if batch is not None:
            self._apply(batch, batch.session.on_arrival(first_index, num_pages, self._clock()))

    def _verify(self, batch: _Batch) -> None:
        manifest, pages = batch.session.manifest, batch.session.pages
        if manifest is None:
            raise InternalError(f"batch {batch.session.key.transfer_id} cannot be verified without a manifest")
        if list(manifest.page_hashes) != [page_hash for page_hash, _ in batch.announced] or not manifest.checksums:
            self._on_verified(batch, "its hashes differ from the announced ones")
            return
        receiver, expected = self._opened, list(manifest.checksums)

        def compare(found: list[int] | None) -> None:
            if found is None:
                self._on_verified(batch, "the checksums of its pages could not be computed here")
            else:
                self._on_verified(batch, "" if found == expected else "its checksums differ from the source's")

        batch.replies.compute(lambda: receiver.checksums(batch.session.key, pages), compare)

    def _on_verified(self, batch: _Batch, problem: str) -> None:
        session = batch.session
        if not batch.holds_pages:
            return  # it was dropped in the meantime
        effects = [*session.on_verified(not problem), *session.on_admitted()]
        if problem:
            log.error("dropped a batch of cached pages: %s", problem)
            self._drop(batch, InvalidInput("manifest", f"is refused: {problem}"), effects)
            return
        cache = self._engine.prefix_cache
        num_cached = sum(
            cache.graft(page_hash, parent, page)
            for (page_hash, parent), page in zip(batch.announced, session.pages, strict=True)
        )
        self.num_received += num_cached
        self._release(batch)
        self._apply(batch, effects)
        batch.replies.cached(num_cached)

    # The end of a batch.

    def sweep(self, now_s: float) -> float | None:
        """Drops batches whose sources have fallen silent; their fences stay. Returns when to sweep again."""
        if self._sweeper.is_due(now_s, bool(self._batches)):
            for batch in list(self._batches.values()):
                effects = batch.session.expire(now_s)
                if effects:
                    self._drop(batch, DeadlineExceeded(f"no page arrived for {self._lease_s:g} s"), effects)
            deadlines_s = (batch.session.deadline_s for batch in self._batches.values())
            self._sweeper.looked(now_s, (deadline_s for deadline_s in deadlines_s if deadline_s is not None))
        return self._sweeper.next_s

    def _drop(self, batch: _Batch, error: PenstockError | None, effects: Iterable[Effect] = ()) -> None:
        """Ends a batch; pages that are not cached yet never will be."""
        if batch.holds_pages:
            self._release(batch)
            batch.replies.refused(error or Cancelled("the source cancelled the batch"))
        self._apply(batch, [*effects, *batch.session.on_abort()])

    def _release(self, batch: _Batch) -> None:
        batch.holds_pages = False
        self._engine.pool.release(batch.session.pages)

    def _apply(self, batch: _Batch, effects: Iterable[Effect]) -> None:
        key, verify, receiver = batch.session.key, False, self._opened
        for effect in effects:
            match effect:
                case Effect.VERIFY:
                    verify = True  # last, when the fence has been lifted
                case Effect.CANCEL:
                    pass  # `refused` has already informed the source
                case Effect.CLOSE:
                    receiver.close(key)
                    del self._batches[key]
                case Effect.LIFT if batch.session.landed:
                    self._engine.pool.lift(key)
                case Effect.LIFT:
                    receiver.after_stray_writes(lambda: self._post(lambda: self._engine.pool.lift(key)))
        if verify:
            self._verify(batch)
