"""Turns an engine's block events into events of this router's prefix index. Pure.

An engine hashes blocks in its own way, which depends on its version and settings. Its events contain the tokens, so the
router computes its own page hashes from them and looks prompts up as for any other worker. A block whose parent is
unknown has no page hash; it is left out until the engine stores it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

from penstock.kv.block_events import (
    CPU,
    GPU,
    STORAGE,
    BlockEvent,
    BlockHash,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
)
from penstock.kv.events import KvEvent, KvEventBatch, KvEventKind
from penstock.kv.page_hash import hash_pages
from penstock.kv.page_places import NUM_RANKS, ROOT, PagePlaces
from penstock.types import PageHash

MAX_BLOCKS = 1 << 19  # tracked for one engine; further blocks are left out

_RANKS = {GPU: 0, CPU: 1, STORAGE: 2}
_KINDS = (KvEventKind.STORED, KvEventKind.ON_HOST, KvEventKind.ON_DISK, KvEventKind.REMOVED)  # by rank
_SALT_BYTES = 16


class _Block:
    __slots__ = ("media", "page")

    def __init__(self, page: PageHash) -> None:
        self.page = page
        self.media = 0  # bit r is set if the medium of rank r holds the block


class BlockNames:
    """Maps an engine's blocks to pages and tracks the fastest medium that holds each."""

    def __init__(self, page_size: int, root: Callable[[], bytes]) -> None:
        """`root` returns the salt for page hashes of requests without their own salt."""
        self._page_size = page_size
        self._root = root
        self._blocks: dict[BlockHash, _Block] = {}
        self._places = PagePlaces()
        self._next_seq = 1
        self.num_unplaced = 0  # blocks left out so far

    def __len__(self) -> int:
        return len(self._blocks)

    def translate(self, events: Sequence[BlockEvent]) -> list[KvEventBatch]:
        """Returns the batches that the index must apply, in order."""
        batches: list[KvEventBatch] = []
        found: list[KvEvent] = []
        for event in events:
            if isinstance(event, BlocksCleared):
                batches += [*self._batches(found), self.clear()]
                found = []
            elif event.group not in (None, 0):
                continue  # other groups hold, for example, sliding-window layers; group 0 stands for all of them
            elif isinstance(event, BlocksRemoved):
                found += self._remove(event)
            else:
                found += self._store(event)
        return [*batches, *self._batches(found)]

    def clear(self) -> KvEventBatch:
        """Forgets every block and returns the snapshot of an empty cache."""
        self._blocks.clear()
        self._places = PagePlaces()
        return KvEventBatch(self._next_seq, (), snapshot=True, num_strays=0)

    def _batches(self, found: Sequence[KvEvent]) -> list[KvEventBatch]:
        if not found:
            return []
        batch = KvEventBatch(self._next_seq, tuple(found), num_strays=self._places.num_strays)
        self._next_seq = batch.next_seq
        return [batch]

    def _store(self, event: BlocksStored) -> list[KvEvent]:
        rank = _RANKS.get(event.medium or GPU)
        parent = self._parent(event)
        has_room = len(self._blocks) + len(event.block_hashes) <= MAX_BLOCKS
        if rank is None or parent is None or event.block_size != self._page_size or not has_room:
            self.num_unplaced += len(event.block_hashes)
            return []
        moved: list[PageHash] = []
        above = ROOT if event.parent is None else parent
        for name, page in zip(event.block_hashes, self._pages(event, parent), strict=True):
            block = self._blocks.get(name)
            if block is None:
                block = self._blocks[name] = _Block(page)
            before = _best(block.media)
            block.media |= 1 << rank
            if _best(block.media) != before and self._places.put(block.page, _best(block.media), above):
                moved.append(block.page)
            above = block.page
        return [KvEvent(_KINDS[rank], tuple(moved))] if moved else []

    def _parent(self, event: BlocksStored) -> PageHash | None:
        if event.parent is None:
            return PageHash(b"")  # replaced by the root in `_pages`
        block = self._blocks.get(event.parent)
        return None if block is None else block.page

    def _pages(self, event: BlocksStored, parent: PageHash) -> list[PageHash]:
        """Returns the page hashes of an event's blocks. They cover everything that the KV depends on: tokens, adapter,
        salt and the engine's extra keys.
        """
        size, keys = self._page_size, event.extra_keys
        if event.parent is None:
            first = keys[0] if keys else None
            parent = PageHash(_root(self._root(), event.lora_name, first))
        if keys is None or not any(keys[1:]):
            return hash_pages(event.token_ids, size, parent)
        pages: list[PageHash] = []
        plain = (event.lora_name,) if event.lora_name else None
        for index, key in enumerate(keys):
            if key and key != plain and (index or event.parent is not None):
                parent = PageHash(_mixed(parent, key))
            tokens = event.token_ids[index * size : (index + 1) * size]
            parent = hash_pages(tokens, size, parent)[0]
            pages.append(parent)
        return pages

    def _remove(self, event: BlocksRemoved) -> list[KvEvent]:
        rank = _RANKS.get(event.medium or GPU)
        moved: list[list[PageHash]] = [[] for _ in range(NUM_RANKS + 1)]  # by the rank that holds them now
        for name in event.block_hashes:
            block = self._blocks.get(name)
            if block is None or rank is None:
                continue
            before = _best(block.media)
            block.media &= ~(1 << rank)
            after = _best(block.media)
            if not block.media:
                del self._blocks[name]
            if after != before and self._places.put(block.page, after):
                moved[after].append(block.page)
        return [KvEvent(kind, tuple(pages)) for kind, pages in zip(_KINDS, moved, strict=True) if pages]


def _best(media: int) -> int:
    """Returns the rank of the fastest medium (the lowest set bit), or NUM_RANKS if no bit is set."""
    return (media & -media).bit_length() - 1 if media else NUM_RANKS


def _root(shared: bytes, lora_name: str | None, keys: tuple[object, ...] | None) -> bytes:
    """Returns the root of a prompt's page hashes.

    A single key that is a salt in hexadecimal is the `cache_salt` that this router sends for a tenant: the salt itself
    is the root then.
    """
    if not keys and lora_name is None:
        return shared
    if keys and len(keys) == 1 and lora_name is None and isinstance(keys[0], str):
        try:
            salt = bytes.fromhex(keys[0])
        except ValueError:
            salt = b""
        if len(salt) == _SALT_BYTES:
            return salt
    return _mixed(shared, (lora_name, *(keys or ())))


def _mixed(parent: bytes, keys: tuple[object, ...]) -> bytes:
    return blake2b(parent + repr(keys).encode(), digest_size=16, person=b"penstock-extra").digest()
