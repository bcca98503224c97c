"""What it costs to choose a pair of workers: matching, pricing, crediting.  `python -m benchmarks.choice`

One thread, no network. 32 prefill and 32 decode workers with a load each, a million indexed pages, prompts of 8k tokens
in pages of 16 of which workers hold different parts. Beside the kv-aware policy stand pricing every pair, which it
must agree with, and the policies that look at less. Times are the thread's own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from benchmarks.report import Row, publish
from penstock.kv_events import KvEvent, KvEventBatch, KvEventKind
from penstock.page_hash import hash_pages, make_salt
from penstock.types import Labels, PageHash, WorkerId, WorkerLoad
from router import prices
from router.appraisal import Appraisal, Prompt
from router.choice import KvAware, Weights
from router.cost_model import CostBook
from router.inflight import InflightLedger
from router.policies import make_policy
from router.prefix_index import PrefixIndex
from router.topology import LinkBook, LinkCost
from router.views import Choice, Demand, Limits, Policy, WorkerView

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
_LIMITS = Limits(chunk_tokens=2048, max_running=256, max_local_tokens=32)


ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Worker:
    worker_id: WorkerId
    load: WorkerLoad
    page_size: int = PAGE_SIZE
    limits: Limits = _LIMITS


class Links:
    """The router's own, without breakers."""

    def __init__(self, book: LinkBook, ledger: InflightLedger) -> None:
        self._book, self._ledger = book, ledger
        self.cost = book.cost

    @property
    def fastest(self) -> LinkCost:
        return self._book.fastest

    def bytes_ahead(self, prefill: WorkerId, decode: WorkerId) -> int:
        return self._ledger.link_bytes((prefill, decode))


class World:
    """A fleet under load, as one router knows it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.index = PrefixIndex()
        self.prompts = [_pages(rng) for _ in range(_NUM_PROMPTS)]
        self._fill()
        self.ledger, self.costs, book = InflightLedger(), CostBook(), LinkBook()
        for number, (prefill, decode) in enumerate(zip(_PREFILL, _DECODE, strict=True)):
            for worker_id in (prefill, decode):
                book.set_labels(worker_id, Labels(f"host-{number}", f"rack-{number // 8}", "zone"))
        self.links = Links(book, self.ledger)
        self.appraisal = Appraisal(self.ledger, self.costs, book)
        self.workers = {one: Worker(one, self._load(one)) for one in (*_PREFILL, *_DECODE)}

    def report(self) -> None:
        """Some worker tells its load."""
        one = self.rng.choice(_DECODE)
        self.workers[one] = Worker(one, self._load(one))

    def _fill(self) -> None:
        """Half of the workers hold a part of each prompt, all of them pages that no prompt asks for."""
        rng, per_worker = self.rng, NUM_PAGES // (2 * NUM_EACH)
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

    def match(self, prompt: Sequence[PageHash]) -> Prompt:
        found = self.index.match(prompt)
        cached = {worker_id: held.num_pages * PAGE_SIZE for worker_id, held in found.items()}
        return Prompt(PROMPT_PAGES * PAGE_SIZE + 5, 256, cached, {}, bytes(prompt[3]))

    def views(self, names: Sequence[WorkerId]) -> list[WorkerView]:
        return self.appraisal.views([self.workers[one] for one in names], self.ledger.sent_to)

    def choose(self, policy: Policy, prompt: Prompt, now_s: float) -> tuple[Choice, Demand]:
        demand = self.appraisal.demand(prompt, TOKEN_BYTES, _PREFILL, self.links, now_s)
        choice = policy.choose(demand, self.views(_DECODE), self.views(_PREFILL), self.rng)
        return choice, demand


def measure() -> list[Row]:
    world = World(random.Random(0))
    _check(world)
    policies = {name: make_policy(name) for name in ("kv-aware", "consistent-hash", "least-loaded", "round-robin")}
    matching: list[float] = []
    choosing: dict[str, list[float]] = {name: [] for name in policies}
    whole: list[float] = []
    for turn in range(_ROUNDS):
        pages = world.prompts[turn % _NUM_PROMPTS]
        world.report()
        for name, policy in policies.items():
            match_us, prompt = _time_us(lambda: world.match(pages))  # noqa: B023
            choose_us, (choice, demand) = _time_us(lambda: world.choose(policy, prompt, turn / 100))  # noqa: B023
            commit_us, commitment = _time_us(lambda: world.appraisal.commit(choice, demand, PAGE_SIZE, turn / 100))  # noqa: B023
            choosing[name].append(choose_us + commit_us)
            if name == "kv-aware":
                matching.append(match_us)
                whole.append(match_us + choose_us + commit_us)
            world.ledger.settle(commitment.credits)
    brute = [_time_us(lambda: _cheapest(world, world.match(world.prompts[0])))[0] for _ in range(5)]
    tokens = list(range(PROMPT_PAGES * PAGE_SIZE))
    hashing = [_time_us(lambda: hash_pages(tokens, PAGE_SIZE, make_salt("r1")))[0] for _ in range(20)]
    rows = [
        Row("match, choose and credit, p50", median(whole), "us", "bound", BOUND_US),
        Row("match, choose and credit, p99", _p99(whole), "us", "bound", BOUND_US),
        Row("matching 512 pages", median(matching), "us"),
    ]
    for name, times in choosing.items():
        rows.append(Row(f"choosing and crediting, {name}", median(times), "us", "every pair priced", median(brute)))
    rows.append(Row("hashing the prompt, before all this", median(hashing), "us"))
    return rows


def _pages(rng: random.Random) -> list[PageHash]:
    return [PageHash(rng.randbytes(16)) for _ in range(PROMPT_PAGES)]


def _time_us(call: Callable[[], ResultT]) -> tuple[float, ResultT]:
    started_ns = time.thread_time_ns()
    result = call()
    return (time.thread_time_ns() - started_ns) / 1e3, result


def _p99(times: Sequence[float]) -> float:
    return sorted(times)[int(0.99 * len(times))]


def _cheapest(world: World, prompt: Prompt) -> float:
    """By pricing each pair and each decode worker that may compute the prompt itself."""
    demand = world.appraisal.demand(prompt, TOKEN_BYTES, _PREFILL, world.links, 0.0)
    prefill = world.views(_PREFILL)
    return min(prices.price(demand, one, other).total_s for one in world.views(_DECODE) for other in prefill)


def _check(world: World) -> None:
    """The pruned search finds the cheapest pair."""
    for pages in world.prompts[:8]:
        prompt = world.match(pages)
        choice, _ = world.choose(KvAware(Weights(decode_weight=1.0)), prompt, 0.0)
        assert choice.score.total_s <= _cheapest(world, prompt) + 1e-9


def main() -> None:
    publish(
        "choice",
        f"{2 * NUM_EACH} workers, {NUM_PAGES:,} indexed pages, prompts of {PROMPT_PAGES * PAGE_SIZE:,} tokens",
        measure(),
    )


if __name__ == "__main__":
    main()
