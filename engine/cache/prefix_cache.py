"""Finds pages whose KV was computed before, by the hash of everything it depends on.

A request uses it twice: before prefill, `match` returns the pages it need not compute, and `promote` fills some of the
pages allocated for the rest from lower tiers; `insert` after each step makes newly computed full pages findable. This
module decides what is in the map from hash to page and its chains (`engine.cache.page_chains`). The pool owns
references and the order of eviction, and `engine.cache.tiers` owns evicted pages. A page that a transfer may still
write must not get in: the caller inserts only computed or verified pages, and the pool refuses fenced ones.

A cached page is of use only while its parent is cached too, so leaves are evicted first: before the least recently used
page goes, all its descendants go. Referenced pages of that subtree keep their holders and are merely no longer
findable.

If every layer of the model has a window, only the pages of a prefix's last window are needed to find it
(`engine.cache.windows`). Pages are then evicted one by one, and children stay findable without their parents. If only
some layers have one, all pages of a prefix are needed and, in its last window, their windowed parts.

In other models a page without its parent is cached only while somebody awaits it: pages may be pulled from another
worker, the last ones first, while the prompt's beginning is computed here. The prompt takes them when it gets there.

Routers receive an event for each page that moves: to the device, to the best lower tier that has it, or to nowhere. A
pulled page is reported once its parent is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from engine.cache.page_chains import ChainNode, PageChains
from engine.cache.page_pool import PageMisuse, PagePool
from engine.cache.retention.holds import Lost
from engine.cache.retention.session_hints import SessionHints
from engine.cache.tiers import CacheJournal, CacheSource, CacheTiers
from engine.cache.windows.page_window import PageWindow
from engine.cache.windows.sink_window import SinkWindow
from engine.cache.windows.window_parts import WindowParts
from penstock.config.retention import RetentionConfig
from penstock.kv.events import KvEventKind, KvEventLog
from penstock.kv.page_places import ROOT
from penstock.kv.page_texts import TextSource
from penstock.types import CachedPage, CacheStats, PageHash, PageId


class PrefixCache:
    """A page pool and its findable pages. Not thread-safe: the worker's step loop is the only caller."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        events: KvEventLog | None = None,
        enabled: bool = True,
        tiers: CacheTiers | None = None,
        window: int | None = None,
        on_free: Callable[[Sequence[PageId]], None] | None = None,
        retention: RetentionConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        parts: WindowParts | None = None,
        sinks: SinkWindow | None = None,
    ) -> None:
        """`window` is how many tokens, including itself, a token reads in the layer that reads most; None: all.
        `on_free`, `retention`, `clock` and `parts` are the pool's; with parts there are no tiers. `sinks` limits
        attention.
        """
        self.page_size = page_size
        self.sinks = sinks
        self.window = PageWindow(window, page_size)
        self.enabled = enabled
        self.pool = PagePool(num_pages, on_free, self._evict, clock, retention, parts)
        self._events = events
        self._tiers = tiers
        self._journal: CacheJournal | None = None
        self._num_queries = self._num_device_hits = self._num_evictions = 0  # pages
        self._chains = PageChains(keeps_orphans=window is not None)
        self.hints = SessionHints(self._chains, self.pool.retention, self.pool.num_references)

    @property
    def num_cached(self) -> int:
        return len(self._chains.nodes)

    @property
    def stats(self) -> CacheStats:
        below = CacheStats() if self._tiers is None else self._tiers.stats
        own = {"queries": self._num_queries, "device_hits": self._num_device_hits, "evictions": self._num_evictions}
        return replace(below, **own)

    def match(
        self, hashes: Sequence[PageHash], num_unneeded: int = 0, window: PageWindow | None = None
    ) -> list[PageId]:
        """Returns the pages of the longest prefix on the device, with a reference on each for the caller to release.

        Pages behind the `window`, by default the model's, and the first `num_unneeded` pages, are neither looked for
        nor referenced: their entries are 0 (`first_needed` counts them). The windowed parts of the last window's pages
        are held too. Call `promote` next, once there are pages for the rest.
        """
        nodes, length = self._chains.nodes, self._num_leading(hashes, num_unneeded, window)
        first = self.first_needed(length, num_unneeded, window)
        found = [nodes[page_hash] for page_hash in hashes[first:length]]
        for node in found:
            node.num_uses += 1
        pages = [node.page for node in found]
        self.pool.share(pages, self.windowed(pages))
        if first:  # pages behind the window age with the rest of their text
            self.pool.touch([nodes[page_hash].page for page_hash in hashes[:first] if page_hash in nodes])
        if self._tiers is not None:  # allocating the rest evicts pages, but must not evict those about to be promoted
            self._tiers.touch(self._below(hashes[length:]))
        return [*[PageId(0)] * first, *pages]

    def windowed(self, matched: Sequence[PageId]) -> Sequence[PageId]:
        """Returns those of the pages that `match` returned whose windowed part it holds; none if pages are whole."""
        return () if self.pool.parts is None else matched[self.pool.parts.first_needed(len(matched)) :]

    def first_needed(self, num_pages: int, num_unneeded: int = 0, window: PageWindow | None = None) -> int:
        """Returns how many leading pages of a prefix of `num_pages` are not needed by the tokens after it."""
        return max(num_unneeded, (window or self.window).num_behind(num_pages * self.page_size))

    def _num_leading(self, hashes: Sequence[PageHash], num_unneeded: int = 0, window: PageWindow | None = None) -> int:
        """Returns the length of the longest prefix on the device."""
        nodes, parts = self._chains.nodes, self.pool.parts
        if self.window.tokens is None:
            leading = self._chains.leading(hashes)
            return len(leading) if parts is None else parts.longest_prefix([node.page for node in leading])
        return (window or self.window).longest_prefix(len(hashes), num_unneeded, lambda index: hashes[index] in nodes)

    def _below(self, hashes: Sequence[PageHash]) -> list[PageHash]:
        """Returns the pages that lower tiers hold; in models that need the whole prefix, only those before the first
        miss.
        """
        assert self._tiers is not None
        if self.window.tokens is None:
            return self._tiers.leading(hashes)
        return [page_hash for page_hash in hashes if self._tiers.holds(page_hash)]

    def promote(
        self,
        hashes: Sequence[PageHash],
        pages: Sequence[PageId],
        num_matched: int,
        num_unneeded: int = 0,
        window: PageWindow | None = None,
        owner: str = "",
    ) -> int:
        """Fills pages after the matched ones from lower tiers, and returns how many leading pages hold their KV.

        `pages` are those that `match` returned for these arguments, then fresh ones that only the caller holds. Blocks
        while they are copied; filled pages are cached. It also counts the request, so call it once per request, even
        without lower tiers.
        """
        if not self.enabled:
            return num_matched
        self._num_queries += max(0, len(hashes) - num_unneeded)
        self._num_device_hits += num_matched - num_unneeded
        if self._tiers is None:
            return num_matched
        first, stop = self._promotable(hashes[: len(pages)], num_matched, num_unneeded, window)
        num_filled = num_matched
        if stop > first:
            num_loaded = self._tiers.load(hashes[first:stop], pages[first:stop])
            self.insert(hashes[: first + num_loaded], pages, first, owner)
            self._report_moved([])
            if self.window.tokens is None or num_loaded == stop - first:
                num_filled = first + num_loaded
        return num_filled

    @property
    def has_tiers(self) -> bool:
        """Returns whether evicted pages are kept below the device."""
        return self._tiers is not None

    def keep_journal(self, journal: CacheJournal) -> None:
        """From now on records in `journal` which pages are cached, beginning with the present ones."""
        self._journal = journal
        for page_hash, node in self._chains.nodes.items():
            journal.seal((page_hash,), (node.page,), node.parent_hash)

    def bring(
        self, hashes: Sequence[PageHash], max_pages: int, owner: str = "", source: CacheSource | None = None
    ) -> tuple[int, bool]:
        """Copies at most `max_pages` pages of this prefix to the device ahead of a request, from `source` or by default
        from lower tiers.

        Returns how many it has copied, and whether none is left to copy. Blocks while they are copied.
        """
        source = source or self._tiers
        if source is None or max_pages < 1 or not self.enabled:
            return 0, True
        matched = self.match(hashes)
        first, stop = self._loadable(source, hashes, len(matched), 0, None)
        num_held = self.first_needed(len(matched))
        count = min(max_pages, stop - first, self.pool.num_available)
        loaded = self.pool.allocate(max(0, count))
        num_loaded = 0
        if loaded:
            num_loaded = source.load(hashes[first : first + count], loaded)
            entries = [*[PageId(0)] * first, *loaded]
            self.insert(hashes[: first + num_loaded], entries, first, owner)
            self._report_moved([])
        self.pool.release(loaded)
        self.pool.release(matched[num_held:])
        return num_loaded, first + num_loaded >= stop or num_loaded < count

    def _promotable(
        self, hashes: Sequence[PageHash], num_matched: int, num_unneeded: int, window: PageWindow | None
    ) -> tuple[int, int]:
        """Returns the first page worth loading from lower tiers, and the page after the last."""
        assert self._tiers is not None
        return self._loadable(self._tiers, hashes, num_matched, num_unneeded, window)

    def _loadable(
        self,
        source: CacheSource,
        hashes: Sequence[PageHash],
        num_matched: int,
        num_unneeded: int,
        window: PageWindow | None,
    ) -> tuple[int, int]:
        if self.window.tokens is None:
            return num_matched, num_matched + len(source.leading(hashes[num_matched:]))
        first_real = self.first_needed(num_matched, num_unneeded, window)
        stop = (window or self.window).longest_prefix(
            len(hashes),
            num_unneeded,
            lambda index: first_real <= index < num_matched or source.holds(hashes[index]),
        )
        return max(num_matched, self.first_needed(stop, num_unneeded, window)), stop

    def peek(self, hashes: Sequence[PageHash]) -> int:
        """Returns how many leading pages `match` and then `promote` would fill, without a reference or any side
        effect."""
        if self.window.tokens is not None:
            num_matched = self._num_leading(hashes)
            return num_matched if self._tiers is None else self._promotable(hashes, num_matched, 0, None)[1]
        num_leading = self._num_leading(hashes)
        return num_leading + (len(self._tiers.leading(hashes[num_leading:])) if self._tiers else 0)

    def note_texts(self, source: TextSource, hashes: Sequence[PageHash], first: int = 0) -> None:
        """Records the tokens of the pages `hashes[first:]`, which are inserted next, for readers of events that want
        tokens. Without such readers it costs nothing.
        """
        if self.enabled and self._events is not None:
            self._events.note_texts(source, hashes, first)

    def note_found_texts(self, source: TextSource, hashes: Sequence[PageHash]) -> None:
        """Does the same for pages that `source` has found here, whose tokens are unknown if another worker sent
        them.
        """
        if self.enabled and self._events is not None:
            self._events.note_held_texts(source, hashes)

    def insert(self, hashes: Sequence[PageHash], pages: Sequence[PageId], start: int = 0, owner: str = "") -> int:
        """Makes `pages[i]`, full and computed, findable as `hashes[i]`; returns how many pages entered the cache.

        Both lists begin at the sequence's first page; `pages` may be longer. A caller that inserts after every step
        passes as `start` the number inserted before, so that a long sequence does not walk its whole chain again. If
        another page has a hash already, that page stays and the caller's remains uncached. `owner` is the tenant that
        the pages count for. Raises PageMisuse for a page that is free, fenced, or cached under another hash.
        """
        if not self.enabled:
            return 0
        if len(pages) < len(hashes):
            raise PageMisuse(f"insert: {len(hashes)} hashes for {len(pages)} pages")
        start = min(start, len(hashes))
        if self.sinks is not None and start > 0 and not self._chains.is_rooted(hashes[start - 1]):
            return 0  # the caller may have released the parent
        while self.window.tokens is None and start > 0 and not self._chains.is_rooted(hashes[start - 1]):
            start -= 1  # the parent has been evicted: begin where the chain is intact
        self._check_insertable(hashes[start:], pages[start : len(hashes)])
        nodes, index, num_stored = self._chains.nodes, start, 0
        stored: list[tuple[Sequence[PageHash], PageHash | None]] = []  # runs of pages, each with its parent
        met: list[PageId] = []  # cached pages with the same content; they count as used
        while index < len(hashes):
            if (node := nodes.get(hashes[index])) is not None:
                self._restore_part(node, pages[index], owner)
                met.append(node.page)
                index += 1
                continue
            first, parent = index, hashes[index - 1] if index else None
            while index < len(hashes) and hashes[index] not in nodes:
                index += 1
            stored += self._link(hashes[first:index], pages[first:index], parent, owner)
            num_stored += index - first
        self.pool.touch(met)
        self._report_stored(stored)
        return num_stored

    def insert_last(self, chains: Iterable[tuple[Sequence[PageHash], Sequence[PageId], str]]) -> None:
        """Inserts the last page of each chain (hashes, pages, tenant), whose other pages are already inserted, and
        reports them as one event.
        """
        if not self.enabled:
            return
        nodes = self._chains.nodes
        stored: list[tuple[Sequence[PageHash], PageHash | None]] = []
        for hashes, pages, owner in chains:
            last = len(hashes) - 1
            if hashes[last] in nodes or (last and not self._chains.is_rooted(hashes[last - 1])):
                self._report_stored(stored)
                stored = []
                self.insert(hashes, pages, last, owner)
            else:
                stored += self._link((hashes[last],), (pages[last],), hashes[last - 1] if last else None, owner)
        self._report_stored(stored)

    def _restore_part(self, node: ChainNode, page: PageId, owner: str) -> None:
        """Caches `page`, with the same content, in place of a page that has lost its windowed part."""
        parts = self.pool.parts
        if parts is None or page == node.page or parts.has(node.page) or not parts.has(page):
            return
        self.pool.forget([node.page])
        self._chains.replace(node, page)
        self.pool.keep([page], owner)

    def _report_stored(self, runs: Sequence[tuple[Sequence[PageHash], PageHash | None]]) -> None:
        if self._events is not None and runs:
            self._events.stored_runs([(run, ROOT if parent is None else parent) for run, parent in runs])

    # Pages exchanged with another worker's cache.

    def hottest(self, max_pages: int) -> list[CachedPage]:
        """Returns the pages most likely to be used again, parents before their children.

        Referenced pages come first, then those that were found again since they were cached, then the others; within
        each group the most recently used comes first.
        """
        idle = [self._chains.by_page[page] for page in self.pool.evictable()]
        idle.reverse()
        held = [node for page, node in self._chains.by_page.items() if self.pool.num_references(page)]
        max_run = None if self.window.tokens is None else max(1, -(-(self.window.tokens - 1) // self.page_size))
        return self._chains.rooted((*held, *sorted(idle, key=lambda node: not node.num_uses)), max_pages, max_run)

    def num_on_device(self, hashes: Sequence[PageHash]) -> int:
        """Returns the length in pages of the prefix that `match` would find, without a reference or any side effect."""
        return self._num_leading(hashes)

    def find(self, hashes: Sequence[PageHash]) -> list[CachedPage]:
        """Returns the longest leading run of these consecutive pages that is cached on the device.

        The run may begin anywhere in a prompt. The caller takes references.
        """
        return [CachedPage(node.page_hash, node.parent_hash, node.page) for node in self._chains.leading(hashes)]

    def lacking(self, pages: Sequence[tuple[PageHash, PageHash | None]]) -> list[int]:
        """Returns the indexes of the (page, parent) pairs that are not cached here but could be, and touches the
        others. None could be if pages have two parts.
        """
        if not self.enabled or self.pool.parts is not None:
            return []
        met = [self._chains.nodes[page_hash].page for page_hash, _ in pages if page_hash in self._chains.nodes]
        self.pool.touch(met)
        fresh: dict[PageHash, int] = {}
        for index, (page_hash, parent) in enumerate(pages):
            if page_hash not in self._chains.nodes and (self._may_enter(page_hash, parent) or parent in fresh):
                fresh.setdefault(page_hash, index)
        return list(fresh.values())

    def graft(self, page_hash: PageHash, parent: PageHash | None, page: PageId, owner: str = "") -> bool:
        """Makes a verified page from elsewhere findable, for the tenant `owner`; the caller keeps its reference.

        Returns False if its parent has been evicted meanwhile, or the hash is cached already.
        """
        if not self.enabled or page_hash in self._chains.nodes or not self._may_enter(page_hash, parent):
            return False
        stored = self._link((page_hash,), (page,), parent, owner)
        self._chains.nodes[page_hash].is_grafted = True
        self._report_stored(stored)
        return True

    def _may_enter(self, page_hash: PageHash, parent: PageHash | None) -> bool:
        """Returns whether a page with that parent can be found here, or will be."""
        has_parent = parent is None or parent in self._chains.nodes
        return has_parent or self.window.tokens is not None or page_hash in self._chains.awaited

    # Pages that are pulled while the tokens before them are computed.

    @property
    def is_awaiting(self) -> bool:
        return bool(self._chains.awaited)

    def await_pages(self, hashes: Sequence[PageHash]) -> None:
        """Lets these pages enter before their parents. Each call needs one of `unawait`."""
        self._chains.awaited.update(hashes)

    def unawait(self, hashes: Sequence[PageHash]) -> None:
        """Ends what `await_pages` began, and forgets those of the pages that no prefix can be found by."""
        self._forget(self._chains.unawait(hashes), Lost.PRESSURE)

    def num_present(self, hashes: Sequence[PageHash], *, only_grafted: bool = False) -> int:
        """Returns how many of these pages are on the device, or how many of them came from elsewhere."""
        nodes = [node for page_hash in hashes if (node := self._chains.nodes.get(page_hash)) is not None]
        return sum(node.is_grafted for node in nodes) if only_grafted else len(nodes)

    def num_lacking(self, hashes: Sequence[PageHash]) -> int:
        """Returns how many of these pages come before the first one that is on the device."""
        return next((index for index, page_hash in enumerate(hashes) if page_hash in self._chains.nodes), len(hashes))

    def swap_in(self, hashes: Sequence[PageHash], pages: list[PageId], first: int) -> int:
        """Replaces `pages[first:]`, which hold no KV yet and are released, by cached pages, up to the first one that is
        not on the device. Returns how many it has replaced.

        `match` and `promote` were called for these hashes before, and found fewer.
        """
        found = self._chains.leading(hashes[first:])
        for node in found:
            node.num_uses += 1
        taken, stop = [node.page for node in found], first + len(found)
        self.pool.share(taken)
        replaced, pages[first:stop] = pages[first:stop], taken
        self.pool.release(replaced)
        self._num_device_hits += len(taken)
        return len(taken)

    def clear(self) -> None:
        """Forgets every page, on every tier; referenced pages stay with their holders."""
        gone: list[ChainNode] = []
        for node in self._chains.roots():
            gone += self._chains.unlink(node)
        self._forget(gone, Lost.CLEARED)
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

    def _check_insertable(self, hashes: Sequence[PageHash], pages: Sequence[PageId]) -> None:
        """Runs all checks before the first change, so that a refused insert changes nothing."""
        if len(set(pages)) != len(hashes):
            raise PageMisuse(f"insert: a page is named twice in {list(pages)}")
        by_page, uncached = self._chains.by_page, pages
        if not by_page.keys().isdisjoint(pages):
            uncached = [page for page in pages if page not in by_page]
            for page_hash, page in zip(hashes, pages, strict=True):
                if page in by_page and by_page[page].page_hash != page_hash:
                    raise PageMisuse(f"insert: page {page} is cached under another hash")
        if (refused := self.pool.first_to_refuse(uncached)) is not None:
            raise PageMisuse(f"insert: page {refused} is {self.pool.state(refused)}")

    def _link(
        self, run: Sequence[PageHash], pages: Sequence[PageId], parent: PageHash | None, owner: str = ""
    ) -> list[tuple[Sequence[PageHash], PageHash | None]]:
        """Caches a run of pages of a tenant, each the child of the previous one. Returns the runs to be reported."""
        self.pool.keep(pages, owner)
        if self._journal is not None:
            self._journal.seal(run, pages, parent)
        return self._chains.link(run, pages, parent)

    def _evict(self, num_pages: int) -> None:
        """Frees at least `num_pages` pages, which the pool has counted as evictable."""
        gone: list[ChainNode] = []
        num_freed = 0
        for page in self.pool.to_evict():
            node = self._chains.by_page.get(page)
            if node is None:
                continue  # evicted already, with an ancestor
            if self.window.tokens is not None:
                self._chains.detach(node)
                subtree = [node]
            else:
                subtree = self._chains.unlink(node)
            num_freed += sum([not self.pool.num_references(each.page) for each in subtree]) if len(subtree) > 1 else 1
            gone += subtree
            if num_freed >= num_pages:
                break
        if num_freed < num_pages:
            raise PageMisuse(f"evict: {num_freed} of {num_pages} pages found; the pool counted more as evictable")
        found = [node for node in gone if node.is_rooted]
        hashes = [node.page_hash for node in found]
        if self._tiers is not None:  # before the pool may erase them or hand them out
            self._tiers.store(hashes, [node.page for node in found])
        self._forget(gone, Lost.PRESSURE)
        self._num_evictions += len(gone)
        self._report_moved(hashes)

    def _forget(self, gone: Sequence[ChainNode], cause: Lost) -> None:
        """Returns the pages of unlinked nodes to the pool."""
        pages = [node.page for node in gone]
        if self._journal is not None:  # before the pool may hand them out
            self._journal.unseal(pages)
        self.pool.forget(pages, cause)

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
