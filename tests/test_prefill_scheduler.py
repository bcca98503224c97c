"""Prefill scheduling: the token budget, first come first served, pages taken once, prefixes computed once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import ScheduledSequence, Sequence
from penstock.types import RequestId, SamplingParams
from prefill_worker.scheduler import PrefillScheduler

PAGE_SIZE = 4


def make_scheduler(num_pages: int, max_batch_tokens: int = 8) -> tuple[PrefillScheduler, PagePool]:
    pool = PagePool(num_pages)
    return PrefillScheduler(pool, PrefixCache(pool, PAGE_SIZE), PAGE_SIZE, max_batch_tokens, 3), pool


def make_sequence(name: str, tokens: list[int]) -> Sequence:
    return Sequence(RequestId(name), tokens, len(tokens), SamplingParams(max_tokens=1), b"salt")


def shares(work: list[ScheduledSequence]) -> dict[str, int]:
    return {item.sequence.request_id: item.num_tokens for item in work}


def test_chunks_fill_the_budget_in_order_of_arrival() -> None:
    scheduler, _ = make_scheduler(20)
    for name, length in (("a", 10), ("b", 3), ("c", 6)):
        scheduler.add(make_sequence(name, list(range(ord(name) * 100, ord(name) * 100 + length))))
    steps, complete = [], []
    while work := scheduler.schedule():
        steps.append(shares(work))
        complete += [sequence.request_id for sequence in scheduler.commit(work)]
    assert steps == [{"a": 8}, {"a": 2, "b": 3, "c": 3}, {"c": 3}]
    assert complete == ["a", "b", "c"]


def test_a_prompt_that_does_not_fit_waits_and_holds_nothing() -> None:
    scheduler, pool = make_scheduler(4, max_batch_tokens=16)
    first = make_sequence("first", list(range(12)))
    second = make_sequence("second", list(range(50, 58)))
    scheduler.add(first)
    scheduler.add(second)
    assert shares(scheduler.schedule()) == {"first": 12}
    assert second.pages == []
    scheduler.remove(first)
    pool.release(first.pages)
    assert shares(scheduler.schedule()) == {"second": 8}
    pool.check_integrity()


def test_a_cached_prefix_is_not_computed_again_but_the_last_token_is() -> None:
    scheduler, _ = make_scheduler(20)
    scheduler.add(make_sequence("first", list(range(8))))
    scheduler.commit(scheduler.schedule())
    again = make_sequence("again", list(range(8)))
    scheduler.add(again)
    assert shares(scheduler.schedule()) == {"again": 4}
    assert again.num_computed_tokens == 4


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_pages=st.integers(6, 16))
def test_any_history_balances_and_ends(data: st.DataObject, num_pages: int) -> None:
    scheduler, pool = make_scheduler(num_pages)
    live: list[Sequence] = []
    done: list[Sequence] = []
    for number in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "cancel", "finish", "step", "step"]))
        if action == "add":
            start = data.draw(st.sampled_from([0, 100]))  # few starts: prefixes repeat
            length = data.draw(st.integers(1, num_pages * PAGE_SIZE))
            live.append(make_sequence(f"s{number}", list(range(start, start + length))))
            scheduler.add(live[-1])
        elif action == "cancel" and live:
            victim = live.pop(data.draw(st.integers(0, len(live) - 1)))
            scheduler.remove(victim)
            pool.release(victim.pages)
        elif action == "finish" and done:
            sent = done.pop()
            pool.release(sent.pages)
        else:
            complete = scheduler.commit(scheduler.schedule())
            done += complete
            live = [sequence for sequence in live if sequence not in complete]
        pool.check_integrity()
    for _ in range(200):
        for sent in done:
            pool.release(sent.pages)
        done = scheduler.commit(scheduler.schedule())
        live = [sequence for sequence in live if sequence not in done]
    assert live == []
    pool.check_integrity()
    assert pool.num_available == pool.num_pages
