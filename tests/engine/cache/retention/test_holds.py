"""Tests quotas of held pages: charges add up after any history, and no tenant holds more than its share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.prefix_cache import PrefixCache
from engine.cache.retention.holds import HoldLedger, Lost
from penstock.config.retention import RetentionConfig
from penstock.kv.kv_hints import Hint, HintOutcome, KvHints
from penstock.kv.page_hash import hash_pages
from penstock.types import PageHash, PageId

TENANTS = ["a", "b", "c"]


def pages(*numbers: int) -> list[PageId]:
    return [PageId(number) for number in numbers]


def test_a_hold_beyond_the_quota_takes_the_leading_pages() -> None:
    ledger = HoldLedger(max_pages_per_owner=3, max_pages=4)
    assert ledger.hold(pages(0, 1, 2, 3), "a", 0, 10.0) == 3
    assert ledger.hold(pages(4, 5), "b", 0, 10.0) == 1, "all tenants together"
    assert dict(ledger.num_held) == {"a": 3, "b": 1}
    ledger.check_integrity()


def test_holding_again_costs_nothing_and_keeps_the_stronger_hold() -> None:
    ledger = HoldLedger(2, 2)
    ledger.hold(pages(0, 1), "a", 5, 10.0)
    assert ledger.hold(pages(0, 1), "a", 1, 20.0) == 2
    hold = ledger.of(PageId(0))
    assert hold is not None
    assert (hold.priority, hold.expiry_s) == (5, 20.0)
    assert ledger.expire(19.0) == []
    assert sorted(ledger.expire(20.0)) == pages(0, 1)
    assert not ledger.num_held


def test_a_page_that_another_tenant_holds_for_longer_stays_charged_to_it() -> None:
    ledger = HoldLedger(1, 2)
    ledger.hold(pages(0), "a", 0, 10.0)
    assert ledger.hold(pages(0), "b", 0, 5.0) == 1
    assert dict(ledger.num_held) == {"a": 1}
    assert ledger.hold(pages(0), "b", 0, 15.0) == 1
    assert dict(ledger.num_held) == {"b": 1}, "who holds it for longer pays"


def test_a_shared_hold_keeps_the_higher_priority_and_the_other_tenants_expiry() -> None:
    ledger = HoldLedger(1, 2)
    ledger.hold(pages(0), "a", 0, 10.0)
    ledger.hold(pages(0), "b", 7, 5.0)
    hold = ledger.of(PageId(0))
    assert hold is not None
    assert (hold.owner, hold.priority, hold.expiry_s, hold.shared_until_s) == ("a", 7, 10.0, 5.0)
    ledger.hold(pages(0), "b", 0, 20.0)
    hold = ledger.of(PageId(0))
    assert hold is not None
    assert (hold.owner, hold.priority, hold.expiry_s, hold.shared_until_s) == ("b", 7, 20.0, 10.0)
    ledger.check_integrity()


def test_holds_that_are_renewed_forever_take_bounded_memory() -> None:
    ledger = HoldLedger(4, 4)
    for number in range(10_000):
        ledger.hold(pages(0, 1), "a", 0, 1000.0 + number)
    assert len(ledger._by_expiry) < 100


_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "drop", "expire"]),
        st.sampled_from(TENANTS),
        st.lists(st.integers(0, 11), unique=True, max_size=8),
        st.integers(0, 9),
        st.floats(0, 20),
    ),
    max_size=60,
)


@given(_CALLS)
@settings(max_examples=200, deadline=None)
def test_charges_add_up_and_quotas_hold_in_any_history(calls: list[tuple[str, str, list[int], int, float]]) -> None:
    ledger, now_s = HoldLedger(4, 8), 0.0
    for operation, tenant, numbers, priority, seconds in calls:
        if operation == "hold":
            count = ledger.hold(pages(*numbers), tenant, priority, now_s + seconds)
            assert all(ledger.of(PageId(number)) is not None for number in numbers[:count])
        elif operation == "drop":
            for number in numbers:
                ledger.drop(PageId(number), Lost.PRESSURE)
        else:
            now_s += seconds
            ledger.expire(now_s)
            assert all(hold.expiry_s > now_s for number in range(12) if (hold := ledger.of(PageId(number))))
        ledger.check_integrity()


# Holds inside a pool.

_PAGE = 4


class Tenants:
    """Runs requests of several tenants at one pool, in virtual time."""

    def __init__(self, num_pages: int, config: RetentionConfig) -> None:
        self.now_s = 0.0
        self.cache = PrefixCache(num_pages, _PAGE, retention=config, clock=lambda: self.now_s)
        self.pool = self.cache.pool

    def hashes(self, tenant: str, prompt: list[int]) -> list[PageHash]:
        return hash_pages(prompt, _PAGE, tenant.encode())

    def serve(self, tenant: str, prompt: list[int], hints: KvHints) -> dict[Hint, HintOutcome]:
        """Computes a prompt and applies its hints at its end."""
        hashes = self.hashes(tenant, prompt)
        held = self.cache.match(hashes)
        held += self.pool.allocate(len(hashes) - len(held))
        self.cache.insert(hashes, held, owner=tenant)
        answers = self.cache.hints.apply(tenant, hints, hashes, self.now_s)
        self.pool.release(held)
        return {answer.hint: answer.outcome for answer in answers}


def prompt_of(first: int, num_pages: int) -> list[int]:
    return [first] * _PAGE + [0] * (_PAGE * (num_pages - 1))


def test_a_thousand_pins_and_forks_keep_their_quotas_and_never_block_a_sequence() -> None:
    config = RetentionConfig(held_share=0.25, total_held_share=0.5, cached_share=0.5, max_tenant_sessions=50)
    world, rng = Tenants(64, config), random.Random(5)
    outcomes = []
    for number in range(1000):
        tenant = rng.choice(TENANTS)
        fork = f"s{rng.randrange(number)}" if number and rng.random() < 0.3 else ""
        hints = KvHints(session=f"s{number}", fork_of=fork, pin_s=rng.uniform(1, 200), priority=rng.randrange(10))
        answers = world.serve(tenant, prompt_of(rng.randrange(200), rng.randint(1, 12)), hints)
        outcomes.append(answers[Hint.PIN])
        world.cache.check_integrity()
        assert all(count <= 16 for count in world.pool.retention.holds.num_held.values())
        assert len(world.pool.retention.holds) <= 32
        world.now_s += rng.uniform(0, 5)
    assert set(outcomes) == set(HintOutcome), "some were accepted, some clipped, some refused"
    assert len(world.cache.hints.sessions) <= 150
    everything = world.pool.allocate(64)
    assert world.pool.retention.holds.num_lost[Lost.PRESSURE] > 0, "running sequences come before all holds"
    world.pool.release(everything)
    assert not world.pool.retention.holds.num_held
    world.cache.check_integrity()


def test_a_tenant_that_pins_and_floods_evicts_no_pages_of_others_within_their_shares() -> None:
    world = Tenants(64, RetentionConfig(held_share=0.25, cached_share=0.5))
    world.serve("victim", prompt_of(1, 16), KvHints(pin_s=1000.0))
    # The victim has 24 pages; the flood has 32, and 8 more while a request runs.
    world.serve("victim", prompt_of(2, 8), KvHints())
    for number in range(300):
        world.now_s += 0.1
        world.serve("flood", prompt_of(number, 8), KvHints(session=f"s{number}", pin_s=1000.0, priority=9))
    for first, num_pages in ((1, 16), (2, 8)):
        assert len(world.cache.find(world.hashes("victim", prompt_of(first, num_pages)))) == num_pages


def test_pressure_releases_holds_by_priority_then_expiry_and_leaves_before_parents() -> None:
    world = Tenants(12, RetentionConfig(held_share=1.0, total_held_share=1.0))
    world.serve("a", prompt_of(1, 4), KvHints(pin_s=50.0, priority=2))
    world.serve("a", prompt_of(2, 4), KvHints(pin_s=90.0))
    world.serve("a", prompt_of(3, 4), KvHints(pin_s=20.0, priority=2))
    for num_pages, expected in ((2, [4, 2, 4]), (4, [4, 0, 4]), (7, [4, 0, 1]), (9, [3, 0, 0])):
        running = world.pool.allocate(num_pages)
        assert [len(world.cache.find(world.hashes("a", prompt_of(first, 4)))) for first in (1, 2, 3)] == expected
        world.pool.release(running)
    assert world.pool.retention.holds.num_lost[Lost.PRESSURE] == 9


def test_pages_of_an_expired_hold_age_like_others() -> None:
    world = Tenants(8, RetentionConfig(held_share=0.5))
    world.serve("a", prompt_of(1, 4), KvHints(pin_s=10.0))
    world.now_s = 11.0
    world.serve("a", prompt_of(2, 4), KvHints())
    world.now_s = 12.0
    world.serve("a", prompt_of(3, 4), KvHints())
    survivors = [len(world.cache.find(world.hashes("a", prompt_of(first, 4)))) for first in (1, 2, 3)]
    # Its pages rejoined the eviction order as just used when the hold was found expired.
    assert survivors[2] == 4
    assert sum(survivors) == 8
    assert not world.pool.retention.holds.num_lost


@pytest.mark.parametrize(("asked_s", "outcome"), [(5.0, HintOutcome.ACCEPTED), (5000.0, HintOutcome.CLIPPED)])
def test_a_pin_longer_than_allowed_is_clipped(asked_s: float, outcome: HintOutcome) -> None:
    world = Tenants(8, RetentionConfig(held_share=0.5, max_hold_s=600.0))
    assert world.serve("a", prompt_of(1, 2), KvHints(pin_s=asked_s))[Hint.PIN] is outcome
    world.pool.retention.expire(601.0)
    assert not world.pool.retention.holds.num_held
