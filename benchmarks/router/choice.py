"""Measures the cost of choosing a pair of workers: matching, pricing, crediting (`make bench-router`).

One thread without network serves 32 prefill and 32 decode workers with a load each, a million indexed pages, and
prompts of 8k tokens in pages of 16, of which workers hold different parts. The baselines of the kv-aware policy are
pricing every pair, with which it must agree, and policies that consider less. Times are the thread's CPU time.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from benchmarks.common.report import Row, percentile, publish
from penstock.kv.events import KvEvent, KvEventBatch, KvEventKind
from penstock.kv.page_hash import hash_pages, make_salt
from penstock.types import Labels, PageHash, WorkerId, WorkerLoad
from router.routing.costs.cost_model import CostBook
from router.routing.costs.inflight import InflightLedger
from router.routing.costs.link_costs import LinkBook
from router.routing.index.prefix_index import PrefixIndex
from router.routing.placement_core import LearnedLinkPricing, PlacementCore
from router.routing.policy import prices
from router.routing.policy.cost_terms import DEFAULT_WEIGHTS, EndCosts
from router.routing.policy.interface import PairChoice, PlacementDemand, PlacementPolicy, WorkerLimits, WorkerView
from router.routing.policy.kv_aware import KvAwarePolicy
from router.routing.policy.policies import make_policy

NUM_EACH = 32
NUM_PAGES = 1_000_000
PROMPT_PAGES = 512
PAGE_SIZE = 16
TOKEN_BYTES = 131_072.0
BOUND_US = 150.0
_NUM_PROMPTS = 64
_ROUNDS = 400
_PREFILL = [WorkerId(f"prefill-{number}") for number in range(NUM_EACH)]
_DECODE = [WorkerId(f"decode-{number}") for number in range(NUM_EACH)]
_LIMITS = WorkerLimits(chunk_tokens=2048, max_running=256, max_local_tokens=32)


ResultT = TypeVar("ResultT")
Cached = tuple[dict[WorkerId, int], bytes]  # cached tokens by worker, and the prefix that identifies them


@dataclass(frozen=True, slots=True)
class IndexedWorker:
    """A worker as the router sees it."""

    worker_id: WorkerId
    load: WorkerLoad
    page_size: int = PAGE_SIZE
    limits: WorkerLimits = _LIMITS


class BusyFleet:
    """A fleet under load as a router sees it."""

    def __init__(self, rng: random.Random, num_pages: int = NUM_PAGES) -> None:
        """The workers cache `num_pages` together."""
        self.rng = rng
        self.index = PrefixIndex()
        self.prompts = [_pages(rng) for _ in range(_NUM_PROMPTS)]
        self._fill(num_pages // (2 * NUM_EACH))
        self.ledger, self.costs, book = InflightLedger(), CostBook(), LinkBook()
        for number, (prefill, decode) in enumerate(zip(_PREFILL, _DECODE, strict=True)):
            for worker_id in (prefill, decode):
                book.set_labels(worker_id, Labels(f"host-{number}", f"rack-{number // 8}", "zone"))
        self.links = LearnedLinkPricing(book, self.ledger)
        self.core = PlacementCore(self.ledger, self.costs, book)
        self.workers = {name: IndexedWorker(name, self._load(name)) for name in (*_PREFILL, *_DECODE)}

    def report(self) -> None:
        """Updates the load of a random decode worker."""
        worker_id = self.rng.choice(_DECODE)
        self.workers[worker_id] = IndexedWorker(worker_id, self._load(worker_id))

    def _fill(self, per_worker: int) -> None:
        """Gives about half of the workers a part of each prompt, and all of them pages that no prompt needs."""
        rng = self.rng
        for worker_id in (*_PREFILL, *_DECODE):
            held = [page for prompt in rng.sample(self.prompts, 28) for page in prompt[: rng.randint(1, PROMPT_PAGES)]]
            others = [PageHash(rng.randbytes(16)) for _ in range(per_worker - len(held))]
            events = (KvEvent(KvEventKind.STORED, tuple(held)), KvEvent(KvEventKind.STORED, tuple(others)))
            assert self.index.apply(worker_id, KvEventBatch(1, events))

    def _load(self, worker_id: WorkerId) -> WorkerLoad:
        rng, decodes = self.rng, worker_id in _DECODE
        return WorkerLoad(
            num_running=rng.randint(0, 60) if decodes else 4,
            free_pages=rng.randint(0, 30_000),
            total_pages=40_000,
            queued_prefill_tokens=0 if decodes else rng.randint(0, 20_000),
        )

    def match(self, prompt: Sequence[PageHash]) -> Cached:
        found = self.index.match(prompt)
        cached = {worker_id: held.num_pages * PAGE_SIZE for worker_id, held in found.items()}
        return cached, bytes(prompt[3])

    def demand(self, prompt: Cached, now_s: float) -> PlacementDemand:
        cached, prefix = prompt
        return self.core.demand(
            num_tokens=PROMPT_PAGES * PAGE_SIZE + 5,
            max_tokens=256,
            token_bytes=TOKEN_BYTES,
            cached_tokens=cached,
            prefill=_PREFILL,
            links=self.links,
            now_s=now_s,
            prefix=prefix,
        )

    def views(self, names: Sequence[WorkerId]) -> Sequence[WorkerView]:
        return self.core.views([self.workers[name] for name in names], self.ledger.sent_to_all)

    def choose(self, policy: PlacementPolicy, prompt: Cached, now_s: float) -> tuple[PairChoice, PlacementDemand]:
        demand = self.demand(prompt, now_s)
        choice = policy.choose(demand, self.views(_DECODE), self.views(_PREFILL), self.rng)
        return choice, demand


def measure() -> list[Row]:
    fleet = BusyFleet(random.Random(0))
    check(fleet)
    policies = {name: make_policy(name) for name in ("kv-aware", "consistent-hash", "least-loaded", "round-robin")}
    matching: list[float] = []
    choosing: dict[str, list[float]] = {name: [] for name in policies}
    whole: list[float] = []
    for turn in range(_ROUNDS):
        pages = fleet.prompts[turn % _NUM_PROMPTS]
        fleet.report()
        for name, policy in policies.items():
            match_us, prompt = _time_us(lambda: fleet.match(pages))  # noqa: B023
            choose_us, (choice, demand) = _time_us(lambda: fleet.choose(policy, prompt, turn / 100))  # noqa: B023
            commit_us, commitment = _time_us(lambda: fleet.core.commit(choice, demand, PAGE_SIZE, turn / 100))  # noqa: B023
            choosing[name].append(choose_us + commit_us)
            if name == "kv-aware":
                matching.append(match_us)
                whole.append(match_us + choose_us + commit_us)
            fleet.ledger.settle(commitment.credits)
    brute = [_time_us(lambda: _cheapest(fleet, fleet.match(fleet.prompts[0])))[0] for _ in range(5)]
    tokens = list(range(PROMPT_PAGES * PAGE_SIZE))
    hashing = [_time_us(lambda: hash_pages(tokens, PAGE_SIZE, make_salt("r1")))[0] for _ in range(20)]
    rows = [
        Row("match, choose and credit, p50", median(whole), "us", "bound", BOUND_US),
        Row("match, choose and credit, p99", percentile(whole, 0.99), "us", "bound", BOUND_US),
        Row("matching 512 pages", median(matching), "us"),
    ]
    for name, times in choosing.items():
        rows.append(Row(f"choosing and crediting, {name}", median(times), "us", "every pair priced", median(brute)))
    rows.append(Row("hashing the prompt, before routing", median(hashing), "us"))
    return rows


def _pages(rng: random.Random) -> list[PageHash]:
    return [PageHash(rng.randbytes(16)) for _ in range(PROMPT_PAGES)]


def _time_us(call: Callable[[], ResultT]) -> tuple[float, ResultT]:
    started_ns = time.thread_time_ns()
    result = call()
    return (time.thread_time_ns() - started_ns) / 1e3, result


def _cheapest(fleet: BusyFleet, prompt: Cached) -> float:
    """Returns the lowest cost of all pairs, by the terms of a policy that has not seen a queue yet."""
    demand, costs = fleet.demand(prompt, 0.0), EndCosts(DEFAULT_WEIGHTS)
    senders = costs.prefill(demand, fleet.views(_PREFILL), fleet.rng)
    return min(
        receiver[0] + sender[0] + prices.transfer_between_s(demand, sender[2].worker_id, receiver[2])
        for receiver in costs.decode(demand, fleet.views(_DECODE), fleet.rng)
        for sender in senders
    )


def check(fleet: BusyFleet) -> None:
    """Asserts that the pruned search finds the cheapest pair."""
    for pages in fleet.prompts[:8]:
        prompt = fleet.match(pages)
        choice, _ = fleet.choose(KvAwarePolicy(), prompt, 0.0)
        assert choice.score.total_s <= _cheapest(fleet, prompt) + 1e-9


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.router.choice",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    publish(
        "choice",
        f"{2 * NUM_EACH} workers, {NUM_PAGES:,} indexed pages, prompts of {PROMPT_PAGES * PAGE_SIZE:,} tokens",
        measure(),
    )


if __name__ == "__main__":
    main()
