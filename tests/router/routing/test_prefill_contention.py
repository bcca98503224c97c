"""Tests the harm to waiting prompts: it steers requests to caches only while prompts wait, and counts wherever they
wait.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from decode_worker.prefill.placement_policy import PrefillPlace, PrefillPlacement, PromptDemand, RemoteOption
from penstock.config import DecodeConfig, KvAwareConfig
from penstock.types import WorkerId, WorkerLoad
from router.routing.costs.cost_model import PREFILL_PRIOR, CostBook
from router.routing.costs.inflight import NO_WORK, InflightLedger
from router.routing.costs.link_costs import LinkBook
from router.routing.placement_core import PlacementCore
from router.routing.policy.cost_terms import PrefillContention
from router.routing.policy.interface import PlacementDemand, WorkerLimits, WorkerView
from router.routing.policy.kv_aware import KvAwarePolicy

A, B, D = WorkerId("a"), WorkerId("b"), WorkerId("d")
NO_LIMITS = WorkerLimits()
STEP_TOKENS = 64
DECODE = [WorkerView(D, WorkerLoad(), 16, limits=WorkerLimits(max_local_tokens=32))]


@dataclass
class Worker:
    worker_id: WorkerId
    load: WorkerLoad
    page_size: int = 16
    limits: WorkerLimits = NO_LIMITS


def view(worker_id: WorkerId, queued: int) -> WorkerView:
    return WorkerView(worker_id, WorkerLoad(queued_prefill_tokens=queued), 16)


def chosen(policy: KvAwarePolicy, cached: dict[WorkerId, int], queued_a: int, queued_b: int) -> WorkerId:
    demand = PlacementDemand(2000, 1000.0, cached_tokens=cached)
    return policy.choose(demand, DECODE, [view(A, queued_a), view(B, queued_b)], random.Random(0)).prefill[0].worker_id


def test_a_cached_prefix_is_worth_a_longer_queue_only_while_prompts_wait() -> None:
    policy, blind = KvAwarePolicy(), KvAwarePolicy(KvAwareConfig(contention_weight=0.0))
    cached = {B: 1000}  # saves about half a second, but its queue is 1.5 s longer
    assert chosen(policy, cached, 0, 3000) == chosen(blind, cached, 0, 3000) == A
    for _ in range(200):  # every worker has a queue of a few prompts
        chosen(policy, {}, 6000, 6000)
        chosen(blind, {}, 6000, 6000)
    assert chosen(policy, cached, 6000, 9000) == B
    assert chosen(blind, cached, 6000, 9000) == A
    for _ in range(400):
        chosen(policy, {}, 0, 0)
    assert chosen(policy, cached, 0, 3000) == A


def test_without_cached_pages_the_shorter_queue_wins_however_long_both_are() -> None:
    policy = KvAwarePolicy()
    for _ in range(200):
        chosen(policy, {}, 50_000, 50_000)
    assert chosen(policy, {}, 50_000, 50_001) == A
    assert chosen(policy, {}, 50_001, 50_000) == B


def test_the_number_of_waiting_prompts_is_bounded_and_starts_at_zero() -> None:
    contention = PrefillContention()
    views = [view(A, 10_000_000), view(B, 10_000_000)]
    assert contention.num_waiting == 0.0
    assert contention.delays_s(PlacementDemand(100, 1.0), views, [1.0, 1.0]) == [0.0, 0.0]
    for _ in range(500):
        contention.observe(views)
    assert contention.num_waiting == 4.0
    own_s = views[0].costs.prefill.prefill_s(100, 100, 2048)
    assert contention.delays_s(PlacementDemand(100, 1.0), views, [1.0, 1.0]) == pytest.approx([4 * own_s] * 2)


@pytest.mark.parametrize("num_running", [2, 6, 20, 60])
@pytest.mark.parametrize("itl_target_s", [None, 0.05, 10.0])
@pytest.mark.parametrize("num_queued", [0, 1000, 6000])
@pytest.mark.parametrize("wide_from", [0, 128])
def test_the_router_expects_a_prompt_where_its_decode_worker_sends_it(
    num_running: int, itl_target_s: float | None, num_queued: int, wide_from: int
) -> None:
    """Otherwise it credits a worker that does not compute the prompt, and more prompts go to the one that does."""
    core = PlacementCore(InflightLedger(), CostBook(), LinkBook())
    policy = KvAwarePolicy(wide_from=wide_from)
    decode_worker = PrefillPlacement(DecodeConfig(itl_target_s=itl_target_s))
    decode_worker.steps.assume(PREFILL_PRIOR.token_s)
    chunks = decode_worker.steps.chunk_speed(num_running, STEP_TOKENS)
    running = WorkerLoad(num_running, 0, 0, 1000, 1000, queued_prefill_tokens=num_queued, chunks=chunks)
    limits = WorkerLimits(itl_target_s=itl_target_s or 0.0)
    busy = WorkerLoad(queued_prefill_tokens=4000)
    ends = [[Worker(D, running, limits=limits)], [Worker(each, busy) for each in (A, B)]]
    demand = PlacementDemand(1000, 1.0)
    for _ in range(200):  # prompts wait at all prefill workers
        tables = [core.views(workers, lambda worker_ids: [NO_WORK] * len(worker_ids)) for workers in ends]
        choice = policy.choose(demand, tables[0], tables[1], random.Random(0))
    asked = PromptDemand(1000, 0, num_queued, num_running, STEP_TOKENS, 16, 1.0)
    options = [RemoteOption(each.worker_id, each.queue_s, each.prefill_s) for each in choice.prefill]
    for _ in range(200):
        decided = decode_worker.choose(asked, options, 0.0).chosen
    assert (decided.place is PrefillPlace.LOCAL) == (not choice.prefill)
