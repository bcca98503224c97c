"""Models pulls of cached pages into a prefill worker in virtual time.

Follows `worker.pull` around its real decision: pages arrive batch by batch, and a prompt waits until the last one or
until its time for them is over. It uses what has arrived, and the source sends no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.cache.page_pool import PagePool
from engine.cache.prefix_cache import PrefixCache
from engine.step.sequence import Sequence
from penstock.types import PageHash, StepTotals, WorkerId
from penstock.v1 import common_pb2
from router.routing.policy.interface import PlannedPull
from simulator.world.kv_links import KvLinks
from simulator.world.network import Node
from worker.handover.policy import batch_size
from worker.pull.policy import MissingPages, PrefixSource, PullCosts

_SPARED_DIVISOR = 16  # the value of `worker.handover.intake`


Then = Callable[[common_pb2.Pull | None], None]


class PageHolder(Protocol):
    """A worker of either role that pages are pulled from."""

    node: Node
    cache: PrefixCache
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The pages that a prompt would get from its source."""

    source: PrefixSource
    hashes: list[PageHash]  # of the prompt, up to the last page to pull
    first: int  # first page to pull
    missing: MissingPages


class PullModel:
    """Pulls into one worker's pool."""

    def __init__(
        self,
        node: Node,
        links: KvLinks,
        pool: PagePool,
        cache: PrefixCache,
        page_size: int,
        find: Callable[[str], PageHolder | None],
        post: Callable[[Callable[[], None]], None],
        totals: Callable[[], StepTotals],
        chunk_tokens: int,
    ) -> None:
        """`find` returns the worker of a name; `totals` returns the steps that have computed prompts here."""
        self.num_pulled_tokens = 0
        self._node = node
        self._links = links
        self._pool = pool
        self._cache = cache
        self._page_size = page_size
        self._find = find
        self._post = post
        self._totals = totals
        self._costs = PullCosts(chunk_tokens)

    def bring(self, sequence: Sequence, plan: PlannedPull | None, then: Then) -> None:
        """Calls `then` on the step loop, once, when the pages have arrived or will not arrive.

        `then` receives a report of the pull, if there was one.
        """
        source = self._find(plan.source) if plan is not None else None
        wanted = self._wanted(sequence, plan, source) if plan is not None and source is not None else None
        began_s = self._node.sim.now_s
        self._costs.on_steps(self._totals())
        decided = self._costs.plan(wanted.source, wanted.missing, began_s) if wanted is not None else None
        if source is None or wanted is None or decided is None:
            then(None)
            return
        is_over = False

        def end() -> None:
            nonlocal is_over
            is_over = True
            then(self._report(wanted, began_s))

        def send(first: int) -> None:
            stop = min(first + batch_size(self._page_size * self._links.token_bytes), len(wanted.hashes))
            landed, failed = lambda: self._post(lambda: land(stop)), lambda: self._post(give_up)
            self._links.push(source.node, self._node, (stop - first) * self._page_size, landed, failed)

        def land(stop: int) -> None:
            self._graft(wanted.hashes[:stop])
            if is_over:
                return
            if stop < len(wanted.hashes):
                send(stop)
                return
            now_s = self._node.sim.now_s
            self._costs.on_pulled(wanted.source, wanted.missing, now_s - began_s, now_s)
            end()

        def give_up() -> None:
            if not is_over:
                now_s = self._node.sim.now_s
                self._costs.on_failed(wanted.source, wanted.missing, now_s - began_s, now_s)
                end()

        self._node.after(decided.patience_s, lambda: self._post(give_up))
        send(wanted.first)

    def _wanted(self, sequence: Sequence, plan: PlannedPull, source: PageHolder) -> _Wanted | None:
        size = self._page_size
        hashes = sequence.hash_full_pages(size)[: plan.tokens // size]
        hashes = hashes[: source.cache.num_on_device(hashes)]
        first = self._cache.num_on_device(hashes)
        num_pages = min(len(hashes) - first, self._pool.num_available - self._pool.num_pages // _SPARED_DIVISOR)
        if num_pages <= 0:
            return None
        num_tokens = num_pages * size
        return _Wanted(
            PrefixSource(source.worker_id, source.node.epoch, "", "", plan.tokens, plan.pull_s, plan.compute_s),
            hashes[: first + num_pages],
            first,
            MissingPages(num_tokens, first * size, num_tokens * self._links.token_bytes),
        )

    def _report(self, wanted: _Wanted, began_s: float) -> common_pb2.Pull:
        num_pulled = max(0, self._cache.num_on_device(wanted.hashes) - wanted.first)
        return common_pb2.Pull(
            source=wanted.source.worker_id,
            wanted_tokens=wanted.missing.num_tokens,
            pulled_tokens=num_pulled * self._page_size,
            pull_ms=(self._node.sim.now_s - began_s) * 1e3,
        )

    def _graft(self, hashes: list[PageHash]) -> None:
        """Caches the pages that are still missing while the pool has room for them."""
        num_here = self._cache.num_on_device(hashes)
        num_room = max(0, self._pool.num_available - self._pool.num_pages // _SPARED_DIVISOR)
        wanted = hashes[num_here : num_here + num_room]
        pages = self._pool.allocate(len(wanted))
        parent = hashes[num_here - 1] if num_here else None
        for page_hash, page in zip(wanted, pages, strict=True):
            self.num_pulled_tokens += self._page_size * self._cache.graft(page_hash, parent, page)
            parent = page_hash
        self._pool.release(pages)
