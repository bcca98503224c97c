"""Takes pages of dead workers of this host into this worker's cache instead of computing them. Runs on the step loop.

When a prompt arrives, its pages in any kept pool are copied at once. The successor of a dead worker, the one with its
name, also copies the rest, a little between every two steps and only into unused pages, and then lets the keeper
release the pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.cache.kept.journal import SealedPage
from engine.cache.kept.kept_pool import KeptPool
from engine.cache.kept.pool_journal import PoolJournal
from engine.engine import Engine
from engine.step.sequence import Sequence
from penstock.config import KeeperConfig
from penstock.errors import InvalidInput
from penstock.metrics.worker_metrics import (
    KEPT_PAGES,
    KEPT_PAGES_DAMAGED,
    KEPT_POOLS,
    KEPT_POOLS_REFUSED,
    WorkerMetrics,
)
from worker.pull.kept.keeper_link import Deposit, KeeperLink, KeptFiles
from worker.pull.kept.restore_policy import choose_restored

log = logging.getLogger(__name__)

_BYTES_AT_ONCE = 8 << 20  # most bytes copied between two steps, which takes a few milliseconds


@dataclass(slots=True)
class _Attached:
    pool: KeptPool
    worker_id: str
    pool_id: bytes
    until_s: float
    left: list[SealedPage] = field(default_factory=list)  # to be restored, parents before children
    is_planned: bool = False


class KeptPages:
    """Owns the journal of this worker's pool, its deposit with the keeper, and the pools of dead workers."""

    def __init__(
        self,
        engine: Engine,
        config: KeeperConfig,
        worker_id: str,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError if the pool's memory cannot outlive the process."""
        self._engine = engine
        self._worker_id = worker_id
        self._post = post
        self._clock = clock
        self._attached: list[_Attached] = []  # most recent last
        self.metrics = WorkerMetrics()
        self._journal = PoolJournal(engine.kv_pages)
        deposit = Deposit(
            engine.model_layout.digest(),
            worker_id,
            self._journal.pool_id,
            self._journal.num_pages,
            config.lease_s,
            self._journal.pool_fd,
            self._journal.fd,
        )
        self._link = KeeperLink(config.name, deposit, self._on_kept, self._on_released)

    def start(self) -> None:
        """Starts the journal, deposits the pool, and attaches the pools that the keeper has. Call it before the step
        loop runs. Blocks.
        """
        self._engine.prefix_cache.keep_journal(self._journal)
        self._link.start()

    def close(self) -> None:
        """Withdraws the pool, so that nothing outlives this process. Blocks."""
        self._link.close()

    def _on_kept(self, files: KeptFiles) -> None:
        """Maps a pool, on the link's thread."""
        try:
            pool = KeptPool(files.pool_fd, files.journal_fd, files.pool_id, files.num_pages, self._engine.kv_pages)
        except (InvalidInput, OSError) as error:
            log.error("cannot use the pool of dead worker %s: %s", files.worker_id, error)
            self._post(lambda: self.metrics.add(KEPT_POOLS_REFUSED))
            return
        attached = _Attached(pool, files.worker_id, files.pool_id, self._clock() + files.left_s)
        self._post(lambda: self._attach(attached))

    def _attach(self, attached: _Attached) -> None:
        log.info("dead worker %s left %d cached pages to restore", attached.worker_id, len(attached.pool.pages))
        self.metrics.add(KEPT_POOLS)
        self._attached.append(attached)

    def _on_released(self, pool_id: bytes) -> None:
        self._post(lambda: self._detach(pool_id))

    def _detach(self, pool_id: bytes) -> None:
        self._attached = [each for each in self._attached if each.pool_id != pool_id]

    def recall(self, sequence: Sequence) -> None:
        """Copies the pages of a prompt that dead workers have left into this worker's cache. Blocks for the copy."""
        if not self._attached or sequence.scores_prompt:
            return
        size = self._engine.layout.page_size
        hashes = sequence.hash_full_pages(size)[: (len(sequence.token_ids) - 1) // size]
        for attached in reversed(self._attached):
            damaged = attached.pool.num_damaged
            num_pages, _ = self._engine.prefix_cache.bring(hashes, len(hashes), sequence.tenant, source=attached.pool)
            self._count(num_pages, attached.pool.num_damaged - damaged)

    def sweep(self, now_s: float) -> float | None:
        """Detaches pools whose lease is over, and restores the next pages. Returns when to sweep again."""
        self._attached = [each for each in self._attached if each.until_s > now_s]
        for attached in self._attached:
            if attached.worker_id == self._worker_id:
                if self._restore(attached):
                    return now_s
                self._link.on_restored(attached.pool_id)
                self._detach(attached.pool_id)
        return min((each.until_s for each in self._attached), default=None)

    def _restore(self, attached: _Attached) -> bool:
        """Copies the next pages; returns False if none is left or no page is free for more."""
        cache, pool = self._engine.prefix_cache, self._engine.pool
        room = pool.num_free - pool.num_reserve
        if not attached.is_planned:
            attached.is_planned = True
            attached.left = choose_restored(
                attached.pool.pages,
                max(0, room),
                lambda page_hash: bool(cache.find([page_hash])),
                needs_parents=cache.window.tokens is None,
            )
        count = max(1, _BYTES_AT_ONCE // self._engine.layout.page_bytes)
        batch, attached.left = attached.left[:count], attached.left[count:]
        batch = [page for page in batch if attached.pool.holds(page.page_hash)]
        wanted = [batch[index] for index in cache.lacking([(page.page_hash, page.parent) for page in batch])]
        if len(wanted) > room:
            return False
        if wanted:
            self._copy(attached.pool, wanted)
        return bool(attached.left)

    def _copy(self, source: KeptPool, wanted: list[SealedPage]) -> None:
        cache, pool, damaged = self._engine.prefix_cache, self._engine.pool, source.num_damaged
        pages = pool.allocate(len(wanted))
        source.load([page.page_hash for page in wanted], pages)
        num_grafted = sum(
            source.holds(sealed.page_hash) and cache.graft(sealed.page_hash, sealed.parent, page)
            for sealed, page in zip(wanted, pages, strict=True)
        )
        pool.release(pages)
        self._count(num_grafted, source.num_damaged - damaged)

    def _count(self, num_pages: int, num_damaged: int) -> None:
        self.metrics.add(KEPT_PAGES, num_pages)
        self.metrics.add(KEPT_PAGES_DAMAGED, num_damaged)

    def values(self) -> Mapping[str, float]:
        return self.metrics.values()
