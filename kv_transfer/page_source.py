"""Cached pages on their way to other workers' caches: references on them, and their pushes. Runs on the step loop.

A page that is handed over is full and cached, so nothing writes it any more; it is referenced until the sender is done
with it, whoever has lost interest meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.engine import Engine
from kv_transfer.group_sender import GroupSender
from kv_transfer.handover_plan import assign
from kv_transfer.strands import split_offer
from penstock.errors import PenstockError
from penstock.types import CachedPage, Epoch, HandoverTarget, Lane, PageId, TransferKey

OnSent = Callable[[PenstockError | None], None]


@dataclass(slots=True)
class _Push:
    on_sent: OnSent
    error: PenstockError | None = None


class PageSource:
    """Implements `handover_client.Source`. Owns the references of what is handed over."""

    def __init__(self, engine: Engine, sender: GroupSender) -> None:
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
        """What each target is to get, hottest first; at most `max_pages` in all, which the caller has to `release`."""
        found = self._engine.prefix_cache.hottest(max_pages)
        chosen = assign([(one.page_hash, one.parent) for one in found], targets)
        picked: dict[Epoch, list[CachedPage]] = {}
        for epoch, indexes in chosen.items():
            picked[epoch] = [found[index] for index in indexes[:max_pages]]
            max_pages -= len(picked[epoch])
            self._engine.pool.share([one.page for one in picked[epoch]])
        return picked

    def release(self, pages: Sequence[CachedPage]) -> None:
        self._engine.pool.release([one.page for one in pages])

    def push(
        self, key: TransferKey, offer: bytes, src_pages: Sequence[PageId], dst_pages: Sequence[PageId], on_sent: OnSent
    ) -> None:
        """`on_sent` hears once how it went, when nothing is written any more. Raises TransferError and TransferRefused,
        and then nothing is."""
        self._sender.open(key, offer, Lane.BULK)
        self._pushes[key] = _Push(on_sent)
        tokens = range(len(src_pages) * self._engine.layout.page_size)  # a page's place is the same at both ends
        self._sender.push_tokens(key, 0, tokens, src_pages, dst_pages)
        self._sender.finish(key)

    def checksums(self, pages: Sequence[PageId], offer: bytes) -> list[int]:
        """As who made the offer will find them. From any thread, since nothing writes them. Blocks. Raises
        TransferError."""
        _, num_receivers, _ = split_offer(offer)
        return self._sender.checksums(pages, num_receivers)

    def abort(self, key: TransferKey) -> None:
        """Starts nothing more of it; its `on_sent` follows."""
        if key in self._pushes:
            self._sender.abort(key)

    # What the sender says; keys of others are none of ours.

    def on_failure(self, key: TransferKey, error: PenstockError) -> None:
        if key in self._pushes:
            self._pushes[key].error = error

    def on_sent(self, key: TransferKey) -> None:
        push = self._pushes.pop(key, None)
        if push is not None:
            push.on_sent(push.error)
