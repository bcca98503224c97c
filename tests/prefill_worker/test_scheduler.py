"""Tests prefill scheduling: the token budget, lanes and lengths, no starvation, and prefixes computed once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.page_pool import PagePool
from engine.cache.prefix_cache import PrefixCache
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import PrefillConfig
from penstock.scheduling.bulk_lane import STEPS_PER_TURN
from penstock.types import Lane, RequestId, SamplingParams
from prefill_worker.scheduler import AGING, HANDICAP_STEPS, PrefillScheduler
from tests.support.engine.pulled_pages import pull
from tests.support.suite.examples import examples

PAGE_SIZE = 4


def make_scheduler(
    num_pages: int, max_batch_tokens: int = 8, reserved: dict[Lane, float] | None = None
) -> tuple[PrefillScheduler, PagePool]:
    scheduler, cache = make_scheduler_and_cache(num_pages, max_batch_tokens, reserved)
    return scheduler, cache.pool


def make_scheduler_and_cache(
    num_pages: int, max_batch_tokens: int = 8, reserved: dict[Lane, float] | None = None
) -> tuple[PrefillScheduler, PrefixCache]:
    cache = PrefixCache(num_pages, PAGE_SIZE)
    return PrefillScheduler(cache.pool, cache, PAGE_SIZE, max_batch_tokens, 3, reserved), cache


def make_sequence(name: str, tokens: list[int], lane: Lane = Lane.STANDARD) -> Sequence:
    return Sequence(RequestId(name), tokens, len(tokens), SamplingParams(max_tokens=1), b"salt", lane=lane)


def shares(work: list[ScheduledSequence]) -> dict[str, int]:
    return {item.sequence.request_id: item.num_tokens for item in work}


def test_chunks_fill_the_budget_with_the_prompts_that_end_soonest() -> None:
    scheduler, _ = make_scheduler(20)
    for name, length in (("a", 10), ("b", 3), ("c", 6)):
        scheduler.add(make_sequence(name, list(range(ord(name) * 100, ord(name) * 100 + length))))
    steps, complete = [], []
    while work := scheduler.schedule():
        steps.append(shares(work))
        complete += [sequence.request_id for sequence in scheduler.commit(work)]
    assert steps == [{"b": 3, "c": 5}, {"c": 1, "a": 7}, {"a": 3}]
    assert complete == ["b", "c", "a"]


def test_a_step_ends_early_where_another_step_costs_the_others_less() -> None:
    scheduler, _ = make_scheduler(20, max_batch_tokens=16)
    for tokens in (1, 5, 10) * 5:
        scheduler.step_ends.on_step(tokens, 0.0, 0.002 + 0.001 * tokens)
    for name, first, length in (("a", 0, 3), ("b", 50, 10), ("c", 100, 11)):
        scheduler.add(make_sequence(name, list(range(first, first + length))))
    steps = []
    while work := scheduler.schedule():
        steps.append(shares(work))
        scheduler.commit(work)
    # The 10 tokens of "b" would cost "a" more than 2 ms for each of two prompts. So would those of "c" cost "b".
    assert steps == [{"a": 3}, {"b": 10}, {"c": 11}]


def test_a_prompt_that_waits_for_the_next_step_finds_the_prefix_that_this_step_computes() -> None:
    scheduler, _ = make_scheduler(20, max_batch_tokens=32)
    for tokens in (1, 5, 10) * 5:
        scheduler.step_ends.on_step(tokens, 0.0, 0.002 + 0.001 * tokens)
    for name, last in (("first", 50), ("second", 60)):
        scheduler.add(make_sequence(name, [*range(12), last]))
    steps = []
    while work := scheduler.schedule():
        steps.append(shares(work))
        scheduler.commit(work)
    assert steps == [{"first": 13}, {"second": 1}]


def test_at_most_the_configured_number_of_prompts_run_in_a_step() -> None:
    scheduler, _ = make_scheduler(20, max_batch_tokens=100)
    for number in range(4):
        scheduler.add(make_sequence(f"s{number}", list(range(100 * number, 100 * number + 2))))
    assert scheduler.num_uncomputed_tokens == 8
    assert shares(scheduler.schedule()) == {"s0": 2, "s1": 2, "s2": 2}  # at most three
    assert (scheduler.num_running, scheduler.num_queued, scheduler.num_uncomputed_tokens) == (3, 1, 8)


def test_tokens_count_as_uncomputed_until_they_are_computed_or_removed() -> None:
    scheduler, _ = make_scheduler(20)
    long, queued = make_sequence("long", list(range(12))), make_sequence("queued", list(range(100, 120)))
    for sequence in (long, queued):
        scheduler.add(sequence)
    scheduler.commit(scheduler.schedule())
    assert scheduler.num_uncomputed_tokens == 4 + 20
    scheduler.remove(queued)
    assert scheduler.num_uncomputed_tokens == 4
    scheduler.commit(scheduler.schedule())
    assert scheduler.num_uncomputed_tokens == 0


def test_a_short_interactive_prompt_overtakes_a_long_one_that_has_begun() -> None:
    scheduler, _ = make_scheduler(20)
    scheduler.add(make_sequence("long", list(range(40)), Lane.BULK))
    scheduler.commit(scheduler.schedule())
    scheduler.add(make_sequence("standard", list(range(100, 103))))
    scheduler.add(make_sequence("short", list(range(200, 204)), Lane.INTERACTIVE))
    assert list(shares(scheduler.schedule()).items()) == [("short", 4), ("standard", 3)]


def test_bulk_prompts_are_computed_in_short_steps_without_others() -> None:
    scheduler, _ = make_scheduler(40)
    scheduler.add(make_sequence("bulk", list(range(20)), Lane.BULK))
    work = scheduler.schedule(max_bulk_tokens=3)
    assert shares(work) == {"bulk": 3}
    scheduler.commit(work)
    scheduler.add(make_sequence("other", list(range(100, 110))))
    for expected in ({"other": 8}, {"other": 2}, {"bulk": 3}):
        work = scheduler.schedule(max_bulk_tokens=3)
        assert shares(work) == expected
        scheduler.commit(work)


def test_bulk_prompts_get_a_turn_beside_others() -> None:
    scheduler, pool = make_scheduler(40)
    bulk = make_sequence("bulk", list(range(6)), Lane.BULK)
    scheduler.add(bulk)
    turns = []
    for number in range(2 * STEPS_PER_TURN):
        scheduler.add(make_sequence(f"o{number}", list(range(100 * number + 100, 100 * number + 108))))
        work = scheduler.schedule(max_bulk_tokens=3)
        if "bulk" in shares(work):
            turns.append(number)
            assert shares(work)["bulk"] == 3
        for done in scheduler.commit(work):
            pool.release(done.pages)
    assert turns == [STEPS_PER_TURN - 1, 2 * STEPS_PER_TURN - 1]


def test_bulk_frees_the_pages_that_a_waiting_prompt_needs() -> None:
    scheduler, pool = make_scheduler(6)
    bulk = make_sequence("bulk", list(range(16)), Lane.BULK)
    scheduler.add(bulk)
    scheduler.commit(scheduler.schedule())
    scheduler.add(make_sequence("large", list(range(100, 116))))
    scheduler.add(make_sequence("other bulk", list(range(200, 204)), Lane.BULK))
    work = scheduler.schedule()
    assert shares(work) == {"bulk": 8}
    assert scheduler.commit(work) == [bulk]
    pool.release(bulk.pages)
    assert shares(scheduler.schedule()) == {"large": 8}


def test_prompts_that_have_begun_continue_while_a_large_one_waits_for_pages() -> None:
    scheduler, pool = make_scheduler(6)
    scheduler.add(make_sequence("begun", list(range(12))))
    scheduler.commit(scheduler.schedule())
    scheduler.add(make_sequence("large", list(range(100, 124)), Lane.INTERACTIVE))
    scheduler.add(make_sequence("small", list(range(200, 204)), Lane.BULK))
    assert shares(scheduler.schedule()) == {"begun": 4}  # the small one does not pass the large one
    pool.check_integrity()


@examples(100)
@given(
    lane=st.sampled_from([Lane.INTERACTIVE, Lane.STANDARD]),
    length=st.integers(1, 60),
    flood=st.lists(st.tuples(st.sampled_from(Lane), st.integers(1, 16)), min_size=1, max_size=8),
)
def test_later_prompts_cannot_keep_a_prompt_waiting_forever(
    lane: Lane, length: int, flood: list[tuple[Lane, int]]
) -> None:
    """Once AGING times as many tokens as its handicap and its own length are computed, no newcomer goes before it."""
    budget = 8
    scheduler, pool = make_scheduler(80, max_batch_tokens=budget)
    for number in range(4):
        scheduler.add(make_sequence(f"before{number}", list(range(1000 * number + 100, 1000 * number + 120))))
    waiting = make_sequence("waiting", list(range(length)), lane)
    scheduler.add(waiting)
    computed, number = 0, 10
    bound = AGING * (HANDICAP_STEPS[lane] * budget + length)
    while True:
        if computed < bound:
            backlog = scheduler.num_uncomputed_tokens  # from `bound` on it waits for nothing but this backlog
        late = set[Sequence]()
        while scheduler.num_queued < 5:
            newcomer_lane, tokens = flood[number % len(flood)]
            number += 1
            newcomer = make_sequence(f"n{number}", list(range(10000 * number, 10000 * number + tokens)), newcomer_lane)
            scheduler.add(newcomer)
            late.add(newcomer)
        work = scheduler.schedule()
        order = [item.sequence for item in work]
        if computed >= bound and waiting in order:
            assert not late & set(order[: order.index(waiting)])
        computed += sum(item.num_tokens for item in work)
        done = scheduler.commit(work)
        for sequence in done:
            pool.release(sequence.pages)
        if waiting in done:
            return
        assert computed <= bound + backlog + 100, "it starves"


def test_short_prompts_overtake_a_long_one_until_it_has_aged() -> None:
    scheduler, pool = make_scheduler(80, max_batch_tokens=8)
    long = make_sequence("long", list(range(24)))
    scheduler.add(long)
    num_computed = 0
    for number in range(100):
        scheduler.add(make_sequence(f"short{number}", list(range(100 * number + 100, 100 * number + 108))))
        (work,) = scheduler.schedule()
        if work.sequence is long:
            break
        num_computed += work.num_tokens
        for sequence in scheduler.commit([work]):
            pool.release(sequence.pages)
    assert num_computed == AGING * (24 - 8)


def test_a_prompt_that_does_not_fit_waits_and_holds_nothing() -> None:
    scheduler, pool = make_scheduler(4, max_batch_tokens=16)
    first = make_sequence("first", list(range(12)))
    second = make_sequence("second", list(range(50, 58)))
    scheduler.add(first)
    scheduler.add(second)
    assert shares(scheduler.schedule()) == {"second": 8}
    assert first.pages == []
    scheduler.remove(second)
    pool.release(second.pages)
    assert shares(scheduler.schedule()) == {"first": 12}
    pool.check_integrity()


def test_a_cached_prefix_is_not_recomputed_except_for_its_last_token() -> None:
    scheduler, _ = make_scheduler(20)
    scheduler.add(make_sequence("first", list(range(8))))
    scheduler.commit(scheduler.schedule())
    again = make_sequence("again", list(range(8)))
    scheduler.add(again)
    assert shares(scheduler.schedule()) == {"again": 4}
    assert again.num_computed_tokens == 4


def test_a_prompt_meets_the_pages_that_are_pulled_meanwhile() -> None:
    scheduler, cache = make_scheduler_and_cache(20, max_batch_tokens=7)
    prompt = make_sequence("prompt", list(range(30)))
    hashes = prompt.hash_full_pages(PAGE_SIZE)
    cache.await_pages(hashes)
    scheduler.add(prompt)
    steps = []
    for arriving in ([6], [3, 4, 5], []):
        pull(cache, hashes, arriving)
        work = scheduler.schedule()
        steps.append((work[0].start, work[0].num_tokens))
        complete = scheduler.commit(work)
    assert steps == [(0, 7), (7, 5), (28, 2)]
    assert complete == [prompt]
    cache.unawait(hashes)
    cache.pool.release(prompt.pages)
    cache.check_integrity()


@examples(60)
@given(data=st.data(), num_pages=st.integers(6, 16))
def test_every_history_balances_pages_and_completes(data: st.DataObject, num_pages: int) -> None:
    scheduler, cache = make_scheduler_and_cache(num_pages)
    pool, awaited = cache.pool, []
    for tokens in range(data.draw(st.integers(0, 8))):  # steps without a fixed time, so that most end early
        scheduler.step_ends.on_step(tokens, 0.0, 0.001 * tokens)
    live: list[Sequence] = []
    done: list[Sequence] = []
    for number in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "cancel", "finish", "pull", "step", "step"]))
        if action == "add":
            start = data.draw(st.sampled_from([0, 100]))  # few beginnings, so that prefixes repeat
            length = data.draw(st.integers(1, num_pages * PAGE_SIZE))
            lane = data.draw(st.sampled_from(Lane))
            live.append(make_sequence(f"s{number}", list(range(start, start + length)), lane))
            scheduler.add(live[-1])
        elif action == "cancel" and live:
            victim = live.pop(data.draw(st.integers(0, len(live) - 1)))
            scheduler.remove(victim)
            pool.release(victim.pages)
        elif action == "finish" and done:
            sent = done.pop()
            pool.release(sent.pages)
        elif action == "pull" and live:
            hashes = data.draw(st.sampled_from(live)).hash_full_pages(PAGE_SIZE)
            cache.await_pages(hashes)
            awaited.append(list(hashes))
            pull(cache, hashes, range(data.draw(st.integers(0, len(hashes))), data.draw(st.integers(0, len(hashes)))))
        else:
            complete = scheduler.commit(scheduler.schedule())
            done += complete
            live = [sequence for sequence in live if sequence not in complete]
        cache.check_integrity()
    for _ in range(200):
        for sent in done:
            pool.release(sent.pages)
        done = scheduler.commit(scheduler.schedule())
        live = [sequence for sequence in live if sequence not in done]
    assert live == []
    for hashes in awaited:
        cache.unawait(hashes)
    cache.check_integrity()
    assert pool.num_available == pool.num_pages


@examples(60)
@given(length=st.integers(1, 40), flood=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_a_lane_gets_its_reserved_share_beside_any_load(length: int, flood: list[int]) -> None:
    """A quarter of 8 tokens is reserved, so a bulk prompt gets at least two tokens in each step."""
    scheduler, pool = make_scheduler(80, reserved={Lane.BULK: 0.25})
    bulk = make_sequence("bulk", list(range(length)), Lane.BULK)
    scheduler.add(bulk)
    for step in range(-(-length // 2)):
        if bulk.num_computed_tokens == length:
            break  # other prompts left it more than its share
        for number, tokens in enumerate(flood):
            first = 1000 * (step * len(flood) + number + 1)
            if scheduler.num_queued < 4:
                name = f"{step}-{number}"
                scheduler.add(make_sequence(name, list(range(first, first + tokens)), Lane.INTERACTIVE))
        work = scheduler.schedule()
        given_tokens = shares(work)
        assert given_tokens["bulk"] >= min(2, bulk.num_uncomputed_tokens)
        assert sum(given_tokens.values()) <= 8
        assert all(1 <= item.num_tokens <= item.sequence.num_uncomputed_tokens for item in work)
        for done in scheduler.commit(work):
            pool.release(done.pages)
        pool.check_integrity()
    assert bulk.num_computed_tokens == length


def test_a_reserved_share_takes_no_pages_from_a_prompt_that_waits_for_them() -> None:
    scheduler, _ = make_scheduler(6, reserved={Lane.BULK: 0.5})
    scheduler.add(make_sequence("begun", list(range(12))))
    scheduler.commit(scheduler.schedule())
    scheduler.add(make_sequence("large", list(range(100, 124)), Lane.INTERACTIVE))
    scheduler.add(make_sequence("small", list(range(200, 204)), Lane.BULK))
    assert shares(scheduler.schedule()) == {"begun": 4}


def test_reserved_shares_outside_their_range_are_refused() -> None:
    with pytest.raises(ValueError, match="give each 0 or more, and 1 at most together"):
        PrefillConfig(reserved={Lane.BULK: 0.6, Lane.STANDARD: 0.5})
