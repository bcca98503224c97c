"""Tests that lower tiers return exactly the evicted page after any history, and lose none without need."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from engine.cache.disk_tier import DiskFile, DiskTier
from engine.cache.host_tier import HostTier
from engine.cache.page_pool import OutOfPages
from engine.cache.page_slots import PageSlots
from engine.cache.pinned_memory import allocate_pinned
from engine.cache.pool_memory import zero_pages
from engine.cache.prefix_cache import PrefixCache
from engine.cache.tiers import CacheTiers
from penstock.errors import ConfigError
from penstock.kv.events import KvEventKind, KvEventLog
from penstock.kv.page_hash import hash_pages
from penstock.types import PageHash, PageId
from tests.support.suite.examples import examples

SALT = b"0123456789abcdef"
SHAPE = (2, 2, 1, 4, 8)  # [L, 2, K, S, H] of a page
PAGE_BYTES = 2 * 2 * 1 * 4 * 8 * 2
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def hashes_of(*tokens: int) -> list[PageHash]:
    """Returns the hashes of a chain of pages with one token each."""
    return hash_pages(tokens, 1, SALT)


def content_of(page_hash: PageHash) -> torch.Tensor:
    """Returns the expected page: its hash, repeated. Some values are NaN, which must not matter."""
    return torch.frombuffer(bytearray(page_hash * (PAGE_BYTES // 16)), dtype=torch.bfloat16).view(SHAPE)


def holds(page: torch.Tensor, page_hash: PageHash) -> bool:
    return torch.equal(page.cpu().view(torch.uint8), content_of(page_hash).view(torch.uint8))


class Store:
    """Holds a pool with its tensor, a cache and tiers, composed as in `Engine.load`."""

    def __init__(
        self, num_pages: int, num_host_pages: int, num_disk_pages: int = 0, folder: str = "", device: str = "cpu"
    ) -> None:
        self.kv_pages = torch.zeros(num_pages, *SHAPE, dtype=torch.bfloat16, device=device)
        self.host = HostTier(self.kv_pages, num_host_pages)
        self.disk = DiskTier(DiskFile(folder, num_disk_pages, self.host), num_disk_pages) if num_disk_pages else None
        self.tiers = CacheTiers(self.host, self.disk)
        self.events = KvEventLog(window=100_000)
        self.cache = PrefixCache(
            num_pages, 1, self.events, tiers=self.tiers, on_free=lambda pages: zero_pages(self.kv_pages, pages)
        )
        self.pool = self.cache.pool

    def take(self, hashes: list[PageHash]) -> tuple[list[PageId], int]:
        """Takes pages for a prompt as a scheduler does, and checks what the tiers return."""
        matched = self.cache.match(hashes)
        try:
            pages = [*matched, *self.pool.allocate(len(hashes) - len(matched))]
        except OutOfPages:
            self.pool.release(matched)
            raise
        num_filled = self.cache.promote(hashes, pages, len(matched))
        for page, page_hash in zip(pages[:num_filled], hashes[:num_filled], strict=True):
            assert holds(self.kv_pages[page], page_hash)
        return pages, num_filled

    def compute(self, hashes: list[PageHash], pages: list[PageId], num_filled: int) -> None:
        """Computes the other pages as an engine's step does, and inserts them as a scheduler does."""
        for page, page_hash in zip(pages[num_filled:], hashes[num_filled:], strict=True):
            self.kv_pages[page] = content_of(page_hash)
        self.cache.insert(hashes, pages)

    def serve(self, *tokens: int) -> int:
        """Serves a prompt from start to end; returns how many of its pages were cached."""
        hashes = hashes_of(*tokens)
        pages, num_filled = self.take(hashes)
        self.compute(hashes, pages, num_filled)
        self.pool.release(pages)
        return num_filled

    def reported_places(self) -> dict[PageHash, KvEventKind]:
        """Returns the tier of each page according to all events, as a router sees it."""
        places: dict[PageHash, KvEventKind] = {}
        for event in self.events.read(1).events:
            if event.kind is KvEventKind.REMOVED:
                assert places.keys() >= set(event.hashes), "removed, but never stored"
                places = {page: kind for page, kind in places.items() if page not in event.hashes}
            else:
                places |= dict.fromkeys(event.hashes, event.kind)
        return places

    def places(self) -> dict[PageHash, KvEventKind]:
        """Returns the actual tier of each page."""
        below = {*self.host.slots, *(self.disk.slots if self.disk else ())}
        return {
            page: KvEventKind.STORED if page in self.cache._chains.nodes else self.tiers.place(page)
            for page in {*self.cache._chains.nodes, *below}
        }


# ---- slots --------------------------------------------------------------------------------------------------------


@examples(100)
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["add", "touch", "discard"]), st.integers(0, 7))))
def test_slots_agree_with_an_ordered_dict(num_slots: int, history: list[tuple[str, int]]) -> None:
    slots, model = PageSlots(num_slots), OrderedDict[PageHash, int]()
    for action, number in history:
        page_hash = PageHash(bytes([number]))
        if action == "touch":
            slots.touch([page_hash])
            if page_hash in model:
                model.move_to_end(page_hash)
        elif action == "discard" and page_hash in model:
            slots.discard(page_hash)
            del model[page_hash]
        elif action == "add" and page_hash not in model:
            oldest = next(iter(model), None) if len(model) == num_slots else None
            slot, evicted = slots.add(page_hash)
            assert evicted == oldest
            if evicted is not None:
                assert model.pop(evicted) == slot
            model[page_hash] = slot
        assert list(slots) == list(model)
        assert all(slots.slot(page_hash) == slot for page_hash, slot in model.items())
        slots.check_integrity()


def test_a_store_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PageSlots(0)


# ---- eviction and promotion ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_evicted_pages_are_loaded_from_host_memory(device: str) -> None:
    store = Store(4, 8, device=device)
    assert store.serve(1, 2, 3, 4) == 0
    assert store.serve(5, 6, 7, 8) == 0  # evicts every page of the first prompt
    assert store.cache.peek(hashes_of(1, 2, 3, 4)) == 4
    assert store.serve(1, 2, 3, 4) == 4
    stats = store.cache.stats
    assert (stats.queries, stats.device_hits, stats.host_hits, stats.evictions) == (12, 0, 4, 8)
    assert (stats.host_pages, stats.total_host_pages, stats.total_disk_pages) == (8, 8, 0)


def test_a_prompt_is_filled_from_all_tiers_at_once(tmp_path: Path) -> None:
    store = Store(4, 4, 8, str(tmp_path))
    store.serve(1, 2, 3, 4)
    assert store.serve(1, 9, 8, 7) == 1  # evicts 4, 3 and 2 to host memory
    assert store.cache.peek(hashes_of(1, 2, 3, 4)) == 4
    assert store.serve(1, 2, 3, 4) == 4  # evicts 7, 8 and 9 to the host, and 4 and 3 to the disk
    stats = store.cache.stats
    assert (stats.device_hits, stats.host_hits, stats.disk_hits) == (1 + 1, 1, 2)


def test_pages_about_to_be_loaded_are_evicted_last() -> None:
    store = Store(2, 4)
    for tokens in ((1, 2), (3, 4), (5, 6)):
        store.serve(*tokens)
    assert list(store.host.slots) == [*reversed(hashes_of(1, 2)), *reversed(hashes_of(3, 4))]
    assert store.serve(1, 2) == 2  # evicts 6 and 5, and with them 4 and 3, although those are more recent


def test_pages_stored_together_do_not_evict_each_other() -> None:
    store = Store(2, 2)
    first, second, fourth = (hashes_of(token)[0] for token in (1, 2, 4))
    pages = store.pool.allocate(2)
    store.tiers.store([second, fourth], pages)
    store.tiers.store([second, first], pages)  # `second` is the oldest, hence the next to be evicted
    assert list(store.host.slots) == [second, first]


def test_a_loaded_page_is_not_copied_out_again() -> None:
    store = Store(2, 4)
    store.serve(1, 2)
    store.serve(3, 4)
    store.serve(1, 2)
    written: list[int] = []
    store.host.write = lambda slots, pages: written.extend(pages)  # type: ignore[method-assign]
    store.serve(3, 4)
    assert written == []


@pytest.mark.parametrize("device", DEVICES)
def test_pages_may_be_overwritten_and_read_at_once(device: str) -> None:
    """Many large pages make sure that a copy still in flight would be noticed."""
    num_pages = 64
    kv_pages = torch.arange(num_pages, device=device, dtype=torch.float32).view(-1, 1, 1).repeat(1, 512, 512)
    host = HostTier(kv_pages, num_pages)
    slots, pages = list(range(num_pages)), [PageId(page) for page in reversed(range(num_pages))]
    for _ in range(5):
        host.write(slots, pages)
        kv_pages.fill_(-1.0)
        host.read(slots, pages)
        assert kv_pages.mean((1, 2)).tolist() == list(range(num_pages))


def test_clear_forgets_and_erases_every_tier(tmp_path: Path) -> None:
    store = Store(2, 2, 2, str(tmp_path))
    for tokens in ((1, 2), (3, 4), (5, 6)):
        store.serve(*tokens)
    store.cache.clear()
    assert store.reported_places() == {}
    assert not store.kv_pages.any()
    assert not any(any(store.host.content(slot)) for slot in range(2))
    assert store.disk is not None
    assert isinstance(store.disk._file, DiskFile)
    assert os.fstat(store.disk._file.file.fileno()).st_size == 0
    assert store.serve(1, 2) == 0


# ---- the disk -----------------------------------------------------------------------------------------------------


def corrupt(disk: DiskTier, page_hash: PageHash) -> None:
    assert isinstance(disk._file, DiskFile)
    os.pwrite(disk._file.file.fileno(), b"\xff\xff", disk.slots.slot(page_hash) * PAGE_BYTES + 5)


def test_a_page_corrupted_on_disk_is_a_miss(tmp_path: Path) -> None:
    store = Store(4, 1, 16, str(tmp_path))
    store.serve(1, 2, 3, 4)
    store.serve(5, 6, 7, 8)
    hashes = hashes_of(1, 2, 3, 4)
    assert store.disk is not None
    corrupt(store.disk, hashes[1])
    pages, num_filled = store.take(hashes)
    assert num_filled == 1
    assert not store.kv_pages[pages[1]].any(), "the corrupt page has reached the pool"
    assert hashes[1] not in store.reported_places()
    assert store.cache.stats.spoiled_pages == 1


def test_a_full_disk_takes_no_more_pages_but_serves_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(2, 2, 8, str(tmp_path))
    for tokens in ((1, 2), (3, 4), (5, 6)):
        store.serve(*tokens)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("engine.cache.disk_tier.os.pwrite", full)
        store.serve(7, 8)
    store.serve(9, 10)
    assert caplog.text.count("takes no more pages") == 1
    assert store.serve(1, 2) == 2
    assert store.reported_places() == store.places()


def host_of_one_page() -> HostTier:
    return HostTier(torch.zeros(1, *SHAPE, dtype=torch.bfloat16), 1)


def test_no_file_is_left_in_the_folder(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path, 4, host_of_one_page())
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(disk.file.fileno()).st_mode & 0o077 == 0
    disk.close()


def test_a_folder_that_cannot_hold_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.disk_path = .*none.*give a folder with room"):
        DiskFile(tmp_path / "none", 4, host_of_one_page())


class CudartDouble:
    """Pins memory up to `most_bytes` and refuses more."""

    def __init__(self, most_bytes: int) -> None:
        self.pinned: dict[int, int] = {}
        self._most_bytes = most_bytes

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if num_bytes > self._most_bytes:
            return 2
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_pinned_memory_takes_no_more_than_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own allocator would pin the next power of two: 16 pages for these nine."""
    cudart = CudartDouble(most_bytes=1 << 20)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    pages = allocate_pinned((9, 4096), torch.bfloat16)
    assert (pages.shape, pages.dtype) == ((9, 4096), torch.bfloat16)
    assert cudart.pinned == {pages.data_ptr(): 9 * 8192}
    pages[8] = 3.0
    view = pages.view(-1)[8 * 4096 :]
    del pages
    assert view.eq(3.0).all()
    assert cudart.pinned, "a tensor over it is left"
    del view
    assert not cudart.pinned


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = CudartDouble(most_bytes=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    with pytest.raises(RuntimeError, match="8192 bytes of host memory cannot be pinned: CUDA error 2; see ulimit -l"):
        allocate_pinned((1, 4096), torch.bfloat16)
