"""Tests what sessions do to the order of eviction, and how each hint is answered."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from engine.cache.prefix_cache import PrefixCache
from engine.cache.retention.reuse_policy import Gap, ReuseModel
from engine.cache.retention.sessions import Session, SessionTable
from penstock.config.retention import RetentionConfig
from penstock.kv.kv_hints import Hint, HintAnswer, HintOutcome, KvHints
from penstock.types import PageHash


def chain(name: str, num_pages: int) -> list[PageHash]:
    return [PageHash(f"{name}{index:04d}".encode().ljust(16, b".")) for index in range(num_pages)]


class World:
    """Computes turns of sessions at one cache, in virtual time."""

    def __init__(self, num_pages: int, config: RetentionConfig | None = None) -> None:
        self.now_s = 0.0
        self.cache = PrefixCache(num_pages, 4, retention=config, clock=lambda: self.now_s)
        self.pool = self.cache.pool

    def turn(self, hashes: list[PageHash], hints: KvHints, owner: str = "") -> dict[Hint, HintAnswer]:
        held = self.cache.match(hashes)
        held += self.pool.allocate(len(hashes) - len(held))
        self.cache.insert(hashes, held, owner=owner)
        answers = self.cache.hints.apply(owner, hints, hashes, self.now_s)
        self.pool.release(held)
        self.cache.check_integrity()
        return {answer.hint: answer for answer in answers}

    def num_cached(self, hashes: list[PageHash]) -> int:
        return len(self.cache.find(hashes))


def test_pages_of_an_ended_session_are_evicted_before_older_ones() -> None:
    world = World(8)
    world.turn(chain("old", 3), KvHints(session="old"))
    world.now_s = 1.0
    answers = world.turn(chain("ended", 4), KvHints(session="ended", end_session=True))
    assert answers[Hint.END] == HintAnswer(Hint.END, HintOutcome.ACCEPTED, num_pages=4)
    world.turn(chain("new", 4), KvHints())
    assert (world.num_cached(chain("old", 3)), world.num_cached(chain("ended", 4))) == (3, 1)
    assert world.cache.hints.sessions.find("", "ended") is None


def test_pages_that_a_session_left_behind_are_evicted_first_unless_shared() -> None:
    world = World(10)
    trunk, other = chain("trunk", 2), chain("other", 2)
    world.turn([*trunk, *chain("a", 2)], KvHints(session="a"))
    world.turn([*trunk, *chain("b", 2)], KvHints(session="b"))
    world.turn(other, KvHints())
    world.turn([*trunk, *chain("A", 2)], KvHints(session="a"))  # the session's history is rewritten
    world.turn(chain("new", 2), KvHints())
    assert world.num_cached([*trunk, *chain("a", 2)]) == 2
    assert world.num_cached([*trunk, *chain("b", 2)]) == 4
    assert world.num_cached(other) == 2


def test_parallel_chains_of_a_session_do_not_release_each_others_pages() -> None:
    world = World(16)
    for turn in range(3):
        for agent in ("x", "y"):
            world.turn([*chain("trunk", 1), *chain(agent, 3 + turn)], KvHints(session="all"))
    world.turn(chain("new", 5), KvHints())
    assert all(world.num_cached([*chain("trunk", 1), *chain(agent, 5)]) == 6 for agent in ("x", "y"))
    ended = world.turn(chain("z", 1), KvHints(session="all", end_session=True))[Hint.END]
    assert ended.num_pages == 12, "both agents' own pages, the trunk that they share, and the last prompt's"


def test_a_session_with_short_pauses_keeps_its_pages_longer_than_a_slow_one() -> None:
    def survivors(config: RetentionConfig) -> tuple[int, int]:
        world = World(8, config)
        for turn in range(20):
            world.now_s = turn * 60.0
            if turn % 5 == 0:
                world.turn(chain("slow", 3), KvHints(session="slow"))
            world.turn(chain("fast", 3), KvHints(session="fast"))
        world.now_s += 1.0
        world.turn(chain("slow", 3), KvHints(session="slow"))  # used last
        world.turn(chain("new", 5), KvHints())
        return world.num_cached(chain("fast", 3)), world.num_cached(chain("slow", 3))

    assert survivors(RetentionConfig()) == (3, 0)
    assert survivors(RetentionConfig(eviction="lru")) == (0, 3)


def test_a_fork_finds_its_parent_only_within_its_tenant() -> None:
    world = World(16)
    trunk = chain("trunk", 3)
    world.turn(trunk, KvHints(session="main"), "a")
    child = KvHints(session="child", fork_of="main")
    answer = world.turn([*trunk, *chain("x", 1)], child, "a")[Hint.FORK]
    assert (answer.outcome, answer.num_pages) == (HintOutcome.ACCEPTED, 3)
    refused = world.turn(chain("y", 1), child, "b")[Hint.FORK]
    assert (refused.outcome, refused.reason) == (HintOutcome.REFUSED, "session 'main' is not known here")


def test_pages_that_siblings_share_outlast_those_of_a_single_session() -> None:
    def survivors(config: RetentionConfig) -> tuple[int, int]:
        world = World(12, config)
        for turn in range(4):
            world.now_s = 100.0 * turn
            world.turn(chain("trunk", 2), KvHints(session="main"))
            for name in "xyz":
                fork = "main" if not turn else ""
                world.turn([*chain("trunk", 2), *chain(name, 1)], KvHints(session=name, fork_of=fork))
            world.turn(chain("single", 3), KvHints(session="single"))
        world.turn(chain("new", 9), KvHints())
        return world.num_cached(chain("trunk", 2)), world.num_cached(chain("single", 3))

    assert survivors(RetentionConfig()) == (2, 1)
    assert survivors(RetentionConfig(eviction="lru")) == (0, 3)


def test_a_demoted_prompt_is_evicted_first_unless_it_is_used_again() -> None:
    world = World(6)
    world.turn(chain("a", 2), KvHints())
    assert world.turn(chain("b", 2), KvHints(demote=True))[Hint.DEMOTE].outcome is HintOutcome.ACCEPTED
    world.turn(chain("c", 3), KvHints())
    assert (world.num_cached(chain("a", 2)), world.num_cached(chain("b", 2))) == (2, 1)
    world = World(6)
    world.turn(chain("b", 2), KvHints(demote=True))
    world.turn(chain("a", 2), KvHints())
    world.turn(chain("b", 2), KvHints())
    world.turn(chain("c", 3), KvHints())
    assert (world.num_cached(chain("a", 2)), world.num_cached(chain("b", 2))) == (1, 2)


@pytest.mark.parametrize(
    ("held_share", "outcome", "reason"),
    [
        (1.0, HintOutcome.ACCEPTED, ""),
        (0.5, HintOutcome.CLIPPED, "the tenant's quota admits 4 of 6 pages"),
        (0.0, HintOutcome.REFUSED, "the tenant's quota admits 0 of 6 pages"),
    ],
)
def test_the_answer_to_a_pin_says_what_the_quota_admits(held_share: float, outcome: HintOutcome, reason: str) -> None:
    world = World(8, RetentionConfig(held_share=held_share, total_held_share=1.0))
    answers = world.turn(chain("a", 6), KvHints(pin_s=10.0, priority=3))
    for hint in (Hint.PIN, Hint.PRIORITY):
        assert (answers[hint].outcome, answers[hint].reason) == (outcome, reason)


def test_session_tables_are_bounded_in_all_and_for_each_tenant() -> None:
    table = SessionTable(max_sessions=5, max_per_tenant=3)
    for number in range(20):
        table.put("greedy", f"s{number}", Session(Gap(0.0)))
    assert len(table) == 3
    for tenant in "abc":
        table.put(tenant, "s", Session(Gap(0.0)))
    assert len(table) == 5
    assert table.find("greedy", "s19") is not None
    assert table.find("greedy", "s17") is None


def _predicted(rng: random.Random) -> Iterator[tuple[float, float]]:
    for _ in range(100):
        yield rng.uniform(0, 1000), rng.uniform(0, 1000)


def test_the_order_of_two_waiting_sessions_never_changes() -> None:
    """Keys are computed once, so by the model's rates, 1 / (gap + age), the comparison must hold at every later
    time."""
    model, rng = ReuseModel(), random.Random(2)
    for (gap_a, used_a), (gap_b, used_b) in zip(_predicted(rng), _predicted(rng), strict=True):
        keys = [used - model.handicap_s(Gap(used, gap)) for gap, used in ((gap_a, used_a), (gap_b, used_b))]
        for later_s in (0.0, 10.0, 1e4):
            now_s = max(used_a, used_b) + later_s
            rates = [1 / (gap + now_s - used) for gap, used in ((gap_a, used_a), (gap_b, used_b))]
            assert (keys[0] < keys[1]) == (rates[0] < rates[1])


DEMOTE = KvHints(demote=True, only=True)


def demote(world: World, hashes: list[PageHash], owner: str) -> HintAnswer:
    (answer,) = world.cache.hints.apply(owner, DEMOTE, hashes, world.now_s)
    world.cache.check_integrity()
    return answer


def test_a_tenant_cannot_demote_what_another_of_its_group_has_cached() -> None:
    world = World(8)
    shared = chain("shared", 4)
    world.turn(shared, KvHints(), "victim")
    assert demote(world, shared, "other").outcome is HintOutcome.REFUSED
    assert demote(world, shared, "victim").outcome is HintOutcome.ACCEPTED


def test_a_tenant_cannot_end_anothers_hold_by_holding_longer_and_demoting() -> None:
    world = World(8, RetentionConfig(held_share=1.0, total_held_share=1.0))
    shared = chain("shared", 4)
    world.turn(shared, KvHints(), "thief")  # the thief caches the pages first
    world.turn(shared, KvHints(pin_s=50.0), "victim")
    world.turn(shared, KvHints(pin_s=60.0), "thief")
    assert demote(world, shared, "thief").outcome is HintOutcome.REFUSED
    assert len(world.pool.retention.holds) == 4
    world.now_s = 51.0
    assert demote(world, shared, "thief").outcome is HintOutcome.ACCEPTED, "the other hold has run out"
    assert not len(world.pool.retention.holds)


def test_pages_that_another_request_uses_are_not_demoted() -> None:
    world = World(8)
    first = chain("first", 3)
    world.turn(first, KvHints())
    running = world.cache.match(first)
    assert demote(world, first, "").outcome is HintOutcome.REFUSED
    assert world.turn(first, KvHints(demote=True))[Hint.DEMOTE].outcome is HintOutcome.REFUSED
    world.pool.release(running)
    assert world.turn(first, KvHints(demote=True))[Hint.DEMOTE].outcome is HintOutcome.ACCEPTED


def test_a_demoted_chain_becomes_one_run_of_the_order() -> None:
    world = World(2000)
    hashes = chain("long", 1500)
    world.turn(hashes, KvHints())
    world.pool.retention.order._rebuild()
    assert demote(world, hashes, "").num_pages == 1500
    assert sum(len(runs.heap) for runs in world.pool.retention.order._owners.values()) <= 2
