"""Maps page hashes to pages for the prefix cache, as chains that begin with the first page of a text.

Only `engine.cache.prefix_cache` changes it, and keeps the pool consistent with it. This module knows nothing of pools,
tiers or events. A page is in the map only while its parent is, with two exceptions: in models in which every layer has
a window a parent may be detached, and its children become orphans; and a pulled page may arrive before its parent is
computed. An orphan becomes its parent's child as soon as that is in the map. A page is *rooted* if a prefix can be
found by it: pulled orphans and their descendants are not, until the orphan has its parent.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from penstock.types import CachedPage, PageHash, PageId


class ChainNode:
    """A cached page and its place in the chain."""

    __slots__ = (
        "first_child", "is_grafted", "is_rooted", "next_sibling", "num_uses", "page", "page_hash", "parent",
        "parent_hash", "previous_sibling",
    )  # fmt: skip

    def __init__(
        self,
        page_hash: PageHash,
        page: PageId,
        parent: ChainNode | None,
        parent_hash: PageHash | None,
        *,
        is_rooted: bool,
    ) -> None:
        self.page_hash = page_hash
        self.page = page
        self.parent = parent
        self.parent_hash = parent_hash  # None for the first page of a text; an orphan knows only this of its parent
        # A linked list of children: most pages have one or none, some have thousands.
        self.first_child: ChainNode | None = None
        self.next_sibling: ChainNode | None = None
        self.previous_sibling: ChainNode | None = None
        self.num_uses = 0  # by requests after the one that computed it
        self.is_grafted = False  # whether it came from elsewhere
        self.is_rooted = is_rooted

    @property
    def is_orphan(self) -> bool:
        """Returns whether the page has a parent that is not cached."""
        return self.parent is None and self.parent_hash is not None

    def children(self) -> Iterator[ChainNode]:
        child = self.first_child
        while child is not None:
            yield child
            child = child.next_sibling


class PageChains:
    """Owns the nodes. The prefix cache reads the maps; only this class changes them."""

    def __init__(self, *, keeps_orphans: bool = False) -> None:
        """Lets orphans find prefixes with `keeps_orphans`, which is for models that have a window in every layer."""
        self._keeps_orphans = keeps_orphans
        self.nodes: dict[PageHash, ChainNode] = {}
        self.by_page: dict[PageId, ChainNode] = {}
        self.awaited: Counter[PageHash] = Counter()  # pages that may arrive before their parents
        self._orphans: dict[PageHash, list[ChainNode]] = {}  # by the hash of the parent that is not in the map

    def leading(self, hashes: Sequence[PageHash]) -> list[ChainNode]:
        """Returns the nodes of the longest prefix that is cached."""
        found: list[ChainNode] = []
        for page_hash in hashes:
            node = self.nodes.get(page_hash)
            if node is None:
                break
            found.append(node)
        return found

    def roots(self) -> list[ChainNode]:
        return [node for node in self.nodes.values() if node.parent is None]

    def rooted(self, nodes: Iterable[ChainNode], max_pages: int, max_run: int | None = None) -> list[CachedPage]:
        """Returns at most `max_pages` of these pages and their ancestors, in order, parents before children.

        With `max_run`, each page adds at most that many pages, including itself.
        """
        chosen: dict[PageHash, ChainNode] = {}
        for node in nodes:
            fresh: list[ChainNode] = []
            ancestor: ChainNode | None = node
            while ancestor is not None and ancestor.page_hash not in chosen and len(fresh) != max_run:
                fresh.append(ancestor)
                ancestor = ancestor.parent
            if len(chosen) + len(fresh) > max_pages:
                continue
            chosen.update((added.page_hash, added) for added in reversed(fresh))
        return [CachedPage(page_hash, node.parent_hash, node.page) for page_hash, node in chosen.items()]

    def is_rooted(self, page_hash: PageHash) -> bool:
        node = self.nodes.get(page_hash)
        return node is not None and node.is_rooted

    def link(
        self, run: Sequence[PageHash], pages: Sequence[PageId], parent_hash: PageHash | None
    ) -> list[tuple[Sequence[PageHash], PageHash | None]]:
        """Adds a run of pages, each the child of the previous one. Returns the runs of pages, each with its parent,
        that become rooted thereby.

        The first page is a child of the page `parent_hash`, or an orphan if that page is not cached.
        """
        nodes, by_page = self.nodes, self.by_page
        parent = nodes.get(parent_hash) if parent_hash is not None else None
        is_rooted = parent.is_rooted if parent is not None else parent_hash is None or self._keeps_orphans
        rooted: list[tuple[Sequence[PageHash], PageHash | None]] = [(run, parent_hash)] if is_rooted else []
        for page_hash, page in zip(run, pages, strict=True):
            node = ChainNode(page_hash, page, parent, parent_hash, is_rooted=is_rooted)
            if parent is not None:
                _add_child(parent, node)
            elif parent_hash is not None:
                self._orphans.setdefault(parent_hash, []).append(node)
            nodes[page_hash] = by_page[page] = parent = node
            parent_hash = page_hash
            if self._orphans:
                for orphan in self._orphans.pop(page_hash, ()):
                    orphan.parent = node
                    _add_child(node, orphan)
                    if is_rooted and not orphan.is_rooted:
                        rooted += _root(orphan)
        return rooted

    def replace(self, node: ChainNode, page: PageId) -> None:
        """Makes a findable node stand for another page of the same content."""
        del self.by_page[node.page]
        node.page = page
        self.by_page[page] = node

    def unlink(self, root: ChainNode) -> list[ChainNode]:
        """Makes the subtree unfindable and returns its nodes, children before parents.

        Except in rare cases (see `PagePool.release`) that is only the root. The pool still counts the pages as cached:
        the caller has to `forget` them there.
        """
        subtree = [root]
        for node in subtree:  # grows while it is walked: parents come before their children
            if node.first_child is not None:
                subtree.extend(node.children())
        subtree.reverse()
        for node in subtree:
            self._remove(node)
        return subtree

    def detach(self, node: ChainNode) -> None:
        """Makes one page unfindable, like `unlink`; its children become orphans."""
        for child in list(node.children()):
            child.parent = child.previous_sibling = child.next_sibling = None
            self._orphans.setdefault(node.page_hash, []).append(child)
        self._remove(node)

    def _remove(self, node: ChainNode) -> None:
        before, after = node.previous_sibling, node.next_sibling
        if after is not None:
            after.previous_sibling = before
        if before is not None:
            before.next_sibling = after
        elif node.parent is not None:
            node.parent.first_child = after
        elif node.parent_hash is not None:
            siblings = self._orphans[node.parent_hash]
            siblings.remove(node)
            if not siblings:
                del self._orphans[node.parent_hash]
        del self.nodes[node.page_hash], self.by_page[node.page]

    def unawait(self, hashes: Iterable[PageHash]) -> list[ChainNode]:
        """Counts these pages as awaited once less. Unlinks and returns orphans that nobody awaits any more, with their
        descendants.
        """
        gone: list[ChainNode] = []
        for page_hash in hashes:
            self.awaited[page_hash] -= 1
            if self.awaited[page_hash]:
                continue
            del self.awaited[page_hash]
            node = self.nodes.get(page_hash)
            if not self._keeps_orphans and node is not None and node.is_orphan:
                gone += self.unlink(node)
        return gone

    def _all_orphans(self) -> Iterator[ChainNode]:
        return itertools.chain.from_iterable(self._orphans.values())

    def check_integrity(self) -> None:
        """Raises AssertionError unless maps and chains agree."""
        if len(self.nodes) != len(self.by_page):
            raise AssertionError(f"{len(self.nodes)} hashes for {len(self.by_page)} pages")
        num_links = 0
        for page_hash, node in self.nodes.items():
            if node.page_hash != page_hash or self.by_page.get(node.page) is not node:
                raise AssertionError(f"page {node.page}: the maps by hash and by page differ")
            if node.parent is not None and self.nodes.get(node.parent.page_hash) is not node.parent:
                raise AssertionError(f"page {node.page}: cached, but its parent page {node.parent.page} is not")
            for child in node.children():
                if child.parent is not node or self.nodes.get(child.page_hash) is not child:
                    raise AssertionError(f"page {node.page}: has child page {child.page}, which does not know it")
                num_links += 1
        if num_links != sum(node.parent is not None for node in self.nodes.values()):
            raise AssertionError("a page has a child that is not cached")
        parentless = {node for node in self.nodes.values() if node.is_orphan}
        if parentless != set(self._all_orphans()) or not self.nodes.keys().isdisjoint(self._orphans):
            raise AssertionError("a page is not its parent's child although both are cached")
        if not self._keeps_orphans and any(node.page_hash not in self.awaited for node in parentless):
            raise AssertionError("a page is cached without its parent, and no prefix can be found by it")
        for node in self.nodes.values():
            above = node.parent.is_rooted if node.parent is not None else not node.is_orphan
            if node.is_rooted != (above or self._keeps_orphans):
                raise AssertionError(f"page {node.page}: is_rooted is {node.is_rooted}")


def _root(orphan: ChainNode) -> list[tuple[Sequence[PageHash], PageHash | None]]:
    """Marks a subtree as rooted. Returns its pages, each with its parent, parents first."""
    subtree = [orphan]
    for node in subtree:  # grows while it is walked
        node.is_rooted = True
        subtree.extend(node.children())
    return [((node.page_hash,), node.parent_hash) for node in subtree]


def _add_child(parent: ChainNode, node: ChainNode) -> None:
    sibling = parent.first_child
    if sibling is not None:
        node.next_sibling, sibling.previous_sibling = sibling, node
    parent.first_child = node
