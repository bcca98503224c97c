"""Tests pending prompts: what a waiting prompt will leave in a worker's cache counts as cached until it is settled."""

from __future__ import annotations

import random
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.page_hash import hash_pages
from penstock.types import PageHash, WorkerId, WorkerLoad
from router.dispatch.placement import PromptPages
from router.routing.costs.cost_model import CostBook
from router.routing.costs.inflight import InflightLedger, WorkKey
from router.routing.costs.link_costs import LinkBook
from router.routing.index.pending_prompts import MARK_TOKENS, MAX_MARKS_PER_PROMPT, PendingPrompts, marks_of
from router.routing.placement_core import PlacementCore
from router.routing.policy.interface import UniformLinkPricing, WorkerLimits
from router.routing.policy.kv_aware import KvAwarePolicy

A, B, D = WorkerId("a"), WorkerId("b"), WorkerId("d")
PAGE_SIZE = 16
TOKENS = list(range(2048))
MARKS = marks_of(hash_pages(TOKENS, PAGE_SIZE, b"salt"), PAGE_SIZE)

_PROMPTS = st.lists(st.tuples(st.sampled_from([A, B]), st.lists(st.booleans(), max_size=4)), max_size=6)


def marks_of(turns: list[bool]) -> list[PageHash]:
    """Returns one mark for each position; like a page hash, a mark depends on all turns up to it."""
    return [PageHash(repr(turns[:depth]).encode()) for depth in range(1, len(turns) + 1)]


@given(_PROMPTS, st.data())
def test_a_match_is_the_longest_prefix_shared_with_a_pending_prompt(
    prompts: list[tuple[WorkerId, list[bool]]], data: st.DataObject
) -> None:
    pending = PendingPrompts()
    for number, (worker_id, turns) in enumerate(prompts):
        pending.add(WorkKey(worker_id, number), worker_id, marks_of(turns))
    released = data.draw(st.sets(st.sampled_from(range(len(prompts))))) if prompts else set()
    for number in released:
        pending.release(WorkKey(prompts[number][0], number))
        pending.release(WorkKey(prompts[number][0], number))
    asked = marks_of(data.draw(st.lists(st.booleans(), max_size=5)))
    expected: dict[WorkerId, int] = {}
    for number, (worker_id, turns) in enumerate(prompts):
        shared = len(set(marks_of(turns)) & set(asked))
        if number not in released and shared:
            expected[worker_id] = max(shared, expected.get(worker_id, 0))
    assert pending.match(asked) == expected
    for number, (worker_id, _) in enumerate(prompts):
        pending.release(WorkKey(worker_id, number))
    assert not pending
    assert pending.match(asked) == {}


def test_a_prompt_is_hashed_only_as_far_as_pending_prompts_reach() -> None:
    pages = PromptPages(TOKENS, b"salt")
    pending = PendingPrompts()
    pending.add(WorkKey(A, 1), A, MARKS[:2])
    assert pending.match(pages.marks(PAGE_SIZE)) == {A: 2}
    assert len(pages._hashes[PAGE_SIZE]) == 3 * MARK_TOKENS // PAGE_SIZE
    assert list(pages.all_marks(PAGE_SIZE)) == list(pages.marks(PAGE_SIZE)) == list(MARKS)
    assert len(PromptPages(range(200 * MARK_TOKENS), b"").all_marks(PAGE_SIZE)) == MAX_MARKS_PER_PROMPT
    assert list(PromptPages(TOKENS[:10], b"").all_marks(PAGE_SIZE)) == []


def test_a_prompt_follows_a_pending_one_with_the_same_beginning() -> None:
    ledger, policy = InflightLedger(), KvAwarePolicy()
    core = PlacementCore(ledger, CostBook(), LinkBook())

    def worker(worker_id: WorkerId, local: int | None) -> SimpleNamespace:
        limits = WorkerLimits(max_local_tokens=local)
        return SimpleNamespace(worker_id=worker_id, load=WorkerLoad(), page_size=PAGE_SIZE, limits=limits)

    prefill, decode = [worker(A, None), worker(B, None)], [worker(D, 0)]

    def place(seed: int) -> tuple[WorkerId, int, list[WorkKey], int]:
        demand = core.demand(
            num_tokens=len(TOKENS) + 100,
            max_tokens=10,
            token_bytes=1000.0,
            cached_tokens={},
            pending_tokens=core.pending_tokens(MARKS, PAGE_SIZE),
            prefill=[A, B],
            links=UniformLinkPricing(),
            now_s=0.0,
        )
        choice = policy.choose(
            demand, core.views(decode, ledger.sent_to_all), core.views(prefill, ledger.sent_to_all), random.Random(seed)
        )
        made = core.commit(choice, demand, PAGE_SIZE, 0.0, lambda: MARKS)
        return choice.prefill[0].worker_id, choice.uncached_tokens, made.credits, made.promised_prefill_tokens

    for seed in range(5):
        first, uncached, credits, _ = place(seed)
        assert uncached == len(TOKENS) + 100
        ledger.on_report(first, 1.0)  # the worker reports the queued prompt, but none of its pages yet
        second, uncached, more, promised = place(seed)
        assert (second, uncached) == (first, 100)
        assert promised == 0  # the promised prefix is not announced yet, so it does not count as a wrong prediction
        ledger.settle([*credits, *more])
        assert core.pending_tokens(MARKS, PAGE_SIZE) == {}
