"""Tests that pricing workers in columns chooses the same as pricing them view by view, to the last bit, as workers
change."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from penstock.config import KvAwareConfig
from penstock.types import ChunkSpeed, StepTotals, WorkerId, WorkerLoad
from router.routing.costs.cost_model import CostBook
from router.routing.costs.inflight import InflightLedger, InflightWork
from router.routing.costs.link_costs import LinkBook
from router.routing.placement_core import LearnedLinkPricing, PlacementCore
from router.routing.policy.interface import PlacementDemand, WorkerLimits, WorkerView
from router.routing.policy.kv_aware import KvAwarePolicy
from router.routing.policy.view_table import ViewColumns


@dataclass
class Worker:
    worker_id: WorkerId
    load: WorkerLoad
    limits: WorkerLimits
    page_size: int = 16


def random_load(rng: random.Random) -> WorkerLoad:
    busy = rng.random() < 0.6
    total = rng.choice((100, 5000))
    return WorkerLoad(
        num_running=rng.randrange(20) if busy else 0,
        num_waiting=rng.choice((0, 0, rng.randrange(10))),
        free_pages=rng.randrange(total + 1),
        total_pages=total,
        queued_prefill_tokens=rng.randrange(20_000) if busy else 0,
        prefill_steps=StepTotals(rng.randrange(100), rng.randrange(50_000), rng.random() * 1e6, rng.random() * 9),
        chunks=ChunkSpeed(rng.choice((0, 16, 300)), rng.random() / 50, 1e-3, rng.random() / 1e3, 1e-8),
        decode_steps=StepTotals(rng.randrange(100), rng.randrange(5_000), rng.random() * 1e6, rng.random() * 9),
    )


def random_worker(name: str, rng: random.Random) -> Worker:
    limits = WorkerLimits(
        rng.choice((0, 256, 2048)),
        rng.choice((0, 8)),
        rng.choice((None, 0, 32, 2000)),
        itl_target_s=rng.choice((0.0, 0.01, 0.05)),
    )
    return Worker(WorkerId(name), random_load(rng), limits)


def random_demand(rng: random.Random, workers: list[Worker], links: LearnedLinkPricing) -> PlacementDemand:
    num_tokens = rng.choice((1, 40, 3000, 60_000))
    cached = {
        each.worker_id: rng.randrange(num_tokens + 1) for each in rng.sample(workers, rng.randrange(len(workers)))
    }
    return PlacementDemand(
        num_tokens,
        131_072.0,
        {**cached, WorkerId("unknown"): 16},
        links=links,
        output_tokens=rng.choice((1.0, 128.0, 900.5)),
        session=rng.choice(("", "a session")),
        replicate=rng.random() < 0.3,
    )


@pytest.mark.parametrize("seed", range(40))
def test_columns_and_views_choose_equally(seed: int) -> None:
    rng = random.Random(seed)
    ledger, costs, links = InflightLedger(), CostBook(), LinkBook()
    core = PlacementCore(ledger, costs, links)
    decode = [random_worker(f"d{number}", rng) for number in range(rng.randint(1, 12))]
    prefill = [random_worker(f"p{number}", rng) for number in range(rng.randint(0, 12))]
    weights = KvAwareConfig(contention_weight=rng.choice((0.0, 4.0)))
    wide, narrow = KvAwarePolicy(weights, wide_from=0), KvAwarePolicy(weights)
    for step in range(25):
        for worker in rng.sample([*decode, *prefill], 3 if len(decode) + len(prefill) > 2 else 1):
            worker.load = random_load(rng)
            costs.on_load(worker.worker_id, worker.load, worker.page_size)
            ledger.record(worker.worker_id, InflightWork(1, 3, rng.randrange(900)), float(step))
        if prefill and rng.random() < 0.1:
            prefill.pop(rng.randrange(len(prefill)))
        if rng.random() < 0.2:  # a worker restarts, or another one replaces it
            place = rng.randrange(len(decode))
            decode[place] = random_worker(rng.choice((decode[place].worker_id, f"new-{step}")), rng)
        if prefill:
            links.observe(prefill[0].worker_id, decode[0].worker_id, 1e6 * rng.random(), 0.001 + rng.random() / 100)
        demand = random_demand(rng, [*decode, *prefill], LearnedLinkPricing(links, ledger))
        tables = [core.views(workers, ledger.sent_to_all) for workers in (decode, prefill)]
        views: list[list[WorkerView]] = [list(table) for table in tables]
        tie = rng.random()
        chosen = wide.choose(demand, tables[0], tables[1], random.Random(tie))
        expected = narrow.choose(demand, views[0], views[1], random.Random(tie))
        assert chosen == expected


def test_cases_that_columns_do_not_cover_are_priced_view_by_view() -> None:
    ledger, links = InflightLedger(), LinkBook()
    core, rng = PlacementCore(ledger, CostBook(), links), random.Random(1)
    decode, prefill = [random_worker("d", rng)], [random_worker("p", rng)]
    demand = replace(random_demand(rng, [*decode, *prefill], LearnedLinkPricing(links, ledger)), explain=True)
    tables = [core.views(workers, ledger.sent_to_all) for workers in (decode, prefill)]
    assert KvAwarePolicy(wide_from=0).choose(demand, tables[0], tables[1], rng).considered


@pytest.mark.parametrize("seed", range(5))
def test_columns_follow_their_views(seed: int) -> None:
    rng = random.Random(seed)
    ledger, costs = InflightLedger(), CostBook()
    core = PlacementCore(ledger, costs, LinkBook())
    workers = [random_worker(f"w{number}", rng) for number in range(9)]
    for step in range(20):
        worker = rng.choice(workers)
        worker.load = random_load(rng)
        costs.on_load(worker.worker_id, worker.load, worker.page_size)
        key = ledger.record(rng.choice(workers).worker_id, InflightWork(1, 2, 3), float(step))
        if rng.random() < 0.5:
            ledger.settle([key])
        table = core.views(workers, ledger.sent_to_all)
        kept, made = vars(table.columns), vars(ViewColumns(list(table)))
        assert all((kept[name] == made[name]).all() for name in made)
        for each, view in zip(workers, table, strict=True):
            sent, learned = ledger.sent_to(each.worker_id), costs.costs(each.worker_id)
            assert view == WorkerView(each.worker_id, each.load, 16, sent, learned, each.limits)
