"""Tests that a cache takes pages from the memory of a dead pool, and only undamaged ones."""

from __future__ import annotations

import pytest
import torch

from engine.cache.kept.kept_pool import KeptPool
from engine.cache.kept.pool_journal import PoolJournal
from engine.cache.pool_memory import allocate_pool
from engine.cache.prefix_cache import PrefixCache
from penstock.errors import ConfigError, InvalidInput
from penstock.types import PageHash

NUM_PAGES, SHAPE = 8, (8, 4, 16)
CPU = torch.device("cpu")
HASHES = [PageHash(bytes([number]) * 16) for number in range(1, 7)]


def journalled() -> tuple[torch.Tensor, PrefixCache, PoolJournal]:
    memory = allocate_pool(SHAPE, torch.float32, CPU)
    memory.copy_(torch.randn(SHAPE))
    cache, journal = PrefixCache(NUM_PAGES, 16), PoolJournal(memory)
    cache.keep_journal(journal)
    return memory, cache, journal


def cached(cache: PrefixCache, hashes: list[PageHash]) -> list[int]:
    pages = cache.pool.allocate(len(hashes))
    cache.insert(hashes, pages)
    cache.pool.release(pages)
    return list(pages)


def kept(journal: PoolJournal, own: torch.Tensor) -> KeptPool:
    return KeptPool(journal.pool_fd, journal.fd, journal.pool_id, journal.num_pages, own)


def test_a_prefix_is_taken_from_a_dead_pool() -> None:
    memory, cache, journal = journalled()
    pages = cached(cache, HASHES)
    own = allocate_pool(SHAPE, torch.float32, CPU)
    taker = PrefixCache(NUM_PAGES, 16)
    assert taker.bring(HASHES, 100, source=kept(journal, own)) == (6, True)
    found = taker.match(HASHES)
    assert torch.equal(own[found], memory[pages])
    taker.pool.release(found)
    taker.check_integrity()


def test_a_prefix_ends_before_a_damaged_page() -> None:
    memory, cache, journal = journalled()
    pages = cached(cache, HASHES)
    memory[pages[2], 1, 3] += 1
    own = allocate_pool(SHAPE, torch.float32, CPU)
    taker, source = PrefixCache(NUM_PAGES, 16), kept(journal, own)
    taker.bring(HASHES, 100, source=source)
    assert taker.num_on_device(HASHES) == 2
    assert (source.num_damaged, source.holds(HASHES[2]), source.holds(HASHES[3])) == (1, False, True)
    taker.check_integrity()


def test_evicted_and_cleared_pages_are_not_in_the_journal() -> None:
    _, cache, journal = journalled()
    cached(cache, HASHES)
    cache.pool.release(cache.pool.allocate(4))
    own = allocate_pool(SHAPE, torch.float32, CPU)
    assert set(kept(journal, own).pages) == {node for node in HASHES if cache.find([node])}
    assert len(kept(journal, own).pages) == 4
    cache.clear()
    assert not kept(journal, own).pages


def test_files_that_hold_no_matching_pool_are_refused() -> None:
    _, _, journal = journalled()
    own = allocate_pool(SHAPE, torch.float32, CPU)
    with pytest.raises(InvalidInput, match="pool: is '/memfd:penstock-journal"):
        KeptPool(journal.fd, journal.pool_fd, journal.pool_id, NUM_PAGES, own)
    with pytest.raises(InvalidInput, match="pool: has 8192 bytes, want"):
        KeptPool(journal.pool_fd, journal.fd, journal.pool_id, 100 * NUM_PAGES, own)
    with pytest.raises(InvalidInput, match="pool_id: has 3 bytes, want 16"):
        KeptPool(journal.pool_fd, journal.fd, b"abc", NUM_PAGES, own)


def test_a_pool_in_private_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="keeper: the page pool is in memory of this process alone"):
        PoolJournal(torch.zeros(SHAPE))
