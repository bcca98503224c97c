"""Turns events of the prefix cache into block events, and knows which pages are published. Pure.

A page is published under the last 64 bits of its hash, on the medium that is the best tier with a copy. It is left out
while its tokens are unknown: pages that another worker handed over are published once a request finds them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.kv.block_events import CPU, GPU, STORAGE, BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored
from penstock.kv.events import KvEventBatch, KvEventKind
from penstock.kv.page_texts import PageText
from penstock.types import PageHash

MAX_BLOCKS = 1024  # most blocks in one event, so that a subscriber handles it quickly

_MEDIA = {KvEventKind.STORED: GPU, KvEventKind.ON_HOST: CPU, KvEventKind.ON_DISK: STORAGE}
_Texts = Mapping[PageHash, PageText]


def block_hash(page: PageHash) -> int:
    """Returns the name under which a page is published."""
    return int.from_bytes(page[-8:], "big")


class PublishedPages:
    """The medium of each published page."""

    def __init__(self, page_size: int, extra_key: Callable[[PageText], str | None]) -> None:
        """`extra_key` names what else, besides tokens and adapter, a text's pages depend on, or returns None."""
        self._page_size = page_size
        self._extra_key = extra_key
        self._media: dict[PageHash, str] = {}
        self.num_unnamed = 0  # pages left out so far because their tokens were unknown

    def __len__(self) -> int:
        return len(self._media)

    def translate(self, batch: KvEventBatch, texts: _Texts) -> list[BlockEvent]:
        """Returns the events for subscribers. `texts` holds the texts of the pages that `batch` names.

        A snapshot begins with the event that clears their view of this worker.
        """
        events: list[BlockEvent] = []
        if batch.snapshot:
            self._media.clear()
            events.append(BlocksCleared())
        for kind, pages in batch.events:
            medium = _MEDIA.get(kind)
            events += self._removed(pages) if medium is None else self._stored(pages, medium, texts)
        return events

    def _removed(self, pages: Sequence[PageHash]) -> list[BlockEvent]:
        gone: dict[str, list[int]] = {}
        for page in pages:
            medium = self._media.pop(page, None)
            if medium is not None:
                gone.setdefault(medium, []).append(block_hash(page))
        return _removals(gone)

    def _stored(self, pages: Sequence[PageHash], medium: str, texts: _Texts) -> list[BlockEvent]:
        moved: dict[str, list[int]] = {}
        new: list[PageHash] = []
        for page in pages:
            before = self._media.get(page)
            if before == medium:
                continue
            if page not in texts:
                self.num_unnamed += 1
                continue
            if before is not None:
                moved.setdefault(before, []).append(block_hash(page))
            self._media[page] = medium
            new.append(page)
        # The new medium comes first, so that subscribers never see a moving page as lost.
        return [*(self._run_event(run, medium, texts) for run in _runs(new, texts)), *_removals(moved)]

    def _run_event(self, run: Sequence[PageHash], medium: str, texts: _Texts) -> BlocksStored:
        first, tokens = texts[run[0]], array("I")
        for page in run:
            tokens += texts[page].tokens
        lora = first.adapter.name if first.adapter else None
        return BlocksStored(
            tuple(block_hash(page) for page in run),
            block_hash(first.parent) if first.parent else None,
            tuple(tokens),
            self._page_size,
            medium,
            lora,
            self._extra_keys(first, len(run)),
        )

    def _extra_keys(self, first: PageText, num_blocks: int) -> tuple[tuple[object, ...] | None, ...] | None:
        """Returns for each block the adapter, and for a prompt's first block what else it depends on, as vLLM does."""
        lora = (first.adapter.name,) if first.adapter else ()
        key = None if first.parent else self._extra_key(first)
        if key is None and not lora:
            return None
        head = lora if key is None else (*lora, key)
        return (head or None, *[lora or None] * (num_blocks - 1))


def _runs(pages: Sequence[PageHash], texts: _Texts) -> Iterator[list[PageHash]]:
    """Yields runs of pages that are each the child of the one before."""
    run: list[PageHash] = []
    for page in pages:
        if run and (texts[page].parent != run[-1] or len(run) == MAX_BLOCKS):
            yield run
            run = []
        run.append(page)
    if run:
        yield run


def _removals(blocks_by_medium: Mapping[str, Sequence[int]]) -> list[BlockEvent]:
    return [
        BlocksRemoved(tuple(blocks[first : first + MAX_BLOCKS]), medium)
        for medium, blocks in blocks_by_medium.items()
        for first in range(0, len(blocks), MAX_BLOCKS)
    ]
