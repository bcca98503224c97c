"""Measures the router's prefix index: encoded events per second, lookups, memory, and the longest pause.

`python -m benchmarks.router.index` runs in one thread without network, with 64 workers, a million pages, and prompts of
8k tokens in pages of 16. The baseline of each figure alternates with it: a plain dict from each page to the set of its
workers, updated and searched page by page. Times are the thread's CPU time, so that other processes do not count.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgpack

from benchmarks.common.report import Row, publish
from benchmarks.common.timing import Stopwatch, elapsed_s
from penstock.config import IndexConfig
from penstock.kv.events import KvEventBatch, KvEventKind, KvEventLog, decode_events, encode_events, split_snapshot
from penstock.kv.page_hash import hash_pages, make_salt
from penstock.kv.page_places import ROOT
from penstock.types import PageHash, WorkerId
from router.routing.index.prefix_index import PrefixIndex

NUM_WORKERS = 64
NUM_PAGES = 1_000_000
PROMPT_PAGES = 512
PAGE_SIZE = 16
_TURNS = 5
_WORKERS = [WorkerId(f"worker-{number}") for number in range(NUM_WORKERS)]
_NEWCOMER = WorkerId("newcomer")


class PlainIndex:
    """The obvious index: a dict from each page to its workers."""

    def __init__(self) -> None:
        self.workers: dict[bytes, set[WorkerId]] = {}

    def apply(self, worker_id: WorkerId, payload: bytes) -> None:
        for kind, *hashes in msgpack.unpackb(payload):
            for page in hashes:
                if kind == KvEventKind.STORED:
                    self.workers.setdefault(page, set()).add(worker_id)
                elif holders := self.workers.get(page):
                    holders.discard(worker_id)
                    if not holders:
                        del self.workers[page]

    def match(self, hashes: Sequence[PageHash]) -> dict[WorkerId, int]:
        found: dict[WorkerId, int] = {}
        alive: set[WorkerId] = self.workers.get(hashes[0], set())
        if not alive:
            return found
        for depth, page in enumerate(hashes):
            left = alive & self.workers.get(page, set())
            if len(left) != len(alive):
                found |= dict.fromkeys(alive - left, depth)
                alive = left
                if not alive:
                    return found
        return found | dict.fromkeys(alive, len(hashes))


def chain(rng: random.Random, length: int) -> list[PageHash]:
    return [PageHash(rng.randbytes(16)) for _ in range(length)]


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.router.index",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    workload = f"{NUM_WORKERS} workers, {NUM_PAGES:,} pages, prompts of {PROMPT_PAGES} pages, one thread"
    publish("index", workload, rows())


def rows() -> list[Row]:
    rng = random.Random(0)
    before = resident_bytes()
    filled = Filled(rng)
    resident = (resident_bytes() - before) / filled.index.num_pages
    reported = filled.index.num_bytes / filled.index.num_pages
    filled.fill_plain()
    return [
        *events(rng, filled.index, filled.plain),
        *lookups(rng, filled),
        Row("memory, as reported by the index", reported, "bytes a page"),
        Row("memory, resident", resident, "bytes a page"),
        *hashing(rng),
        *pauses(rng),
    ]


class Filled:
    """An index of a million pages at 64 workers, and its plain twin.

    Each worker holds its own prompts, half a prompt that all share, and different shares of one prompt.
    """

    def __init__(self, rng: random.Random) -> None:
        self.index, self.plain = PrefixIndex(), PlainIndex()
        self.half, self.steps = chain(rng, PROMPT_PAGES // 2), chain(rng, PROMPT_PAGES)
        self.held: dict[WorkerId, list[list[PageHash]]] = {}
        for number, worker in enumerate(_WORKERS):
            own = [chain(rng, PROMPT_PAGES) for _ in range(NUM_PAGES // NUM_WORKERS // PROMPT_PAGES)]
            self.held[worker] = [*own, self.half, self.steps[: PROMPT_PAGES * (number + 1) // NUM_WORKERS]]
            log = KvEventLog(window=1000)
            for prompt in self.held[worker]:
                log.stored(prompt, ROOT)
            assert self.index.apply(worker, log.read(1))
        gc.collect()

    def fill_plain(self) -> None:
        for worker, prompts in self.held.items():
            for prompt in prompts:
                self.plain.apply(worker, msgpack.packb([[int(KvEventKind.STORED), *prompt]]))


# ---- events ----------------------------------------------------------------------------------------------------------


def events(rng: random.Random, index: PrefixIndex, plain: PlainIndex) -> Iterable[Row]:
    """Yields the rate of events of another worker that stores prompts and evicts them leaf first."""
    prompts = [chain(rng, PROMPT_PAGES) for _ in range(64)]
    kinds = {
        "a prompt an event, one event a batch": (PROMPT_PAGES, 1),
        "8 pages an event, 64 events a batch": (8, 64),
        "one page an event, 64 events a batch": (1, 64),
        "one page an event, one event a batch": (1, 1),
    }
    for name, (run, every) in kinds.items():
        batches, payloads = record(prompts, run, every)
        spent: list[float] = []

        def apply(batches: list[KvEventBatch] = batches, spent: list[float] = spent) -> None:
            encoded = [(batch, encode_events(batch.events)) for batch in batches]
            with Stopwatch(time.thread_time) as watch:
                for batch, payload in encoded:
                    read = decode_events(payload)
                    received = KvEventBatch(
                        batch.first_seq, read, batch.snapshot, batch.num_merged, num_strays=batch.num_strays
                    )
                    assert index.apply(_NEWCOMER, received)
            spent.append(watch.seconds)
            assert index.pages_of(_NEWCOMER) == 0
            index.drop(_NEWCOMER)

        def apply_plain(payloads: list[bytes] = payloads, spent: list[float] = spent) -> None:
            with Stopwatch(time.thread_time) as watch:
                for payload in payloads:
                    plain.apply(_NEWCOMER, payload)
            spent.append(watch.seconds)

        num_operations = 2 * len(prompts) * PROMPT_PAGES / 1e6
        own_s, plain_s = in_turns(apply, apply_plain, spent)
        yield Row(f"events, {name}", num_operations / own_s, "M pages/s", "plain dict", num_operations / plain_s)


def record(prompts: Sequence[Sequence[PageHash]], run: int, every: int) -> tuple[list[KvEventBatch], list[bytes]]:
    """Returns the batches of a worker's log that is read after every `every` events, and the plain index's payloads."""
    log, batches = KvEventLog(), list[KvEventBatch]()
    payloads: list[bytes] = []
    waiting: list[list[object]] = []

    def sent(kind: KvEventKind, pages: Sequence[PageHash]) -> None:
        waiting.append([int(kind), *pages])
        if len(waiting) == every:
            payloads.append(msgpack.packb(waiting))
            waiting.clear()
            batches.append(log.read(batches[-1].next_seq if batches else 1))

    for prompt in prompts:
        for first in range(0, len(prompt), run):
            log.stored(prompt[first : first + run], prompt[first - 1] if first else ROOT)
            sent(KvEventKind.STORED, prompt[first : first + run])
    for prompt in prompts:
        for first in reversed(range(0, len(prompt), run)):
            log.removed(prompt[first : first + run])
            sent(KvEventKind.REMOVED, prompt[first : first + run])
    return batches, payloads


# ---- lookups ---------------------------------------------------------------------------------------------------------


def lookups(rng: random.Random, filled: Filled) -> Iterable[Row]:
    """Yields lookups of prompts that few, all or no workers hold, without and with strays in the index."""
    wanted = {
        "one worker has all": [prompts[0] for prompts in filled.held.values()],
        "all workers have half": [[*filled.half, *chain(rng, PROMPT_PAGES // 2)]],
        "each worker has another share": [filled.steps],
        "nobody has it": [chain(rng, PROMPT_PAGES)],
    }
    for name, prompts in wanted.items():
        yield lookup(f"lookup, {name}", filled.index, filled.plain, prompts)
    for worker in _WORKERS:  # a page without its parent, after which lookups visit every page
        stray = KvEventBatch(filled.index.next_seq(worker), (), num_merged=1, num_strays=1)
        assert filled.index.apply(worker, stray)
    for name, prompts in wanted.items():
        yield lookup(f"lookup with strays, {name}", filled.index, filled.plain, prompts)


def lookup(name: str, index: PrefixIndex, plain: PlainIndex, prompts: list[list[PageHash]]) -> Row:
    assert {worker: held.num_pages for worker, held in index.match(prompts[0]).items()} == plain.match(prompts[0])
    num_calls = 256
    spent: list[float] = []

    def timed(match: Callable[[list[PageHash]], object]) -> Callable[[], None]:
        def run() -> None:
            with Stopwatch(time.thread_time) as watch:
                for number in range(num_calls):
                    match(prompts[number % len(prompts)])
            spent.append(watch.seconds / num_calls)

        return run

    own_s, plain_s = in_turns(timed(index.match), timed(plain.match), spent)
    return Row(name, own_s * 1e6, "us", "plain dict", plain_s * 1e6)


def hashing(rng: random.Random) -> Iterable[Row]:
    """Yields the cost of hashing a prompt's pages, which every request pays before its lookup."""
    tokens = [rng.randrange(128_000) for _ in range(PROMPT_PAGES * PAGE_SIZE)]
    salt = make_salt("revision")
    calls = [elapsed(lambda: hash_pages(tokens, PAGE_SIZE, salt)) for _ in range(20)]
    yield Row("hashing the prompt", min(calls) * 1e6, "us")


# ---- pauses ----------------------------------------------------------------------------------------------------------


def pauses(rng: random.Random) -> Iterable[Row]:
    """Yields the longest pauses of the event loop when a worker of a million pages joins, leaves or overfills it."""
    log = KvEventLog(window=1)
    for _ in range(NUM_PAGES // PROMPT_PAGES):
        log.stored(chain(rng, PROMPT_PAGES), ROOT)
    parts = list(split_snapshot(log.read(0), max_pages=8192))  # split as by `worker.service`
    payloads = [encode_events(part.events) for part in parts]
    index = PrefixIndex()

    def apply(target: PrefixIndex, part: KvEventBatch, payload: bytes) -> None:
        target.apply(_WORKERS[0], replace(part, events=decode_events(payload)))

    took = [elapsed(lambda pair=pair: apply(index, *pair)) for pair in zip(parts, payloads, strict=True)]  # type: ignore[misc]
    yield Row("longest pause while a snapshot arrives", max(took) * 1e3, "ms")
    yield Row("pause when the worker leaves", elapsed(lambda: index.drop(_WORKERS[0])) * 1e3, "ms")
    took = []
    while index.num_pages:
        took.append(elapsed(index.tidy))
    yield Row("longest pause while its pages are forgotten", max(took) * 1e3, "ms")
    small = PrefixIndex(IndexConfig(max_pages=NUM_PAGES // 2))
    took = [elapsed(lambda pair=pair: apply(small, *pair)) for pair in zip(parts, payloads, strict=True)]  # type: ignore[misc]
    yield Row("longest pause while a snapshot of twice the limit arrives", max(took) * 1e3, "ms")


# ---- clocks ----------------------------------------------------------------------------------------------------------


def in_turns(own: Callable[[], None], other: Callable[[], None], spent: list[float]) -> tuple[float, float]:
    """Returns the quickest of a few alternating runs of each, which append their seconds to `spent`."""
    times: list[tuple[float, float]] = []
    for _ in range(_TURNS):
        spent.clear()
        own()
        other()
        times.append((spent[0], spent[1]))
    return min(own_s for own_s, _ in times), min(other_s for _, other_s in times)


def elapsed(call: Callable[[], object]) -> float:
    return elapsed_s(call, time.thread_time)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
