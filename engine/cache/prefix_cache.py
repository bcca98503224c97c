"""Finds pages whose KV was computed before, by the hash of everything it depends on.

A request uses it twice: before prefill, `match` returns the pages it need not compute, and `promote` fills some of the
pages allocated for the rest from lower tiers; `insert` after each step makes newly computed full pages findable. This
module decides what is in the map from hash to page and its chains (`engine.cache.page_chains`); references and the
order of eviction are the pool's, evicted pages are `engine.cache.tiers`'. It must not see a page that a transfer may
still write: the caller inserts only computed or verified pages, and the pool refuses fenced ones.

A cached page is of use only while its parent is cached too, so leaves are evicted first: before the least recently used
page goes, all its descendants go. Referenced pages of that subtree keep their holders and are merely no longer
findable.

Routers receive an event for each page that moves: to the device, to the best lower tier that has it, or to nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.cache.page_chains import ChainNode, PageChains
from engine.cache.page_pool import PageMisuse, PagePool
from engine.cache.tiers import CacheTiers
from penstock.kv.events import KvEventKind, KvEventLog
from penstock.kv.page_places import ROOT
from penstock.types import CachedPage, CacheStats, PageHash, PageId


class PrefixCache:
    """The findable pages of one pool. Not thread-safe: the worker's step loop is the only caller."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        events: KvEventLog | None = None,
        enabled: bool = True,
        tiers: CacheTiers | None = None,
    ) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.pool = pool
        self._events = events
        self._tiers = tiers
        self._num_queries = self._num_device_hits = self._num_evictions = 0  # pages
        self._chains = PageChains()
        pool.set_evictor(self._evict)

    @property
    def num_cached(self) -> int:
        return len(self._chains.nodes)

    @property
    def stats(self) -> CacheStats:
        host, disk = (self._tiers.host, self._tiers.disk) if self._tiers else (None, None)
        return CacheStats(
            queries=self._num_queries,
            device_hits=self._num_device_hits,
            host_hits=self._tiers.num_host_hits if self._tiers else 0,
            disk_hits=self._tiers.num_disk_hits if self._tiers else 0,
            evictions=self._num_evictions,
            spoiled_pages=disk.num_spoiled if disk else 0,
            host_pages=len(host.slots) if host else 0,
            total_host_pages=host.slots.num_slots if host else 0,
            disk_pages=len(disk.slots) if disk else 0,
            total_disk_pages=disk.slots.num_slots if disk else 0,
        )

    def match(self, hashes: Sequence[PageHash]) -> list[PageId]:
        """Returns the pages of the longest prefix on the device, with a reference on each for the caller to release.

        Call `promote` next, once there are pages for the rest.
        """
        found = self._chains.leading(hashes)
        for node in found:
            node.num_uses += 1
        pages = [node.page for node in found]
        self.pool.share(pages)
        if self._tiers is not None:  # allocating the rest evicts pages, but not those about to be promoted
            self._tiers.touch(self._tiers.leading(hashes[len(pages) :]))
        return pages

    def promote(self, hashes: Sequence[PageHash], pages: Sequence[PageId], num_matched: int) -> int:
        """Fills pages after the matched ones from lower tiers, and returns how many leading pages hold their KV.

        `pages` are those that `match` returned for these hashes, then fresh ones that only the caller holds. Blocks
        while they are copied; filled pages are cached. Counts the request: call it once each, with lower tiers or not.
        """
        if not self.enabled:
            return num_matched
        self._num_queries += len(hashes)
        self._num_device_hits += num_matched
        if self._tiers is None:
            return num_matched
        wanted = self._tiers.leading(hashes[num_matched:])
        num_filled = num_matched
        if wanted:
            num_filled += self._tiers.load(wanted, pages[num_matched : num_matched + len(wanted)])
            self.insert(hashes[:num_filled], pages, start=num_matched)
            self._report_moved([])
        return num_filled

    def peek(self, hashes: Sequence[PageHash]) -> int:
        """Returns how many leading pages are cached, lower tiers included, without a reference or any side effect."""
        num_leading = len(self._chains.leading(hashes))
        return num_leading + (len(self._tiers.leading(hashes[num_leading:])) if self._tiers else 0)

    def insert(self, hashes: Sequence[PageHash], pages: Sequence[PageId], start: int = 0) -> int:
        """Makes `pages[i]`, full and computed, findable as `hashes[i]`; returns how many pages entered the cache.

        Both lists begin at the sequence's first page; `pages` may be longer. A caller that inserts after every step
        passes as `start` the number inserted before, so that a long sequence does not walk its whole chain again. If
        another page has a hash already, that page stays and the caller's remains uncached. Raises PageMisuse for a page
        that is free, fenced, or cached under another hash.
        """
        if not self.enabled:
            return 0
        if len(pages) < len(hashes):
            raise PageMisuse(f"insert: {len(hashes)} hashes for {len(pages)} pages")
        start = min(start, len(hashes))
        while start > 0 and hashes[start - 1] not in self._chains.nodes:
            start -= 1  # the parent has been evicted: begin where the chain is intact
        self._check_insertable(hashes, pages, start)
        parent = self._chains.nodes[hashes[start - 1]] if start > 0 else None
        stored: list[PageHash] = []
        met: list[PageId] = []  # cached pages with the same content; they count as used
        for index in range(start, len(hashes)):
            node = self._chains.nodes.get(hashes[index])
            if node is None:
                node = self._link(hashes[index], pages[index], parent)
                stored.append(node.page_hash)
            else:
                met.append(node.page)
            parent = node
        self.pool.touch(met)
        if self._events is not None:
            first = len(hashes) - len(stored)  # what follows a page that was not cached was not cached either
            self._events.stored(stored, hashes[first - 1] if first else ROOT)
        return len(stored)

    def insert_last(self, chains: Iterable[tuple[Sequence[PageHash], Sequence[PageId]]]) -> None:
        """Inserts the last page of each chain, whose others are inserted already, and reports them as one event."""
        if not self.enabled:
            return
        nodes = self._chains.nodes
        stored: list[tuple[PageHash, PageHash]] = []
        for hashes, pages in chains:
            last = len(hashes) - 1
            parent = nodes.get(hashes[last - 1]) if last else None
            if hashes[last] in nodes or (last and parent is None):
                self._report_stored(stored)
                stored = []
                self.insert(hashes, pages, start=last)
            else:
                self._link(hashes[last], pages[last], parent)
                stored.append((hashes[last], parent.page_hash if parent else ROOT))
        self._report_stored(stored)

    def _report_stored(self, pages: Sequence[tuple[PageHash, PageHash]]) -> None:
        if self._events is not None and pages:
            self._events.stored_each(pages)

    # Pages from and for another worker's cache.

    def hottest(self, max_pages: int) -> list[CachedPage]:
        """Returns the pages most likely to be used again, parents before their children.

        Referenced pages come first, then those that were found again since they were cached, then the others; within
        each group the most recently used comes first.
        """
        idle = [self._chains.by_page[page] for page in self.pool.evictable()]
        idle.reverse()
        held = [node for page, node in self._chains.by_page.items() if self.pool.num_references(page)]
        return self._chains.rooted((*held, *sorted(idle, key=lambda node: not node.num_uses)), max_pages)

    def num_on_device(self, hashes: Sequence[PageHash]) -> int:
        """Returns how many leading pages are cached on the device, without a reference or any side effect."""
        return len(self._chains.leading(hashes))

    def find(self, hashes: Sequence[PageHash]) -> list[CachedPage]:
        """Returns the longest leading run of these consecutive pages that is cached on the device.

        The run may begin anywhere in a prompt. The caller takes references.
        """
        return [
            CachedPage(node.page_hash, node.parent.page_hash if node.parent else None, node.page)
            for node in self._chains.leading(hashes)
        ]

    def lacking(self, pages: Sequence[tuple[PageHash, PageHash | None]]) -> list[int]:
        """Returns the indexes of the (page, parent) pairs that could be cached here and are not; touches the others."""
        if not self.enabled:
            return []
        met = [self._chains.nodes[page_hash].page for page_hash, _ in pages if page_hash in self._chains.nodes]
        self.pool.touch(met)
        fresh: dict[PageHash, int] = {}
        for index, (page_hash, parent) in enumerate(pages):
            if page_hash not in self._chains.nodes and (
                parent is None or parent in self._chains.nodes or parent in fresh
            ):
                fresh.setdefault(page_hash, index)
        return list(fresh.values())

    def graft(self, page_hash: PageHash, parent: PageHash | None, page: PageId) -> bool:
        """Makes a verified page from another worker findable; the caller keeps its reference.

        Returns False if its parent has been evicted meanwhile, or the hash is cached already.
        """
        after = self._chains.nodes.get(parent) if parent is not None else None
        if not self.enabled or page_hash in self._chains.nodes or (parent is not None and after is None):
            return False
        self._link(page_hash, page, after)
        if self._events is not None:
            self._events.stored([page_hash], parent if parent is not None else ROOT)
        return True

    def clear(self) -> None:
        """Forgets every page, on every tier; referenced pages stay with their holders."""
        gone: list[ChainNode] = []
        for node in self._chains.roots():
            gone += self._chains.unlink(node)
        self.pool.forget([node.page for node in gone])
        if self._tiers is not None:
            self._tiers.clear()
        self._report_moved([node.page_hash for node in gone])

    def check_integrity(self) -> None:
        """Raises AssertionError unless chains, maps and the pool agree. Checks the pool as well."""
        self.pool.check_integrity()
        cached = {PageId(page) for page in range(self.pool.num_pages) if self.pool.is_cached(PageId(page))}
        if cached != self._chains.by_page.keys():
            raise AssertionError(
                f"pool and prefix cache differ on pages {sorted(cached ^ self._chains.by_page.keys())}"
            )
        self._chains.check_integrity()

    def _check_insertable(self, hashes: Sequence[PageHash], pages: Sequence[PageId], start: int) -> None:
        """Runs all checks before the first change, so that a refused insert changes nothing."""
        if len(set(pages[start : len(hashes)])) != len(hashes) - start:
            raise PageMisuse(f"insert: a page is named twice in {list(pages)}")
        for index in range(start, len(hashes)):
            known, page = self._chains.by_page.get(pages[index]), pages[index]
            if known is not None and known.page_hash != hashes[index]:
                raise PageMisuse(f"insert: page {page} is cached under another hash")
            if known is None and not self.pool.can_keep(page):
                raise PageMisuse(f"insert: page {page} is {self.pool.state(page)}")

    def _link(self, page_hash: PageHash, page: PageId, parent: ChainNode | None) -> ChainNode:
        self.pool.keep(page)
        return self._chains.link(page_hash, page, parent)

    def _evict(self, num_pages: int) -> None:
        """Frees at least `num_pages` pages, which the pool has counted as evictable."""
        gone: list[ChainNode] = []
        num_freed = 0
        for page in self.pool.evictable():
            if num_freed >= num_pages:
                break
            node = self._chains.by_page.get(page)
            if node is None:
                continue  # evicted already, with an ancestor
            subtree = self._chains.unlink(node)
            num_freed += sum([not self.pool.num_references(each.page) for each in subtree]) if len(subtree) > 1 else 1
            gone += subtree
        if num_freed < num_pages:
            raise PageMisuse(f"evict: {num_freed} of {num_pages} pages found; the pool counted more as evictable")
        hashes, pages = [node.page_hash for node in gone], [node.page for node in gone]
        if self._tiers is not None:
            self._tiers.store(hashes, pages)  # before the pool may erase them or hand them out
        self.pool.forget(pages)
        self._num_evictions += len(gone)
        self._report_moved(hashes)

    def _report_moved(self, hashes: Sequence[PageHash]) -> None:
        """Reports where the pages that left the device or a lower tier are now."""
        if self._tiers is None:
            if self._events is not None:
                self._events.removed(hashes)
            return
        left = [page for page in dict.fromkeys((*hashes, *self._tiers.take_left())) if page not in self._chains.nodes]
        if self._events is not None:
            for kind in (KvEventKind.ON_HOST, KvEventKind.ON_DISK, KvEventKind.REMOVED):
                self._events.moved([page for page in left if self._tiers.place(page) is kind], kind)
