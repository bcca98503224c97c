"""Models pulls of cached pages into a prefill worker in virtual time.

Follows `worker.pull` around its real decision: pages arrive batch by batch, the last ones first, while the prompt waits
or is computed beside the pull. The source sends no more once the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from engine.cache.page_pool import PagePool
from engine.cache.prefix_cache import PrefixCache
from engine.step.sequence import Sequence
from penstock.types import PageHash, StepTotals, WorkerId
from penstock.v1 import common_pb2
from router.routing.policy.interface import PlannedPull
from simulator.world.kv_links import KvLinks
from simulator.world.network import Node
from worker.handover.policy import batch_size, first_batch_size, next_batch_size
from worker.pull.policy import MissingPages, PrefixSource, PullCosts, PullPlan

_SPARED_DIVISOR = 16  # the value of `worker.handover.intake`


Begin = Callable[[common_pb2.Pull | None], None]


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

    @property
    def pages(self) -> list[PageHash]:
        return self.hashes[self.first :]


@dataclass(slots=True, eq=False)
class _Pull:
    wanted: _Wanted
    plan: PullPlan
    holder: PageHolder
    began_s: float
    record: common_pb2.Pull
    begin: Begin | None  # None once it was called
    num_left: int  # leading pages of the prompt, up to the last one that has not arrived
    batch_pages: int
    is_over: bool = False


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
        self._by_prompt: dict[Sequence, _Pull] = {}

    @property
    def _page_bytes(self) -> int:
        return max(1, int(self._page_size * self._links.token_bytes))

    def bring(self, sequence: Sequence, plan: PlannedPull | None, begin: Begin) -> None:
        """Calls `begin` on the step loop, once, when the prompt should be queued.

        `begin` receives a record of the pull, if there is one, which is complete after `leave`.
        """
        source = self._find(plan.source) if plan is not None else None
        wanted = self._wanted(sequence, plan, source) if plan is not None and source is not None else None
        began_s = self._node.sim.now_s
        self._costs.on_steps(self._totals())
        decided = self._costs.plan(wanted.source, wanted.missing, began_s) if wanted is not None else None
        if source is None or wanted is None or decided is None:
            begin(None)
            return
        record = common_pb2.Pull(source=source.worker_id, wanted_tokens=wanted.missing.num_tokens)
        size = first_batch_size if decided.batch_s else batch_size
        batch_pages = size(self._page_bytes)
        pull = _Pull(wanted, decided, source, began_s, record, begin, len(wanted.hashes), batch_pages)
        self._by_prompt[sequence] = pull
        self._cache.await_pages(wanted.pages)
        self._send(pull)
        if decided.hold_s:
            self._node.after(decided.hold_s, lambda: self._post(lambda: _begin(pull)))
        else:
            _begin(pull)

    def leave(self, sequence: Sequence) -> None:
        """Ends the pull of a prompt that is computed or cancelled, and completes its record."""
        pull = self._by_prompt.pop(sequence, None)
        if pull is None:
            return
        if not pull.is_over:
            self._end(pull, is_failed=not self._num_pulled(pull))
        self._fill(pull)
        self._cache.unawait(pull.wanted.pages)

    def _send(self, pull: _Pull) -> None:
        stop, sent_s = pull.num_left, self._node.sim.now_s
        first = max(pull.wanted.first, stop - pull.batch_pages)

        def land() -> None:
            if pull.is_over:
                return
            self._graft(pull.wanted.hashes, first, stop)
            pull.num_left = first
            if pull.plan.batch_s:
                took_s = self._node.sim.now_s - sent_s
                pull.batch_pages = next_batch_size(stop - first, took_s, pull.plan.batch_s, self._page_bytes)
            if first > pull.wanted.first:
                self._send(pull)
            else:
                self._end(pull, is_failed=False)

        def give_up() -> None:
            if not pull.is_over:
                self._end(pull, is_failed=True)

        landed, failed = lambda: self._post(land), lambda: self._post(give_up)
        self._links.push(pull.holder.node, self._node, (stop - first) * self._page_size, landed, failed)

    def _end(self, pull: _Pull, *, is_failed: bool) -> None:
        pull.is_over = True
        wanted, now_s = pull.wanted, self._node.sim.now_s
        if is_failed:
            self._costs.on_failed(wanted.source, wanted.missing, now_s - pull.began_s, now_s)
        else:
            num_bytes = wanted.missing.num_bytes * self._num_pulled(pull) // len(wanted.pages)
            missing = replace(wanted.missing, num_bytes=max(1, num_bytes))
            self._costs.on_pulled(wanted.source, missing, now_s - pull.began_s, now_s)
        self._fill(pull)
        _begin(pull)

    def _num_pulled(self, pull: _Pull) -> int:
        return self._cache.num_present(pull.wanted.pages, only_grafted=True)

    def _fill(self, pull: _Pull) -> None:
        if not pull.record.pull_ms:
            pull.record.pull_ms = (self._node.sim.now_s - pull.began_s) * 1e3
        pull.record.pulled_tokens = self._num_pulled(pull) * self._page_size

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

    def _graft(self, hashes: list[PageHash], first: int, stop: int) -> None:
        """Caches the pages that are still missing while the pool has room for them."""
        batch = [(hashes[index], hashes[index - 1] if index else None) for index in range(first, stop)]
        num_room = max(0, self._pool.num_available - self._pool.num_pages // _SPARED_DIVISOR)
        lacking = self._cache.lacking(batch)[:num_room]
        pages = self._pool.allocate(len(lacking))
        for index, page in zip(lacking, pages, strict=True):
            self.num_pulled_tokens += self._page_size * self._cache.graft(*batch[index], page)
        self._pool.release(pages)


def _begin(pull: _Pull) -> None:
    if pull.begin is not None:
        begin, pull.begin = pull.begin, None
        begin(pull.record)
