"""Runs random histories of the cache tiers. Every page holds its hash, so that a mix-up is noticed."""

from __future__ import annotations

import shutil
import tempfile

import hypothesis.strategies as st
import torch
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from engine.cache.page_pool import OutOfPages
from penstock.kv.page_hash import hash_pages
from penstock.types import PageHash, PageId
from tests.engine.cache.test_host_tier import GPU, SALT, Store, corrupt, holds
from tests.support.suite.examples import examples

NUM_PAGES = 8
# There are few tokens, so that chains share prefixes, branch and recur.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


class TierHistory(RuleBasedStateMachine):
    """Runs sequences over a device, a host and a disk of a few pages each."""

    num_host_pages, num_disk_pages = 3, 4
    roomy = False  # whether every possible page fits (2 + 4 + ... + 64), so that none may be lost
    device = "cpu"
    held = Bundle("held")  # pages; each is released once

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.store = Store(NUM_PAGES, self.num_host_pages, self.num_disk_pages, self.folder, self.device)
        self.known: set[PageHash] = set()  # pages computed since the last clear

    def teardown(self) -> None:
        if self.store.disk is not None:
            self.store.disk.close()
        shutil.rmtree(self.folder)

    @rule(target=held, tokens=TOKENS)
    def start_sequence(self, tokens: list[int]) -> object:
        hashes = hash_pages(tokens, 1, SALT)
        promised = self.store.cache.peek(hashes)
        try:
            pages, num_filled = self.store.take(hashes)
        except OutOfPages:
            return multiple()
        assert num_filled <= len(hashes)
        if self.roomy:
            assert num_filled == promised, "pages were evicted while a prompt was about to load them"
        self.store.compute(hashes, pages, num_filled)
        self.known |= set(hashes)
        return pages

    @rule(pages=consumes(held), backwards=st.booleans())
    def release(self, pages: list[PageId], backwards: bool) -> None:
        if backwards:
            self.store.pool.release(pages)
        else:
            for page in pages:
                self.store.pool.release([page])

    @rule()
    def allocate_everything(self) -> None:
        """Writes all available pages at once, while no copy may still read them."""
        pages = self.store.pool.allocate(self.store.pool.num_available)
        assert not self.store.kv_pages[torch.tensor(pages, dtype=torch.long)].any(), "not erased"
        self.store.kv_pages[torch.tensor(pages, dtype=torch.long)] = 7.0
        self.store.pool.release(pages)

    @rule()
    def clear(self) -> None:
        self.store.cache.clear()
        self.known.clear()

    @precondition(lambda self: self.store.disk is not None and len(self.store.disk.slots) > 0 and not self.roomy)
    @rule(data=st.data())
    def corrupt_a_page_on_disk(self, data: st.DataObject) -> None:
        assert self.store.disk is not None
        corrupt(self.store.disk, data.draw(st.sampled_from(sorted(self.store.disk.slots))))

    @invariant()
    def check_places(self) -> None:
        store = self.store
        store.cache.check_integrity()
        store.host.slots.check_integrity()
        for page_hash, node in store.cache._chains.nodes.items():
            assert holds(store.kv_pages[node.page], page_hash)
        store.host.settle()
        for page_hash in store.host.slots:
            assert bytes(store.host.content(store.host.slots.slot(page_hash)))[:16] == page_hash
        below = {*store.host.slots, *(store.disk.slots if store.disk else ())}
        assert store.reported_places() == store.places()
        store.events._places.check_integrity()
        for page in map(PageId, store.pool._free):
            assert not store.kv_pages[page].any(), f"page {page} is free and not erased"
        if self.roomy:
            assert self.known == {*store.cache._chains.nodes, *below}, "a page was lost though there was room"


class RoomyHistory(TierHistory):
    num_host_pages, num_disk_pages, roomy = 126, 0, True


class RoomyDiskHistory(TierHistory):
    num_host_pages, num_disk_pages, roomy = 3, 126, True


class CudaHistory(TierHistory):
    device = "cuda"


CudaHistory.TestCase.pytestmark = GPU
CudaHistory.TestCase.settings = examples(30, stateful_step_count=40)
TierHistory.TestCase.settings = examples(60, stateful_step_count=40)
RoomyHistory.TestCase.settings = examples(30, stateful_step_count=40)
RoomyDiskHistory.TestCase.settings = RoomyHistory.TestCase.settings
TestTierHistory = TierHistory.TestCase
TestRoomyHistory = RoomyHistory.TestCase
TestRoomyDiskHistory = RoomyDiskHistory.TestCase
TestCudaHistory = CudaHistory.TestCase
