"""Pushes cached pages into other workers' caches and references the pages meanwhile. Runs on the step loop.

A handed-over page is full and cached, so it never changes. Its reference is held until the sender is done with it, even
if the hand-over is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.engine import Engine
from kv_transfer.endpoints import KvSender
from kv_transfer.ranks.head_routes import split_offer
from penstock.errors import PenstockError
from penstock.types import CachedPage, Epoch, HandoverTarget, Lane, PageHash, PageId, TransferKey
from worker.handover.policy import assign_pages

OnSent = Callable[[PenstockError | None], None]


@dataclass(slots=True)
class _Push:
    on_sent: OnSent
    error: PenstockError | None = None


class PageSource:
    """Owns the pushes of pages that are being handed over, and the references to these pages."""

    def __init__(self, engine: Engine, sender: KvSender) -> None:
        self._engine = engine
        self._sender = sender
        self._pushes: dict[TransferKey, _Push] = {}

    @property
    def page_bytes(self) -> int:
        return self._engine.model_layout.page_bytes

    @property
    def layout_digest(self) -> str:
        return self._engine.model_layout.digest()

    @property
    def num_ranks(self) -> int:
        return self._engine.num_ranks

    def pick(self, targets: Sequence[HandoverTarget], max_pages: int) -> dict[Epoch, list[CachedPage]]:
        """Chooses at most `max_pages` pages in total, the hottest first for each target; the caller must `release`
        them. Pages with two parts stay here, also in `take`.
        """
        if self._engine.pool.parts is not None:
            return {}
        found = self._engine.prefix_cache.hottest(max_pages)
        chosen = assign_pages([(page.page_hash, page.parent) for page in found], targets)
        picked: dict[Epoch, list[CachedPage]] = {}
        for epoch, indexes in chosen.items():
            picked[epoch] = [found[index] for index in indexes[:max_pages]]
            max_pages -= len(picked[epoch])
            self._engine.pool.share([page.page for page in picked[epoch]])
        return picked

    def take(self, hashes: Sequence[PageHash]) -> list[CachedPage]:
        """Returns these consecutive pages up to the first one that is not cached; the caller must `release` them."""
        found = self._engine.prefix_cache.find(hashes) if self._engine.pool.parts is None else []
        self._engine.pool.share([page.page for page in found])
        return found

    def release(self, pages: Sequence[CachedPage]) -> None:
        self._engine.pool.release([page.page for page in pages])

    def push(
        self,
        key: TransferKey,
        offer: bytes,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        on_sent: OnSent,
        lane: Lane = Lane.BULK,
    ) -> None:
        """Starts to write the pages; calls `on_sent` once, with the outcome, when the last write is over.

        Raises TransferError or TransferRefused before anything is written.
        """
        self._sender.open(key, offer, lane)
        self._pushes[key] = _Push(on_sent)
        tokens = range(len(src_pages) * self._engine.layout.page_size)  # pages have the same size at both ends
        self._sender.push_tokens(key, 0, tokens, src_pages, dst_pages)
        self._sender.finish(key)

    def checksums(self, pages: Sequence[PageId], offer: bytes) -> list[int]:
        """Returns the checksums that the receiver behind `offer` will compute. Blocks; may run on any thread, since
        nothing writes the pages. Raises TransferError."""
        _, num_receivers, _ = split_offer(offer)
        return self._sender.checksums(pages, num_receivers)

    def abort(self, key: TransferKey) -> None:
        """Stops a push after the writes that have started; its `on_sent` follows."""
        if key in self._pushes:
            self._sender.abort(key)

    def owns(self, key: TransferKey) -> bool:
        """Returns whether the transfer is a push of cached pages that has not ended."""
        return key in self._pushes

    # Reports of the sender about a push that is owned here.

    def on_failed(self, key: TransferKey, error: PenstockError) -> None:
        self._pushes[key].error = error

    def on_sent(self, key: TransferKey) -> None:
        push = self._pushes.pop(key)
        push.on_sent(push.error)
