"""Tests the guarantees of circuit breakers and the quarantine in single cases and random histories."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.circuit_breaker import BreakerRules, CircuitBreaker, CircuitBreakers
from router.fleet.quarantine import Quarantine, Suspicion

RULES = BreakerRules()


def failed(breakers: CircuitBreakers[str], key: str, now_s: float, times: int = RULES.max_failures) -> None:
    for _ in range(times):
        breakers.on_failure(key, now_s)


def opened() -> CircuitBreaker:
    """Returns a breaker that opened at 0 s."""
    breaker = CircuitBreaker(RULES)
    for _ in range(RULES.max_failures):
        breaker.on_failure(0.0)
    return breaker


def test_an_open_breaker_allows_one_trial_after_its_rest_and_starts_slowly() -> None:
    breaker = CircuitBreaker(RULES)
    for _ in range(RULES.max_failures - 1):
        breaker.on_failure(0.0)
    assert breaker.share(0.0) == 1.0
    breaker.on_failure(0.0)
    assert breaker.share(0.0) == breaker.share(0.9 * RULES.rest_s) == 0.0
    assert breaker.share(RULES.rest_s) == 1.0  # a trial is allowed
    breaker.on_sent(RULES.rest_s)
    assert breaker.share(RULES.rest_s) == 0.0  # and only one
    breaker.on_success(1.5)
    assert breaker.share(1.5) == RULES.min_share
    assert breaker.share(1.5 + RULES.slow_start_s / 2) == 0.5
    assert breaker.share(1.5 + RULES.slow_start_s) == 1.0


def test_only_the_failure_that_opens_a_breaker_is_reported_as_such() -> None:
    breakers = CircuitBreakers[str](RULES)
    assert [breakers.on_failure("worker", 0.0) for _ in range(RULES.max_failures + 2)] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_failing_the_trial_doubles_the_rest_up_to_its_limit() -> None:
    breaker = opened()
    now_s, rests = 0.0, []
    for _ in range(8):
        rests.append(breaker.rest_s)
        now_s += breaker.rest_s
        breaker.on_sent(now_s)
        breaker.on_failure(now_s)
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_trial_without_an_outcome_does_not_exclude_the_worker_forever() -> None:
    breaker = opened()
    breaker.on_sent(1.0)
    assert breaker.share(1.0 + RULES.rest_s) == 1.0


def test_a_worker_that_mostly_fails_is_excluded_without_three_failures_in_a_row() -> None:
    breaker = CircuitBreaker(RULES)
    for _ in range(RULES.window):
        breaker.on_failure(0.0)
        breaker.on_failure(0.0)
        if breaker.opened_s is not None:
            break
        breaker.on_success(0.0)
    assert breaker.share(0.0) == 0.0


def test_a_success_from_before_the_opening_does_not_close_the_breaker() -> None:
    breaker = opened()
    breaker.on_success(0.5)
    assert breaker.share(0.5) == 0.0
    assert breaker.share(RULES.rest_s) == 1.0  # the trial has yet to happen


def test_a_failure_from_before_the_opening_does_not_prolong_the_rest() -> None:
    breaker = opened()
    breaker.on_failure(0.9 * RULES.rest_s)
    assert breaker.rest_s == RULES.rest_s
    assert breaker.share(RULES.rest_s) == 1.0


def test_failures_count_in_a_row_only_until_a_success() -> None:
    breaker = CircuitBreaker(RULES)
    for _ in range(RULES.window // RULES.max_failures // 2):
        for _ in range(RULES.max_failures - 1):
            breaker.on_failure(0.0)
        breaker.on_success(0.0)
    assert breaker.share(0.0) == 1.0


def test_most_outcomes_count_as_failures_only_in_a_full_window() -> None:
    rules = replace(RULES, max_failures=100)
    breaker = CircuitBreaker(rules)
    for _ in range(rules.window - 1):
        breaker.on_failure(0.0)
    assert breaker.share(0.0) == 1.0
    breaker.on_failure(0.0)
    assert breaker.share(0.0) == 0.0


def test_outcomes_before_the_rest_do_not_count_after_it() -> None:
    rules = replace(RULES, max_failures=100)
    breaker = CircuitBreaker(rules)
    for _ in range(rules.window):
        breaker.on_failure(0.0)
    breaker.on_sent(rules.rest_s)
    breaker.on_success(rules.rest_s)
    breaker.on_failure(rules.rest_s)
    assert breaker.opened_s is None


def test_a_breaker_that_reopens_in_slow_start_rests_longer() -> None:
    breaker = opened()
    for pause_s, rest_s in ((RULES.slow_start_s / 2, 2 * RULES.rest_s), (RULES.slow_start_s, RULES.rest_s)):
        tried_s = (breaker.opened_s or 0.0) + breaker.rest_s
        breaker.on_sent(tried_s)
        breaker.on_success(tried_s)
        for _ in range(RULES.max_failures):
            breaker.on_failure(tried_s + pause_s)
        assert breaker.rest_s == rest_s


def test_breakers_are_ignored_only_while_more_than_half_of_the_candidates_rest() -> None:
    breakers: CircuitBreakers[str] = CircuitBreakers()
    rng = random.Random(1)
    candidates = ["a", "b", "c", "d"]
    for key in ("a", "b"):
        failed(breakers, key, 0.0)
    assert breakers.usable(candidates, 0.0, rng) == ["c", "d"]
    failed(breakers, "c", 0.0)
    assert breakers.usable(candidates, 0.0, rng) == candidates


def test_no_worker_is_excluded_while_most_fail() -> None:
    breakers: CircuitBreakers[str] = CircuitBreakers()
    rng = random.Random(1)
    failed(breakers, "a", 0.0)
    assert breakers.usable(["a", "b"], 0.0, rng) == ["b"]
    assert breakers.usable(["a"], 0.0, rng) == ["a"]
    failed(breakers, "b", 0.0)
    assert breakers.usable(["a", "b"], 0.0, rng) == ["a", "b"]
    breakers.forget("a")
    assert breakers.usable(["a", "b"], 0.0, rng) == ["a"]
    assert breakers.num_open(0.0) == 1


def test_a_worker_in_slow_start_gets_its_share() -> None:
    breakers: CircuitBreakers[str] = CircuitBreakers()
    failed(breakers, "a", 0.0)
    breakers.on_sent("a", 1.0)
    breakers.on_success("a", 1.0)
    rng = random.Random(2)
    now_s = 1.0 + RULES.slow_start_s / 4
    num_sent = sum("a" in breakers.usable(["a", "b", "c"], now_s, rng) for _ in range(2000))
    assert 0.2 < num_sent / 2000 < 0.3
    assert breakers.usable(["a"], now_s, rng) == ["a"]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["sent", "success", "failure"]), st.sampled_from("abc"), st.floats(0, 3)), max_size=60
)


@given(events=EVENTS, seed=st.integers(0, 100))
def test_some_worker_is_always_usable_and_rests_are_bounded(events: list[tuple[str, str, float]], seed: int) -> None:
    breakers: CircuitBreakers[str] = CircuitBreakers()
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
    assert breakers.num_open(later_s) == 0  # no worker is excluded forever


@given(gains=st.lists(st.integers(0, 3), min_size=1, max_size=10))
def test_two_losses_in_a_row_without_a_token_make_a_suspect(gains: list[int]) -> None:
    suspicion, emitted = Suspicion(), 0
    caught = []
    for gain in gains:
        emitted += gain
        caught.append(suspicion.on_worker_lost(emitted))
    assert caught == [False, *(gain == 0 for gain in gains[1:])]


def test_a_prompt_that_kills_again_stays_quarantined_as_long_again() -> None:
    quarantine = Quarantine(ttl_s=10.0)
    quarantine.add([1], 0.0)
    quarantine.add([2], 1.0)
    quarantine.add([1], 8.0)
    assert not quarantine.holds([2], 11.0)
    assert quarantine.holds([1], 17.9)
    assert not quarantine.holds([1], 18.0)


def test_a_quarantine_holds_a_bounded_number_of_prompts() -> None:
    quarantine = Quarantine()
    for token in range(10_001):
        quarantine.add([token], 0.0)
    assert len(quarantine) == 10_000
    assert not quarantine.holds([0], 0.0)
    assert quarantine.holds([10_000], 0.0)


def test_a_quarantine_ends() -> None:
    quarantine = Quarantine(ttl_s=10.0)
    quarantine.add([1, 2], 0.0)
    quarantine.add([3], 5.0)
    assert quarantine.holds([1, 2], 9.9)
    assert not quarantine.holds([1, 2], 10.0)
    assert quarantine.holds([3], 10.0)
    assert len(quarantine) == 1
