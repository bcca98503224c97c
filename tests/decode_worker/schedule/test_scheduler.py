"""Tests decode scheduling: pages balance after every step, nobody starves, preemption loses no token."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.schedule.run_queues import HANDICAP_REQUESTS
from decode_worker.schedule.scheduler import DecodeScheduler
from engine.cache.page_pool import PagePool
from engine.cache.prefix_cache import PrefixCache
from engine.step.batch import _items_batch
from engine.step.plan import StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput
from penstock.config import DecodeConfig
from penstock.errors import InternalError
from penstock.types import Lane, PageId, RequestId, SamplingParams
from tests.support.engine.pulled_pages import pull
from tests.support.suite.examples import examples

PAGE_SIZE = 4


def make_scheduler(num_pages: int, **config: float) -> tuple[DecodeScheduler, PagePool]:
    cache = PrefixCache(num_pages, PAGE_SIZE)
    defaults = {"max_batch_sequences": 4, "max_batch_tokens": 8, "watermark": 0.0}
    settings_ = DecodeConfig.model_validate(defaults | config)
    return DecodeScheduler(cache.pool, cache, PAGE_SIZE, settings_, RowTable(PAGE_SIZE)), cache.pool


def make_sequence(name: str, num_tokens: int, seed: int = 0, lane: Lane = Lane.STANDARD) -> Sequence:
    tokens = random.Random(f"{name}{seed}").choices(range(1000), k=num_tokens)
    return Sequence(RequestId(name), tokens, num_tokens, SamplingParams(max_tokens=100), b"salt", lane=lane)


def next_token(sequence: Sequence) -> int:
    """Returns a token that depends on the preceding tokens alone, as a model's does."""
    return sum(sequence.token_ids) % 997


def run_step(scheduler: DecodeScheduler) -> StepPlan:
    work = scheduler.schedule()
    for scheduled in work:
        covered = scheduled.sequence.num_computed_tokens + scheduled.num_tokens
        assert len(scheduled.sequence.pages) * PAGE_SIZE >= covered
        assert 1 <= scheduled.num_tokens <= scheduled.sequence.num_uncomputed_tokens
    sampled = tuple(SampledToken(next_token(item.sequence)) if item.is_sampled else None for item in work)
    scheduler.commit(work, StepOutput(sampled))
    return work


def start(scheduler: DecodeScheduler, sequence: Sequence) -> Sequence:
    scheduler.track(sequence)
    scheduler.compute_here(sequence)
    return sequence


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_sequences() -> None:
    scheduler, _ = make_scheduler(100)
    first = start(scheduler, make_sequence("first", 3))
    run_step(scheduler)
    assert first.num_output_tokens == 1
    second = start(scheduler, make_sequence("second", 20))
    steps = [{item.sequence.request_id: item.num_tokens for item in run_step(scheduler)} for _ in range(3)]
    assert steps == [{"first": 1, "second": 7}, {"first": 1, "second": 7}, {"first": 1, "second": 6}]
    assert (first.num_output_tokens, second.num_output_tokens) == (4, 1)


def test_a_prompt_meets_the_pages_that_are_pulled_meanwhile() -> None:
    scheduler, _ = make_scheduler(20)
    prompt = start(scheduler, make_sequence("prompt", 30))
    cache, hashes = scheduler._pages._cache, prompt.hash_full_pages(PAGE_SIZE)
    cache.await_pages(hashes)
    steps = []
    for arriving in ([6], [4, 5], [3], []):
        pull(cache, hashes, arriving)
        steps += [(item.num_tokens, item.sequence.num_output_tokens) for item in run_step(scheduler)]
    assert steps == [(8, 0), (8, 0), (2, 1), (1, 2)]
    assert scheduler.num_cached_tokens(prompt) == 12
    scheduler.forget(prompt)
    cache.unawait(hashes)
    cache.check_integrity()


def test_run_ahead_computes_only_up_to_pulled_pages() -> None:
    scheduler, _ = make_scheduler(40)
    first, prompt = start(scheduler, make_sequence("first", 3)), make_sequence("prompt", 30)
    run_step(scheduler)
    start(scheduler, prompt)
    cache, hashes = scheduler._pages._cache, prompt.hash_full_pages(PAGE_SIZE)
    cache.await_pages(hashes)
    plan = scheduler.schedule()
    pull(cache, hashes, [3, 4, 5, 6])
    ahead = scheduler.schedule_ahead()
    assert ahead is not None
    assert [(item.start, item.num_tokens) for item in (plan.chunks[0], ahead.chunks[0])] == [(0, 7), (7, 5)]
    for step in (plan, ahead):
        scheduler.record(step, [5] * len(step.rows), [None] * len(step.chunks))
    last = scheduler.schedule()
    assert [(item.start, item.num_tokens) for item in last.chunks] == [(28, 2)]
    assert prompt.num_computed_tokens == 28
    assert first.num_output_tokens == 3


def test_the_youngest_is_preempted_and_loses_no_token() -> None:
    scheduler, pool = make_scheduler(6, max_batch_sequences=2)
    old, young = (start(scheduler, make_sequence(name, 8)) for name in ("old", "young"))
    while not scheduler.num_preemptions(young):
        run_step(scheduler)
        pool.check_integrity()
    assert scheduler.preempted == [young]
    emitted = list(young.token_ids)
    assert young.pages == []
    while old.num_output_tokens < 14:
        run_step(scheduler)
    assert scheduler.num_preemptions(old) == 0
    scheduler.forget(old)
    while young.num_output_tokens < 14:
        run_step(scheduler)
    assert young.token_ids[: len(emitted)] == emitted
    scheduler.forget(young)
    pool.check_integrity()
    assert pool.num_available == pool.num_pages


def test_bulk_is_preempted_first_and_then_the_sequence_with_the_fewest_tokens() -> None:
    scheduler, pool = make_scheduler(12, max_batch_sequences=8, max_batch_tokens=64)
    lengths = {"first": 8, "short": 4, "long": 12, "bulk": 16}
    made = {"bulk": start(scheduler, make_sequence("bulk", lengths["bulk"], lane=Lane.BULK))}
    run_step(scheduler)
    for name in ("first", "short", "long"):
        made[name] = start(scheduler, make_sequence(name, lengths[name]))
    preempted: list[str] = []
    for _ in range(40):
        run_step(scheduler)
        pool.check_integrity()
        preempted += [
            name for name, sequence in made.items() if scheduler.num_preemptions(sequence) and name not in preempted
        ]
    assert preempted[:2] == ["bulk", "short"]
    assert scheduler.num_preemptions(made["first"]) == 0


def test_a_bulk_sequence_is_preempted_before_a_standard_one_with_less_to_lose() -> None:
    scheduler, _ = make_scheduler(8, max_batch_tokens=64)
    bulk = start(scheduler, make_sequence("bulk", 18, lane=Lane.BULK))  # 5 of 8 pages
    run_step(scheduler)
    first, short = (start(scheduler, make_sequence(name, size)) for name, size in (("first", 8), ("short", 4)))
    run_step(scheduler)
    run_step(scheduler)  # the first two need one more page each
    assert [scheduler.num_preemptions(sequence) for sequence in (first, short, bulk)] == [0, 0, 1]


def test_of_two_with_equal_loss_the_younger_is_preempted() -> None:
    scheduler, _ = make_scheduler(6, max_batch_tokens=64)
    first, older, younger = (
        start(scheduler, make_sequence(name, size)) for name, size in zip("abc", (8, 6, 6), strict=True)
    )
    run_step(scheduler)
    run_step(scheduler)  # the first needs one more page
    assert [scheduler.num_preemptions(sequence) for sequence in (first, older, younger)] == [0, 0, 1]


def test_a_preempted_sequence_is_not_readmitted_in_the_same_step() -> None:
    """The first two need a page each. The third has the least to lose, but its one page is not enough."""
    scheduler, _ = make_scheduler(8, max_batch_tokens=64)
    made = [start(scheduler, make_sequence(name, size)) for name, size in zip("abcd", (4, 4, 2, 18), strict=True)]
    run_step(scheduler)
    assert [item.sequence for item in run_step(scheduler)] == made[:2]
    assert [scheduler.num_preemptions(sequence) for sequence in made] == [0, 0, 1, 1]
    assert [item.sequence for item in run_step(scheduler)] == made[:3]
    for sequence in made[:3]:
        scheduler.forget(sequence)
    work = run_step(scheduler)
    # Three of its pages are still cached.
    assert [(item.sequence, item.num_tokens) for item in work] == [(made[3], 7)]
    assert scheduler.num_cached_tokens(made[3]) == 0  # none was when it was first admitted


def test_new_sequences_leave_the_watermark_to_running_ones() -> None:
    scheduler, pool = make_scheduler(12, watermark=0.25)  # 3 pages
    holder = start(scheduler, make_sequence("holder", 8))
    run_step(scheduler)
    many, few = make_sequence("many", 32), make_sequence("few", 28)
    for sequence in (many, few):
        scheduler.track(sequence)
    assert scheduler.reserve(many, 32) is None  # it would leave 2 of 12 pages
    granted = scheduler.reserve(few, 28)
    assert granted is not None
    assert pool.num_available == 3
    pool.release(granted.fresh)
    scheduler.compute_here(many)
    assert [item.sequence for item in run_step(scheduler)] == [holder]
    scheduler.forget(holder)
    assert [item.sequence for item in run_step(scheduler)] == [many]


def test_a_sequence_that_needs_every_page_is_admitted_if_no_other_runs() -> None:
    scheduler, _ = make_scheduler(12, watermark=0.25)
    start(scheduler, make_sequence("whole", 48))
    assert len(run_step(scheduler)) == 1


def test_run_ahead_waits_while_pages_are_too_few() -> None:
    scheduler, pool = make_scheduler(2)
    start(scheduler, make_sequence("full", 8))
    plan = scheduler.schedule()
    assert pool.num_available == 0
    assert scheduler.schedule_ahead() is None
    scheduler.commit(plan, StepOutput((SampledToken(1),)))


def test_run_ahead_takes_the_last_free_page() -> None:
    scheduler, pool = make_scheduler(3)
    start(scheduler, make_sequence("full", 8))
    scheduler.schedule()
    assert pool.num_available == 1
    assert scheduler.schedule_ahead() is not None
    assert pool.num_available == 0


@pytest.mark.parametrize(("max_batch", "waits"), [(1, False), (2, True)])
def test_run_ahead_waits_for_a_request_only_if_it_could_be_admitted(max_batch: int, waits: bool) -> None:
    scheduler, _ = make_scheduler(12, max_batch_sequences=max_batch)
    start(scheduler, make_sequence("running", 4))
    scheduler.schedule()
    late = make_sequence("late", 4)
    late.sampling = SamplingParams(max_tokens=9, allowed_token_ids=(3, 4), bad_sequences=((3, 4),))
    start(scheduler, late)
    assert (scheduler.schedule_ahead() is None) is waits


def test_interactive_requests_are_admitted_first() -> None:
    scheduler, _ = make_scheduler(40, max_batch_sequences=4, max_batch_tokens=4)
    for lane in (Lane.BULK, Lane.STANDARD, Lane.INTERACTIVE):
        start(scheduler, make_sequence(lane.value, 3, lane=lane))
    assert [item.sequence.request_id for item in run_step(scheduler)] == ["interactive", "standard"]


@examples(60)
@given(
    lane=st.sampled_from([Lane.INTERACTIVE, Lane.STANDARD]),
    flood=st.lists(st.sampled_from(Lane), min_size=1, max_size=5),
)
def test_later_requests_cannot_keep_a_request_waiting_forever(lane: Lane, flood: list[Lane]) -> None:
    """At most as many later requests as its handicap go first, and a few more beside its own chunks."""
    scheduler, _ = make_scheduler(8, max_batch_sequences=2, max_batch_tokens=4)
    waiting = start(scheduler, make_sequence("waiting", 5, lane=lane))
    number, later = 0, dict[Sequence, int]()
    while not waiting.num_output_tokens:
        while scheduler.num_waiting < 4:
            number += 1
            newcomer = make_sequence(f"n{number}", 3, lane=flood[number % len(flood)])
            later[start(scheduler, newcomer)] = number
        run_step(scheduler)
        for sequence in [sequence for sequence in later if sequence.num_output_tokens]:
            assert later.pop(sequence) <= HANDICAP_REQUESTS[lane] + 6
            scheduler.forget(sequence)
        assert number <= HANDICAP_REQUESTS[lane] + 10


def test_a_reservation_waits_for_pages() -> None:
    scheduler, pool = make_scheduler(4)
    holder = start(scheduler, make_sequence("holder", 12))
    run_step(scheduler)
    remote = make_sequence("remote", 8)
    scheduler.track(remote)
    assert scheduler.reserve(remote, 8) is None
    scheduler.forget(holder)
    granted = scheduler.reserve(remote, 8)
    assert granted is not None
    assert (granted.held, len(granted.fresh)) == ([], 2)
    pool.release(granted.fresh)


def test_a_reservation_waits_for_earlier_local_sequences() -> None:
    scheduler, _ = make_scheduler(4)
    earlier, waiting, later = make_sequence("earlier", 4), make_sequence("waiting", 16), make_sequence("later", 4)
    start(scheduler, make_sequence("holder", 4))
    run_step(scheduler)
    scheduler.track(earlier)
    start(scheduler, waiting)
    scheduler.track(later)
    run_step(scheduler)  # `waiting` needs more pages than are free
    assert scheduler.num_waiting == 1
    assert scheduler.reserve(later, 4) is None
    assert scheduler.reserve(earlier, 4) is not None


@pytest.mark.parametrize(("num_pages", "max_sequences", "is_granted"), [(20, 4, True), (9, 4, False), (20, 3, False)])
def test_a_reservation_does_not_wait_for_earlier_prompts_to_be_computed(
    num_pages: int, max_sequences: int, is_granted: bool
) -> None:
    """Pages and a place for each of them are enough: their computation may take seconds."""
    scheduler, pool = make_scheduler(num_pages, max_batch_sequences=max_sequences)
    long, waiting, later = make_sequence("long", 24), make_sequence("waiting", 8), make_sequence("later", 8)
    for sequence in (long, waiting):
        start(scheduler, sequence)
    scheduler.track(later)
    run_step(scheduler)  # spends its budget on `long`
    assert (scheduler.num_waiting, pool.num_available) == (1, num_pages - 6)
    first = scheduler.reserve(later, 8)
    assert (first is not None) == (num_pages - 6 >= 4)
    if first is None:
        return
    later.pages = first.fresh
    last = make_sequence("last", 8)
    scheduler.track(last)
    assert (scheduler.reserve(last, 8) is not None) == is_granted  # one more place is left for `waiting`


def test_sequences_with_pages_in_flight_count_towards_the_batch_limit() -> None:
    scheduler, _ = make_scheduler(20, max_batch_sequences=2)
    running, landing, late = (make_sequence(name, 4) for name in ("running", "landing", "late"))
    start(scheduler, running)
    run_step(scheduler)
    for sequence in (landing, late):
        scheduler.track(sequence)
    granted = scheduler.reserve(landing, 4)
    assert granted is not None
    landing.pages = granted.fresh
    assert scheduler.reserve(late, 4) is None
    scheduler.compute_here(late)
    assert [item.sequence for item in run_step(scheduler)] == [running]
    scheduler.forget(landing)
    assert [item.sequence for item in run_step(scheduler)] == [running, late]


def test_a_reservation_lists_the_cached_pages() -> None:
    scheduler, _ = make_scheduler(20, max_batch_tokens=16)
    first = start(scheduler, make_sequence("same", 12))
    run_step(scheduler)
    again = Sequence(RequestId("again"), first.token_ids[:12], 12, SamplingParams(max_tokens=4), b"salt")
    scheduler.track(again)
    assert scheduler.peek_cached_tokens(again) == 8  # never the page of the last token, because its logits are needed
    granted = scheduler.reserve(again, 12)
    assert granted is not None
    assert (granted.held, len(granted.fresh)) == (first.pages[:2], 1)


def test_sequences_of_different_salts_share_no_pages() -> None:
    scheduler, _ = make_scheduler(20, max_batch_tokens=16)
    first = start(scheduler, make_sequence("same", 12))
    run_step(scheduler)
    other = Sequence(RequestId("other"), list(first.token_ids), 12, SamplingParams(max_tokens=4), b"tenant")
    assert scheduler.peek_cached_tokens(other) == 0


def test_a_config_under_which_sequences_starve_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens = 2 is below"):
        DecodeConfig(max_batch_tokens=2, max_batch_sequences=4)


@examples(60)
@given(data=st.data(), num_pages=st.integers(8, 24))
def test_every_history_balances_pages_and_completes_its_sequences(data: st.DataObject, num_pages: int) -> None:
    """Random arrivals (local and remote), cancellations and steps: each remaining sequence gets exactly its tokens."""
    scheduler, pool = make_scheduler(num_pages, max_batch_sequences=3, max_batch_tokens=6)
    live: list[Sequence] = []
    landing: list[Sequence] = []
    cache, awaited = scheduler._pages._cache, []
    for number in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["local", "remote", "land", "cancel", "pull", "step", "step", "step"]))
        if action in ("local", "remote") and len(live) < 6:
            length = data.draw(st.integers(1, 16))
            lane = data.draw(st.sampled_from(Lane))
            sequence = make_sequence(f"s{number % 3}", length, lane=lane)  # few names, so that prefixes repeat
            scheduler.track(sequence)
            live.append(sequence)
            if action == "local":
                scheduler.compute_here(sequence)
            elif granted := scheduler.reserve(sequence, length):
                sequence.pages = [*granted.held, *granted.fresh]
                landing.append(sequence)
            else:
                scheduler.compute_here(sequence)
        elif action == "land" and landing:
            sequence = landing.pop(data.draw(st.integers(0, len(landing) - 1)))
            length = len(sequence.token_ids)
            sequence.token_ids.append(next_token(sequence))
            scheduler.join(sequence, length)
        elif action == "pull" and live:
            hashes = live[data.draw(st.integers(0, len(live) - 1))].hash_full_pages(PAGE_SIZE)
            cache.await_pages(hashes)
            awaited.append(list(hashes))
            pull(cache, hashes, range(data.draw(st.integers(0, len(hashes))), len(hashes)))
        elif action == "cancel" and live:
            victim = live.pop(data.draw(st.integers(0, len(live) - 1)))
            landing = [sequence for sequence in landing if sequence is not victim]
            scheduler.forget(victim)
        else:
            run_step(scheduler)
        cache.check_integrity()
    for sequence in landing:
        scheduler.forget(sequence)
    # The first in rank always progresses, whatever the others hold, so they end in that order.
    for sequence in sorted((sequence for sequence in live if sequence not in landing), key=scheduler.rank):
        _run_until_output(scheduler, sequence, 4)
        expected = sequence.token_ids[: sequence.num_prompt_tokens]
        while len(expected) < len(sequence.token_ids):
            expected.append(sum(expected) % 997)
        assert sequence.token_ids == expected
        scheduler.forget(sequence)
    for hashes in awaited:
        cache.unawait(hashes)
    cache.check_integrity()
    assert pool.num_available == pool.num_pages


def _run_until_output(scheduler: DecodeScheduler, sequence: Sequence, num_tokens: int) -> None:
    for _ in range(400):
        if sequence.num_output_tokens >= num_tokens:
            return
        run_step(scheduler)
    pytest.fail(f"{sequence.request_id} starves: {sequence.num_output_tokens} tokens after 400 steps")


def test_computing_a_sequence_that_already_holds_pages_is_an_error() -> None:
    """It is an exception and no `assert`, which python -O drops: the pages may be the target of a transfer."""
    scheduler, pool = make_scheduler(8)
    sequence = make_sequence("a", 5)
    scheduler.track(sequence)
    sequence.pages = pool.allocate(2)
    with pytest.raises(InternalError, match="a to be computed here holds 2 pages and 0 computed tokens"):
        scheduler.compute_here(sequence)


def test_a_step_without_a_page_for_its_tokens_is_an_error() -> None:
    sequence = make_sequence("a", 20)
    sequence.pages = [PageId(0)]
    with pytest.raises(InternalError, match="a has no page for its next tokens: 1 for 20"):
        _items_batch([ScheduledSequence(sequence, 20)], 16)
