"""Tests pulled prefixes in placement: when they are expected, that load then decides, and what is learned from them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import KvAwareConfig
from penstock.types import SHARED_STORE, CacheStats, WorkerId, WorkerLoad
from penstock.v1 import common_pb2
from router.routing.costs.cost_model import StepCost, WorkerCosts
from router.routing.costs.inflight import NO_WORK
from router.routing.costs.link_costs import LinkCost
from router.routing.costs.pull_costs import PullBook
from router.routing.policy.interface import (
    PairChoice,
    PlacementDemand,
    PlannedPull,
    PullOffer,
    WorkerLimits,
    WorkerView,
)
from router.routing.policy.kv_aware import KvAwarePolicy

COSTS = WorkerCosts(StepCost(0.001, 5e-4, 0.0), StepCost(0.01, 1e-4, 1e-7), queued_token_s=5e-4)
HOLDER, OTHER, DECODE = WorkerId("holder"), WorkerId("other"), WorkerId("decode")
TOKENS = 8000


REMOTE = WorkerLimits(max_local_tokens=0)
EMPTY_CACHE = CacheStats()


def view(name: str, queued: int = 0, limits: WorkerLimits = REMOTE, cache: CacheStats = EMPTY_CACHE) -> WorkerView:
    load = WorkerLoad(free_pages=4000, total_pages=4000, queued_prefill_tokens=queued, cache=cache)
    return WorkerView(WorkerId(name), load, 16, NO_WORK, COSTS, limits)


def demand(byte_s: float | None, held: int = TOKENS - 16) -> PlacementDemand:
    """Returns a prompt that one worker holds and others may pull at this price; with None they may not."""
    offer = None if byte_s is None else PullOffer(HOLDER, held, lambda source, target: LinkCost(0.002, byte_s))
    return PlacementDemand(TOKENS, 4096.0, cached_tokens={HOLDER: held}, pull=offer)


def choose(what: PlacementDemand, *prefill: WorkerView) -> PairChoice:
    return KvAwarePolicy(KvAwareConfig()).choose(what, [view(DECODE)], prefill, random.Random(0))


FAST, SLOW = 1e-9, 1e-6  # the pull takes 33 ms or 33 s, computing the prompt 4 s


@pytest.mark.parametrize(("byte_s", "chosen"), [(None, HOLDER), (FAST, OTHER), (SLOW, HOLDER)])
def test_a_prefix_that_can_be_pulled_leaves_the_choice_to_load(byte_s: float | None, chosen: WorkerId) -> None:
    choice = choose(demand(byte_s), view(HOLDER, queued=2000), view(OTHER))
    assert choice.prefill[0].worker_id == chosen
    pull = choice.score.pull
    assert (pull is not None) == (chosen == OTHER)
    if pull is not None:
        assert (pull.source, pull.tokens) == (HOLDER, TOKENS - 16)
        assert pull == choice.prefill[0].pull
        assert choice.score.queue_s == pytest.approx(pull.pull_s) == choice.prefill[0].queue_s  # it has no queue
        assert choice.score.prefill_s < 0.1 < pull.compute_s
        assert choice.uncached_tokens == 16
        # Counts only held tokens, not pulled ones, because predictions are checked against it.
        assert choice.score.prefill_cached_tokens == 0


@pytest.mark.parametrize(
    ("cache", "chosen"),
    [
        (CacheStats(queries=1000, device_hits=900), OTHER),  # nothing was evicted yet
        (CacheStats(queries=1000, device_hits=900, evictions=1), HOLDER),  # from now on each new page evicts one
        (CacheStats(queries=1000, device_hits=900, evictions=90), HOLDER),
        (CacheStats(queries=1000, device_hits=100, evictions=900), OTHER),  # what is evicted is rarely used again
        (CacheStats(evictions=1), OTHER),
    ],
)
def test_a_pull_into_a_full_cache_costs_what_it_evicts(cache: CacheStats, chosen: WorkerId) -> None:
    choice = choose(demand(FAST), view(HOLDER, queued=2000), view(OTHER, cache=cache))
    assert choice.prefill[0].worker_id == chosen


def test_the_holder_pulls_nothing_and_keeps_its_advantage() -> None:
    choice = choose(demand(FAST), view(HOLDER), view(OTHER))
    assert choice.prefill[0].worker_id == HOLDER
    assert choice.score.pull is None
    assert choice.prefill[1].pull is not None


def test_a_decode_worker_that_computes_the_prompt_may_pull_too() -> None:
    alone = view("decode", limits=WorkerLimits())
    choice = KvAwarePolicy(KvAwareConfig()).choose(demand(FAST), [alone], [], random.Random(0))
    assert choice.decode_pull == choice.score.pull is not None


@given(
    held=st.integers(0, TOKENS),
    byte_s=st.floats(1e-10, 1e-5),
    queues=st.lists(st.integers(0, 20_000), min_size=2, max_size=5),
)
def test_a_possible_pull_never_raises_the_price(held: int, byte_s: float, queues: list[int]) -> None:
    views = [view(HOLDER if not number else f"p{number}", queued) for number, queued in enumerate(queues)]
    with_pull, without = choose(demand(byte_s, held), *views), choose(demand(None, held), *views)
    assert with_pull.score.total_s <= without.score.total_s + 1e-9


def test_the_longest_holders_take_turns_as_sources() -> None:
    book = PullBook()
    assert book.offer({}) is None
    assert book.offer({HOLDER: 511}) is None
    named = [book.offer({HOLDER: 2000, OTHER: 2000, DECODE: 1000}) for _ in range(4)]
    assert [offer.source for offer in named if offer] == [OTHER, HOLDER, OTHER, HOLDER]


def test_pulls_that_workers_do_not_make_are_no_longer_expected_but_probed() -> None:
    book, plan = PullBook(), PlannedPull(HOLDER, 2000, 0.01, 1.0)
    made = common_pb2.Pull(source=HOLDER, wanted_tokens=2000, pulled_tokens=2000, pull_ms=10.0)
    for _ in range(10):
        book.on_end(plan, OTHER, None, 4096.0)
    assert sum(book.offer({HOLDER: 2000}) is not None for _ in range(160)) == 10
    for _ in range(10):
        book.on_end(plan, OTHER, made, 4096.0)
    assert all(book.offer({HOLDER: 2000}) is not None for _ in range(16))


def test_the_store_is_named_where_it_holds_more_than_any_worker() -> None:
    book = PullBook()
    for held, stored, named in [({}, 511, None), ({}, 512, SHARED_STORE), ({HOLDER: 1000}, 1511, HOLDER)]:
        offer = book.offer(held, stored)
        assert (offer.source if offer else None) == named
    offer = book.offer({HOLDER: 1000}, 1512)
    assert offer is not None
    assert (offer.source, offer.tokens) == (SHARED_STORE, 1512)


def test_a_store_that_workers_do_not_read_spoils_no_pulls_between_workers() -> None:
    book, plan = PullBook(), PlannedPull(SHARED_STORE, 2000, 0.01, 1.0)
    for _ in range(10):
        book.on_end(plan, OTHER, None, 4096.0)
    offers = [book.offer({HOLDER: 1000}, 2000) for _ in range(160)]
    assert sum(offer is not None and offer.source == SHARED_STORE for offer in offers) == 10
    assert sum(offer is not None and offer.source == HOLDER for offer in offers) == 150


def test_reads_of_the_store_and_pulls_between_workers_have_costs_of_their_own() -> None:
    book = PullBook()
    slow = common_pb2.Pull(source=SHARED_STORE, wanted_tokens=2000, pulled_tokens=2000, pull_ms=3000.0)
    before = book.links.cost(HOLDER, OTHER)
    for _ in range(20):
        book.on_end(None, OTHER, slow, 4096.0)
    offer = book.offer({}, 2000)
    assert offer is not None
    assert offer.cost(SHARED_STORE, OTHER).transfer_s(2000 * 4096.0) == pytest.approx(3.0, rel=0.2)
    assert book.links.cost(HOLDER, OTHER) == before


def test_the_cost_of_a_link_follows_what_pulls_take() -> None:
    book = PullBook()
    num_bytes = 2000 * 4096.0
    slow = common_pb2.Pull(source=HOLDER, wanted_tokens=2000, pulled_tokens=2000, pull_ms=3000.0)
    failed = replace_pull(slow, pulled_tokens=10, pull_ms=5000.0)
    for _ in range(20):
        book.on_end(None, OTHER, slow, 4096.0)
    learned_s = book.links.cost(HOLDER, OTHER).transfer_s(num_bytes)
    assert learned_s == pytest.approx(3.0, rel=0.2)
    for _ in range(20):
        book.on_end(None, OTHER, failed, 4096.0)
    assert book.links.cost(HOLDER, OTHER).transfer_s(num_bytes) > 1.2 * learned_s


def test_a_link_is_learned_from_the_part_that_came_while_the_rest_was_computed() -> None:
    book, plan = PullBook(), PlannedPull(HOLDER, 2000, 0.01, 1.0)
    part = common_pb2.Pull(source=HOLDER, wanted_tokens=2000, pulled_tokens=1200, pull_ms=3000.0)
    for _ in range(40):
        book.on_end(plan, OTHER, part, 4096.0)
    assert book.links.cost(HOLDER, OTHER).transfer_s(1200 * 4096.0) == pytest.approx(3.0, rel=0.2)
    assert all(book.offer({HOLDER: 2000}) is not None for _ in range(16))


def replace_pull(pull: common_pb2.Pull, **changes: float) -> common_pb2.Pull:
    changed = common_pb2.Pull()
    changed.CopyFrom(pull)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed
