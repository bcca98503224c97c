"""Models pulls of cached pages into a prefill worker in virtual time.

Follows `worker.pull` around its real decision: a prompt waits until its pages have arrived or its time for them is
over, and computes the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.cache.page_pool import PagePool
from engine.cache.prefix_cache import PrefixCache
from engine.step.sequence import Sequence
from penstock.types import PageHash, StepTotals, WorkerId
from penstock.v1 import common_pb2
from router.routing.policy.interface import PlannedPull
from simulator.world.kv_links import KvLinks
from simulator.world.network import Node
from worker.pull.policy import MissingPages, PrefixSource, PullCosts

_SPARED_DIVISOR = 16  # the value of `worker.handover.intake`


Then = Callable[[common_pb2.Pull | None], None]


class PageHolder(Protocol):
    """A worker of either role that pages are pulled from."""

    node: Node
    cache: PrefixCache
    worker_id: WorkerId


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
        if plan is None or source is None:
            then(None)
            return
        hashes = sequence.hash_full_pages(self._page_size)[: plan.tokens // self._page_size]
        hashes = hashes[: source.cache.num_on_device(hashes)]
        num_here = self._cache.num_on_device(hashes)
        num_pages = min(len(hashes) - num_here, self._pool.num_available - self._pool.num_pages // _SPARED_DIVISOR)
        prefix_source = PrefixSource(
            source.worker_id, source.node.epoch, "", "", plan.tokens, plan.pull_s, plan.compute_s
        )
        num_tokens = num_pages * self._page_size
        missing = MissingPages(num_tokens, num_here * self._page_size, num_tokens * self._links.token_bytes)
        self._costs.on_steps(self._totals())
        began_s = self._node.sim.now_s
        decided = self._costs.plan(prefix_source, missing, began_s) if num_pages > 0 else None
        if decided is None:
            then(None)
            return
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                num_pulled = self._cache.num_on_device(hashes[: num_here + num_pages]) - num_here
                then(
                    common_pb2.Pull(
                        source=source.worker_id,
                        wanted_tokens=num_tokens,
                        pulled_tokens=max(0, num_pulled) * self._page_size,
                        pull_ms=(self._node.sim.now_s - began_s) * 1e3,
                    )
                )

        def land() -> None:
            now_s = self._node.sim.now_s
            self._graft(hashes[: num_here + num_pages])
            if not is_over:
                self._costs.on_pulled(prefix_source, missing, now_s - began_s, now_s)
            end()

        def give_up() -> None:
            now_s = self._node.sim.now_s
            if not is_over:
                self._costs.on_failed(prefix_source, missing, now_s - began_s, now_s)
            end()

        self._node.after(decided.patience_s, lambda: self._post(give_up))
        self._links.push(source.node, self._node, num_tokens, lambda: self._post(land), lambda: self._post(give_up))

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
