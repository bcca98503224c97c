"""Migrates sequences between decode cores under random orders of events, including network faults and dying workers.

Two real cores, with pages of one size or of two, a router and a fake one-sided transport run in one thread
(migration_world.py). A random seed picks each next event: a step, a message, a write, a migration, an overdue answer,
time that passes, a cancellation, a broken call, a killed worker. The fake engine fails on any page that holds another
sequence's KV; each stream must get exactly its tokens, and every page must be freed.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.decode.migration_world import World
from tests.support.engine.fake_engine import expected_tokens
from tests.support.suite.examples import examples


def play(seed: int, mishaps: bool) -> World:
    world = World(seed)
    rng = world.rng
    for _ in range(rng.randint(1, 5)):
        # There are only two beginnings, so that prefixes repeat.
        base = [rng.choice([1, 2]) * 10 + i for i in range(rng.randint(1, 20))]
        world.submit(base, rng.randint(1, 40))
        for _ in range(rng.randint(20, 120)):
            rng.choice(world.actions())()
            if rng.random() < 0.08:
                world.migrate(rng.choice(world.nodes))
            if mishaps and rng.random() < 0.02:
                world.mishap()
            world.check()
    world.settle()
    world.check()
    for stream in world.streams:
        wanted, reason = expected_tokens(stream.prompt, stream.max_tokens)
        if stream.cancelled:
            assert stream.tokens == wanted[: len(stream.tokens)]
        else:
            assert (stream.tokens, stream.end) == (wanted, reason)
    for node in world.nodes:
        assert node.engine.pool.num_available == node.engine.pool.num_pages
        assert (node.outgoing.num_open, node.incoming.num_kept, node.transfers.num_open) == (0, 0, 0)
        assert not node.calls.open_keys
    return world


@examples(60)
@given(seed=st.integers(0, 2**32), mishaps=st.booleans())
def test_every_stream_is_exact_and_every_page_is_freed(seed: int, mishaps: bool) -> None:
    play(seed, mishaps)


def test_some_sequences_migrate_in_the_random_histories() -> None:
    assert sum(play(seed, mishaps=False).num_migrated for seed in range(20)) > 20
