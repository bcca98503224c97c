"""Circuit breakers and the quarantine, against what they promise, under any history."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from router.breaker import Breaker, BreakerRules, Breakers
from router.quarantine import Quarantine, Suspicion

RULES = BreakerRules()


def failed(breakers: Breakers[str], key: str, now_s: float, times: int = RULES.max_failures) -> None:
    for _ in range(times):
        breakers.on_failure(key, now_s)


def test_a_breaker_rests_is_tried_once_and_comes_back_slowly() -> None:
    breaker = Breaker(RULES)
    for _ in range(RULES.max_failures - 1):
        breaker.on_failure(0.0)
    assert breaker.share(0.0) == 1.0
    breaker.on_failure(0.0)
    assert breaker.share(0.0) == breaker.share(0.9 * RULES.rest_s) == 0.0
    assert breaker.share(RULES.rest_s) == 1.0  # one may try
    breaker.on_sent(RULES.rest_s)
    assert breaker.share(RULES.rest_s) == 0.0  # and no other
    breaker.on_success(1.5)
    assert breaker.share(1.5) == RULES.min_share
    assert breaker.share(1.5 + RULES.slow_start_s / 2) == 0.5
    assert breaker.share(1.5 + RULES.slow_start_s) == 1.0


def test_failing_the_trial_doubles_the_rest_up_to_its_limit() -> None:
    breaker = Breaker(RULES)
    for _ in range(RULES.max_failures):
        breaker.on_failure(0.0)
    now_s, rests = 0.0, []
    for _ in range(8):
        rests.append(breaker.rest_s)
        now_s += breaker.rest_s
        breaker.on_sent(now_s)
        breaker.on_failure(now_s)
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_trial_that_nobody_hears_of_again_does_not_shut_the_worker_out() -> None:
    breaker = Breaker(RULES)
    for _ in range(RULES.max_failures):
        breaker.on_failure(0.0)
    breaker.on_sent(1.0)
    assert breaker.share(1.0 + RULES.rest_s) == 1.0


def test_a_worker_that_fails_more_often_than_not_is_left_out_though_never_thrice_in_a_row() -> None:
    breaker = Breaker(RULES)
    for _ in range(RULES.window):
        breaker.on_failure(0.0)
        breaker.on_failure(0.0)
        if breaker.opened_s is not None:
            break
        breaker.on_success(0.0)
    assert breaker.share(0.0) == 0.0


def test_most_failing_means_that_none_is_left_out() -> None:
    breakers: Breakers[str] = Breakers()
    rng = random.Random(1)
    failed(breakers, "a", 0.0)
    assert breakers.usable(["a", "b"], 0.0, rng) == ["b"]
    assert breakers.usable(["a"], 0.0, rng) == ["a"]
    failed(breakers, "b", 0.0)
    assert breakers.usable(["a", "b"], 0.0, rng) == ["a", "b"]
    breakers.forget("a")
    assert breakers.usable(["a", "b"], 0.0, rng) == ["a"]
    assert breakers.num_open(0.0) == 1


def test_a_slow_start_takes_its_share() -> None:
    breakers: Breakers[str] = Breakers()
    failed(breakers, "a", 0.0)
    breakers.on_sent("a", 1.0)
    breakers.on_success("a", 1.0)
    rng = random.Random(2)
    now_s = 1.0 + RULES.slow_start_s / 4
    drawn = sum("a" in breakers.usable(["a", "b", "c"], now_s, rng) for _ in range(2000))
    assert 0.2 < drawn / 2000 < 0.3
    assert breakers.usable(["a"], now_s, rng) == ["a"]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["sent", "success", "failure"]), st.sampled_from("abc"), st.floats(0, 3)), max_size=60
)


@given(events=EVENTS, seed=st.integers(0, 100))
def test_someone_is_always_usable_and_rests_are_bounded(events: list[tuple[str, str, float]], seed: int) -> None:
    breakers: Breakers[str] = Breakers()
    rng, now_s = random.Random(seed), 0.0
    for what, key, passed_s in events:
        now_s += passed_s
        match what:
            case "sent":
                breakers.on_sent(key, now_s)
            case "success":
                breakers.on_success(key, now_s)
            case "failure":
                breakers.on_failure(key, now_s)
        usable = breakers.usable(["a", "b", "c"], now_s, rng)
        assert usable
        assert set(usable) <= {"a", "b", "c"}
    later_s = now_s + 2 * RULES.max_rest_s
    assert breakers.num_open(later_s) == 0  # nobody is left out for good


@given(gains=st.lists(st.integers(0, 3), min_size=1, max_size=10))
def test_two_deaths_without_a_token_between_them_are_the_requests_fault(gains: list[int]) -> None:
    suspicion, emitted = Suspicion(), 0
    caught = []
    for gain in gains:
        emitted += gain
        caught.append(suspicion.on_worker_lost(emitted))
    assert caught == [False, *(gain == 0 for gain in gains[1:])]


def test_a_quarantine_ends() -> None:
    quarantine = Quarantine(ttl_s=10.0)
    quarantine.add([1, 2], 0.0)
    quarantine.add([3], 5.0)
    assert quarantine.holds([1, 2], 9.9)
    assert not quarantine.holds([1, 2], 10.0)
    assert quarantine.holds([3], 10.0)
    assert len(quarantine) == 1
