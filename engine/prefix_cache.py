"""Finds pages whose KV was computed before, by the hash of everything it depends on.

A request meets it twice: before prefill, `match` gives the pages it need not compute, and `promote` fills some of the
pages allocated for the rest from lower tiers; `insert` after each step makes newly computed full pages findable. It
decides what is in the map from hash to page and its chains (`engine.page_chains`); references and the order of eviction
are the pool's, and what was evicted is `engine.cache_tiers`'. It must not see a page that a transfer may still write:
the caller inserts only computed or verified pages, and the pool refuses fenced ones.

A cached page is of use only while its parent is cached too, hence leaves go first: when the least recently used page
must go, whatever still hangs from it goes before it. Pages of that subtree which somebody holds are not taken away,
they are merely no longer findable.

Routers hear of each page where it is: on the device, on the best lower tier that has it, or nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.cache_tiers import CacheTiers
from engine.page_chains import Node, PageChains
from engine.page_pool import PageMisuse, PagePool
from penstock.kv_events import KvEventKind, KvEventLog
from penstock.page_places import ROOT
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
        self._pool = pool
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
        """Pages of the longest prefix that the device holds, with a reference on each that the caller has to release.

        To be followed by `promote`, once the caller has pages for the rest.
        """
        found = self._chains.leading(hashes)
        for node in found:
            node.num_uses += 1
        pages = [node.page for node in found]
        self._pool.share(pages)
        if self._tiers is not None:  # allocating the rest evicts pages: not those that are about to be promoted
            self._tiers.touch(self._tiers.leading(hashes[len(pages) :]))
        return pages

    def promote(self, hashes: Sequence[PageHash], pages: Sequence[PageId], num_matched: int) -> int:
        """How many leading pages hold their KV, once those after the matched ones are filled from lower tiers.

        `pages`: those that `match` gave for these hashes, then fresh ones that only the caller holds. Blocks while
        they are copied; those filled are cached. Counts the request: call it once for each, with lower tiers or not.
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
        """How many pages need no computing, lower tiers included; takes no reference, leaves the order of eviction."""
        num_leading = len(self._chains.leading(hashes))
        return num_leading + (len(self._tiers.leading(hashes[num_leading:])) if self._tiers else 0)

    def insert(self, hashes: Sequence[PageHash], pages: Sequence[PageId], start: int = 0) -> int:
        """Make `pages[i]`, full and computed, findable as `hashes[i]`; returns how many pages entered the cache.

        Both lists begin at the sequence's first page; `pages` may be longer. A caller who inserts after every step
        passes as `start` what it has inserted before, so that a long sequence does not walk its whole chain again.
        Where another page has a hash already, that one stays and the caller's page remains plainly owned.
        Raises PageMisuse for a page that is free, fenced, or cached under another hash.
        """
        if not self.enabled:
            return 0
        if len(pages) < len(hashes):
            raise PageMisuse(f"insert: {len(hashes)} hashes for {len(pages)} pages")
        start = min(start, len(hashes))
        while start > 0 and hashes[start - 1] not in self._chains.nodes:
            start -= 1  # the parent was evicted since: begin where the chain still holds
        self._check_insertable(hashes, pages, start)
        parent = self._chains.nodes[hashes[start - 1]] if start > 0 else None
        stored: list[PageHash] = []
        met: list[PageId] = []  # pages of others, in use by content if not by reference
        for index in range(start, len(hashes)):
            node = self._chains.nodes.get(hashes[index])
            if node is None:
                node = self._link(hashes[index], pages[index], parent)
                stored.append(node.page_hash)
            else:
                met.append(node.page)
            parent = node
        self._pool.touch(met)
        if self._events is not None:
            first = len(hashes) - len(stored)  # what follows a page that was not cached was not cached either
            self._events.stored(stored, hashes[first - 1] if first else ROOT)
        return len(stored)

    def insert_last(self, chains: Iterable[tuple[Sequence[PageHash], Sequence[PageId]]]) -> None:
        """`insert` of the last page of each, after the others were inserted: all of them are one event."""
        if not self.enabled:
            return
        nodes = self._chains.nodes
        stored: list[tuple[PageHash, PageHash]] = []
        for hashes, pages in chains:
            last = len(hashes) - 1
            parent = nodes.get(hashes[last - 1]) if last else None
            if hashes[last] in nodes or (last and parent is None):
                self._tell_stored(stored)
                stored = []
                self.insert(hashes, pages, start=last)
            else:
                self._link(hashes[last], pages[last], parent)
                stored.append((hashes[last], parent.page_hash if parent else ROOT))
        self._tell_stored(stored)

    def _tell_stored(self, pages: Sequence[tuple[PageHash, PageHash]]) -> None:
        if self._events is not None and pages:
            self._events.stored_each(pages)

    # What comes from, and goes to, another worker's cache.

    def hottest(self, max_pages: int) -> list[CachedPage]:
        """The pages most likely to be wanted again, parents before their children: those that somebody holds, then
        those that were found again since they came, then the others; of each kind the latest used first."""
        idle = [self._chains.by_page[page] for page in self._pool.evictable()]
        idle.reverse()
        held = [node for page, node in self._chains.by_page.items() if self._pool.num_references(page)]
        return self._chains.rooted((*held, *sorted(idle, key=lambda one: not one.num_uses)), max_pages)

    def lacking(self, pages: Sequence[tuple[PageHash, PageHash | None]]) -> list[int]:
        """Which of (page, parent) could be cached here and are not: indexes. Those that are count as used just now."""
        if not self.enabled:
            return []
        met = [self._chains.nodes[page_hash].page for page_hash, _ in pages if page_hash in self._chains.nodes]
        self._pool.touch(met)
        fresh: dict[PageHash, int] = {}
        for index, (page_hash, parent) in enumerate(pages):
            if page_hash not in self._chains.nodes and (
                parent is None or parent in self._chains.nodes or parent in fresh
            ):
                fresh.setdefault(page_hash, index)
        return list(fresh.values())

    def graft(self, page_hash: PageHash, parent: PageHash | None, page: PageId) -> bool:
        """Makes a verified page of another worker's findable; False where its parent has gone meanwhile, or the hash is
        cached already. The caller holds the page, and keeps its reference."""
        after = self._chains.nodes.get(parent) if parent is not None else None
        if not self.enabled or page_hash in self._chains.nodes or (parent is not None and after is None):
            return False
        self._link(page_hash, page, after)
        if self._events is not None:
            self._events.stored([page_hash], parent if parent is not None else ROOT)
        return True

    def clear(self) -> None:
        """Forget every page, on every tier; those that somebody holds stay with their holders."""
        gone: list[Node] = []
        for node in self._chains.roots():
            gone += self._chains.unlink(node)
        self._pool.forget([node.page for node in gone])
        if self._tiers is not None:
            self._tiers.clear()
        self._report_moved([node.page_hash for node in gone])

    def check_integrity(self) -> None:
        """Raises AssertionError unless chains, maps and the pool agree. Checks the pool as well."""
        self._pool.check_integrity()
        cached = {PageId(page) for page in range(self._pool.num_pages) if self._pool.is_cached(PageId(page))}
        if cached != self._chains.by_page.keys():
            raise AssertionError(
                f"pool and prefix cache differ on pages {sorted(cached ^ self._chains.by_page.keys())}"
            )
        self._chains.check_integrity()

    def _check_insertable(self, hashes: Sequence[PageHash], pages: Sequence[PageId], start: int) -> None:
        """All checks before the first change, so that a refused insert leaves no trace."""
        if len(set(pages[start : len(hashes)])) != len(hashes) - start:
            raise PageMisuse(f"insert: a page is named twice in {list(pages)}")
        for index in range(start, len(hashes)):
            known, page = self._chains.by_page.get(pages[index]), pages[index]
            if known is not None and known.page_hash != hashes[index]:
                raise PageMisuse(f"insert: page {page} is cached under another hash")
            if known is None and not self._pool.can_keep(page):
                raise PageMisuse(f"insert: page {page} is {self._pool.state(page)}")

    def _link(self, page_hash: PageHash, page: PageId, parent: Node | None) -> Node:
        self._pool.keep(page)
        return self._chains.link(page_hash, page, parent)

    def _evict(self, num_pages: int) -> None:
        """Free at least `num_pages` pages, which the pool has counted as evictable."""
        gone: list[Node] = []
        num_freed = 0
        for page in self._pool.evictable():
            if num_freed >= num_pages:
                break
            node = self._chains.by_page.get(page)
            if node is None:
                continue  # it went with an older page that it hung from
            subtree = self._chains.unlink(node)
            num_freed += sum([not self._pool.num_references(one.page) for one in subtree]) if len(subtree) > 1 else 1
            gone += subtree
        assert num_freed >= num_pages, "the pool counted more evictable pages than it has"
        hashes, pages = [node.page_hash for node in gone], [node.page for node in gone]
        if self._tiers is not None:
            self._tiers.store(hashes, pages)  # before the pool may erase them or hand them out
        self._pool.forget(pages)
        self._num_evictions += len(gone)
        self._report_moved(hashes)

    def _report_moved(self, hashes: Sequence[PageHash]) -> None:
        """Pages that have left the device's cache, and what left a lower tier meanwhile: says where each is now."""
        if self._tiers is None:
            if self._events is not None:
                self._events.removed(hashes)
            return
        left = [page for page in dict.fromkeys((*hashes, *self._tiers.take_left())) if page not in self._chains.nodes]
        if self._events is not None:
            for kind in (KvEventKind.ON_HOST, KvEventKind.ON_DISK, KvEventKind.REMOVED):
                self._events.moved([page for page in left if self._tiers.place(page) is kind], kind)
