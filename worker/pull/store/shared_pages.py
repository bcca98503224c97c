"""Reads pages from the shared store and writes pages into it. Runs on the step loop.

Listings and this worker's own writes show what the store holds, so looking for a missing page costs nothing. A page
that has been deleted since costs a failed read, and is computed. Objects are copied into the pool between steps as they
arrive, a few megabytes at a time. Pages to be written are held only until another thread has copied them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.engine import Engine
from engine.step.sequence import Sequence as TokenSequence
from penstock.config.kv_store import KvStoreConfig
from penstock.errors import Cancelled, DeadlineExceeded, PenstockError, TransferError
from penstock.metrics.worker_metrics import (
    STORE_BYTES,
    STORE_DELETED,
    STORE_FAILURES,
    STORE_MISSED_PAGES,
    STORE_READ_BYTES,
    STORE_READ_PAGES,
    STORE_READ_SECONDS,
    STORE_READS,
    STORE_REFUSED,
    STORE_UNWRITTEN,
    STORE_USABLE,
    STORE_WRITE_SECONDS,
    STORE_WRITES,
    STORE_WRITTEN_BYTES,
    WorkerMetrics,
)
from penstock.types import SHARED_STORE, Epoch, PageHash, PageId
from penstock.v1 import worker_pb2
from worker.pull.client import Stop
from worker.pull.policy import PartlyPulled, PrefixSource
from worker.pull.store.announcer import RunAnnouncer
from worker.pull.store.backends.object_store import ObjectStore
from worker.pull.store.housekeeping import Housekeeping, Listing
from worker.pull.store.known_runs import KnownRuns
from worker.pull.store.object_format import RunFormat
from worker.pull.store.pool_bytes import PoolBytes
from worker.pull.store.read_costs import ReadCosts
from worker.pull.store.store_threads import NUM_READERS, Reader, RunRead, RunWrite, StoreThreads, Writer
from worker.pull.store.write_policy import choose_runs, worth_at_end, worth_at_start

log = logging.getLogger(__name__)

_BYTES_AT_ONCE = 8 << 20  # most bytes copied into the pool between two steps, which takes a few milliseconds
_AHEAD_BYTES = 64 << 20  # most bytes of one prompt's objects that are being read, or read and not yet copied
_SPARED_DIVISOR = 16  # at most this fraction of the pool is held for writes
_MAX_CHOSEN = 1024  # most runs of one text written at a time
_MAX_DEFERRED = 64  # texts
_CLOSE_S = 2.0  # time for pending writes when the worker ends

OnEnd = Callable[[PenstockError | None], None]


@dataclass(slots=True, eq=False)
class _Reading:
    """Objects of one prompt. Each is a run of pages, known by its place in the prompt."""

    form: RunFormat
    hashes: Sequence[PageHash]
    first: int  # first page that is wanted
    tenant: str
    deadline_s: float
    needs_all: bool  # whether a part of the pages is useless without the others
    on_end: OnEnd
    to_ask: deque[int]  # runs in the order in which they are read
    asked: set[int] = field(default_factory=set)
    arrived: dict[int, memoryview] = field(default_factory=dict)
    problem: PenstockError | None = None

    def run_hashes(self, run: int) -> Sequence[PageHash]:
        return self.hashes[run * self.form.run_pages : (run + 1) * self.form.run_pages]

    @property
    def is_over(self) -> bool:
        return not (self.to_ask or self.asked or self.arrived)

    def lose(self, problem: PenstockError) -> None:
        """Does without one object."""
        self.problem = self.problem or problem
        if self.needs_all:
            self.stop(problem)

    def stop(self, problem: PenstockError) -> None:
        """Reads nothing more, and drops what is still to come."""
        self.problem = self.problem or problem
        self.to_ask.clear()
        self.asked.clear()
        self.arrived.clear()


class SharedPages:
    """Owns the threads of the store, what is known of it, and the reads and writes in flight."""

    def __init__(
        self,
        engine: Engine,
        config: KvStoreConfig,
        store: ObjectStore,
        key: Callable[[], bytes],
        owner: str,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key` returns the deployment's key for objects, or nothing, and may be called from any thread; `owner` is
        unique among all processes; `post` runs a call on the step loop."""
        self._engine = engine
        self._config = config
        self._key = key
        self._post = post
        self._clock = clock
        self._pool_bytes = PoolBytes(engine.kv_pages)
        self._threads = StoreThreads(store, config.timeout_s)
        self._housekeeping = Housekeeping(
            self._threads,
            owner,
            config.max_bytes,
            config.listing_s,
            self._form,
            lambda listing: post(partial(self._on_listed, listing)),
        )
        self._known = KnownRuns()
        self._costs = ReadCosts()
        self._readings: list[_Reading] = []
        self._deferred: deque[tuple[Sequence[PageHash], int]] = deque()  # texts to be written, which hold no pages
        self._is_closing = False
        self.announcer = RunAnnouncer()
        self._num_held = 0  # pages held until they are copied
        self._waiting_bytes = 0  # of pages that are copied or to be copied, and not yet written
        self.metrics = WorkerMetrics()

    def start(self) -> None:
        self._threads.start()
        self._housekeeping.start()

    def close(self) -> None:
        """Ends the threads. Pending writes have two seconds to finish. Blocks.

        Call it while the step loop runs, which afterwards holds no page for the store.
        """
        self._housekeeping.close()
        is_closing = threading.Event()

        def close() -> None:
            self._is_closing = True
            is_closing.set()

        self._post(close)
        is_closing.wait(_CLOSE_S)
        self._threads.close(_CLOSE_S)

    def describe(self) -> worker_pb2.SharedStore:
        return worker_pb2.SharedStore(url=self._config.url, run_pages=self._form().run_pages)

    def _form(self) -> RunFormat:
        layout = self._engine.model_layout  # with the revision of the weights in use
        return RunFormat(layout.digest(), layout.page_bytes, layout.page_size, self._key())

    # Reading.

    def source(self, hashes: Sequence[PageHash]) -> PrefixSource | None:
        cache, form = self._engine.prefix_cache, self._form()
        if not self._threads.is_usable:
            return None
        num_here = cache.num_on_device(hashes)
        stop = self._num_leading(form, hashes, num_here)
        if stop <= num_here:
            return None
        num_objects = stop // form.run_pages - num_here // form.run_pages
        pull_s = self._costs.predict(num_objects, form.run_bytes, self._clock())
        return PrefixSource(SHARED_STORE, Epoch(0), self._config.url, "", stop * form.page_tokens, pull_s)

    def _num_leading(self, form: RunFormat, hashes: Sequence[PageHash], num_here: int) -> int:
        cache = self._engine.prefix_cache
        first_needed = None if cache.window.tokens is None else cache.first_needed
        return self._known.num_leading(form, hashes, num_here, first_needed)

    def num_bytes(self, first: int, stop: int) -> int:
        form = self._form()
        return (-(-stop // form.run_pages) - first // form.run_pages) * form.run_bytes

    def read(
        self,
        hashes: Sequence[PageHash],
        first: int,
        tenant: str,
        timeout_s: float,
        on_end: OnEnd,
        *,
        latest_first: bool = False,
    ) -> Stop:
        form = self._form()
        runs = range(first // form.run_pages, len(hashes) // form.run_pages)
        to_ask, deadline_s = deque(reversed(runs) if latest_first else runs), self._clock() + timeout_s
        reading = _Reading(form, hashes, first, tenant, deadline_s, not latest_first, on_end, to_ask)
        self._readings.append(reading)
        self._ask(reading)
        return partial(self._stop, reading)

    def _stop(self, reading: _Reading) -> None:
        """Reads no more of a prompt's objects, and drops those that are still to come."""
        if reading in self._readings:
            self._end(reading, Cancelled("every request that waited for the pages has ended"))

    def _ask(self, reading: _Reading) -> None:
        ahead = max(NUM_READERS, min(_AHEAD_BYTES // reading.form.run_bytes, 4 * NUM_READERS))
        while reading.to_ask and len(reading.asked) + len(reading.arrived) < ahead:
            run = reading.to_ask.popleft()
            reading.asked.add(run)
            on_read = partial(self._on_read, reading, run)
            self._threads.read(
                Reader(
                    reading.form,
                    reading.run_hashes(run),
                    partial(self._is_wanted, reading, run),
                    lambda read, on_read=on_read: self._post(partial(on_read, read)),  # type: ignore[misc]
                )
            )

    def _is_wanted(self, reading: _Reading, run: int) -> bool:
        return run in reading.asked and self._clock() < reading.deadline_s

    def _on_read(self, reading: _Reading, run: int, read: RunRead) -> None:
        self.metrics.add(STORE_READ_SECONDS, read.seconds)
        name, is_wanted = reading.run_hashes(run)[-1], run in reading.asked
        reading.asked.discard(run)
        if read.pages is not None:
            self.metrics.add(STORE_READS)
            self.metrics.add(STORE_READ_BYTES, len(read.pages))
            self._costs.observe(len(read.pages), read.seconds, self._clock())
            if is_wanted:
                reading.arrived[run] = read.pages
        elif read.is_refused:
            self.metrics.add(STORE_REFUSED)
            self._known.refuse(name)
            reading.lose(PartlyPulled(f"an object {read.problem}"))
        elif read.problem:
            reading.stop(TransferError(f"the shared store failed: {read.problem}"))
        else:
            self._known.discard(name)
            reading.lose(PartlyPulled("an object is no longer in the shared store"))

    def sweep(self, now_s: float) -> float | None:
        """Copies what has arrived, a little at a time, and ends reads. Returns when to sweep again.

        That is at once if a read has ended: its prompts go on, and nothing else would wake an idle step loop.
        """
        budget, num_readings = _BYTES_AT_ONCE, len(self._readings)
        for reading in list(self._readings):
            while budget > 0 and reading.arrived:
                run = next(iter(reading.arrived))
                content = reading.arrived.pop(run)
                self._land(reading, run, content)
                budget -= len(content)
            self._ask(reading)
            if reading.is_over:
                self._end(reading, reading.problem)
            elif now_s >= reading.deadline_s:
                self._end(reading, DeadlineExceeded("the shared store did not deliver the pages in time"))
        if budget <= 0 or len(self._readings) < num_readings:
            return now_s
        return min((reading.deadline_s for reading in self._readings), default=None)

    def _land(self, reading: _Reading, run: int, content: memoryview) -> None:
        """Caches the pages of an object that are not cached yet."""
        cache, pool = self._engine.prefix_cache, self._engine.pool
        begin = run * reading.form.run_pages
        start, stop = max(begin, reading.first), begin + reading.form.run_pages
        pages = [(reading.hashes[index], reading.hashes[index - 1] if index else None) for index in range(start, stop)]
        lacking = cache.lacking(pages)
        if len(lacking) > pool.num_available:
            reading.stop(PartlyPulled("no page is free for more"))
            return
        taken = pool.allocate(len(lacking))
        if taken:
            self._pool_bytes.fill(taken, content, [start - begin + index for index in lacking])
        num_cached = 0
        for index, page in zip(lacking, taken, strict=True):
            num_cached += cache.graft(*pages[index], page, reading.tenant)
        pool.release(taken)
        self.metrics.add(STORE_READ_PAGES, num_cached)

    def _end(self, reading: _Reading, problem: PenstockError | None) -> None:
        self._readings.remove(reading)
        if problem is not None:
            reading.stop(problem)
        reading.on_end(problem)

    # Writing.

    def on_prompt(self, sequence: TokenSequence) -> None:
        """Writes the pages that a prompt about to be computed shares with earlier texts, unless they are already
        stored.
        """
        if sequence.scores_prompt:
            return
        cache = self._engine.prefix_cache
        hashes = self._hashes(sequence, len(sequence.token_ids) - 1)
        num_here = cache.num_on_device(hashes)
        self._write(hashes, worth_at_start(self._config.write, num_here))
        num_found = max(cache.peek(hashes), self._num_leading(self._form(), hashes, num_here))
        self.metrics.add(STORE_MISSED_PAGES, len(hashes) - num_found)

    def on_end(self, sequence: TokenSequence) -> None:
        """Writes the pages of a text that has ended, if that is configured. Call it while the sequence holds its
        pages.
        """
        hashes = self._hashes(sequence, sequence.num_computed_tokens)
        is_pinned = bool(sequence.kv_hints and sequence.kv_hints.pin_s)
        self._write(hashes, worth_at_end(self._config.write, len(hashes), is_pinned))

    def _hashes(self, sequence: TokenSequence, num_tokens: int) -> Sequence[PageHash]:
        size = self._engine.layout.page_size
        return sequence.hash_full_pages(size)[: num_tokens // size]

    def _write(self, hashes: Sequence[PageHash], num_pages: int) -> None:
        """Writes those of a text's leading pages that are not stored yet, now or once there is room."""
        form = self._form()
        if num_pages < form.run_pages or self._is_closing or not self._threads.is_usable:
            return
        size, cache = form.run_pages, self._engine.prefix_cache
        runs = choose_runs(
            num_pages, size, lambda run: self._known.holds(form, hashes[(run + 1) * size - 1]), _MAX_CHOSEN
        )
        for run in runs:
            if self._room(form) < 1:
                self._defer(hashes, num_pages)
                return
            part = hashes[run * size : (run + 1) * size]
            found = cache.find(part)
            if len(found) == size:  # in a model with a window, and after a while, pages may be gone
                self._write_run(form, part, [each.page for each in found])

    def _defer(self, hashes: Sequence[PageHash], num_pages: int) -> None:
        if len(self._deferred) >= _MAX_DEFERRED:
            self._deferred.popleft()
            self.metrics.add(STORE_UNWRITTEN)
        self._deferred.append((hashes, num_pages))

    def _write_deferred(self) -> None:
        form = self._form()
        while self._deferred and self._room(form) >= 1:
            self._write(*self._deferred.popleft())

    def _room(self, form: RunFormat) -> int:
        """Returns how many more runs may be held for writing."""
        pool = self._engine.pool
        of_pool = max(form.run_pages, pool.num_pages // _SPARED_DIVISOR) - self._num_held
        return min(of_pool // form.run_pages, (self._config.queue_bytes - self._waiting_bytes) // form.run_bytes)

    def _write_run(self, form: RunFormat, hashes: Sequence[PageHash], pages: list[PageId]) -> None:
        self._engine.pool.share(pages)
        self._num_held += len(pages)
        self._waiting_bytes += form.run_bytes
        self._known.add_pending(form, hashes[-1])
        copy = self._pool_bytes.copier(pages)

        def take() -> memoryview:
            try:
                return copy()
            finally:
                self._post(lambda: self._let_go(pages))

        on_done = partial(self._on_written, form, hashes[-1])
        self._threads.write(Writer(form, hashes, take, lambda write: self._post(partial(on_done, write))))

    def _let_go(self, pages: list[PageId]) -> None:
        self._num_held -= len(pages)
        self._engine.pool.release(pages)
        self._write_deferred()

    def _on_written(self, form: RunFormat, name: PageHash, write: RunWrite) -> None:
        self._waiting_bytes -= form.run_bytes
        self._known.end_pending(form, name, is_stored=not write.problem, now_s=self._clock())
        self.metrics.add(STORE_WRITE_SECONDS, write.seconds)
        if not write.problem:
            self.metrics.add(STORE_WRITES)
            self.metrics.add(STORE_WRITTEN_BYTES, write.num_bytes)
        self._write_deferred()

    # Calls that update which pages the store is known to hold.

    def _on_listed(self, listing: Listing) -> None:
        self._known.on_listed(listing.folder, listing.known, listing.begun_s)
        self.announcer.publish(listing.known)
        self.metrics.add(STORE_DELETED, listing.num_deleted)
        if listing.num_bytes is not None:
            self.metrics.set(STORE_BYTES, float(listing.num_bytes))

    def values(self) -> Mapping[str, float]:
        """Returns the metric values. May be called from any thread."""
        own = {
            STORE_FAILURES.name: float(self._threads.num_failures),
            STORE_USABLE.name: float(self._threads.is_usable),
        }
        return {**self.metrics.values(), **own}
