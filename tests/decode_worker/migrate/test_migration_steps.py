"""Stops a migration at single moments: what each side holds then, and what it gives back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from decode_worker.migrate.outgoing import CopyPhase
from decode_worker.request import DecodeRequest
from engine.step.sequence import Sequence
from penstock.errors import DeadlineExceeded
from penstock.types import RequestId, SamplingParams, TransferId
from tests.support.decode.migration_world import Node, World
from tests.support.engine.fake_engine import expected_tokens

PROMPT = list(range(10, 28))
MAX_TOKENS = 40


class Scene:
    """One stream that migrates from `source` to `target`, as far as a test lets it."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.world.submit(PROMPT, MAX_TOKENS)
        (self.stream,) = self.world.streams
        source = self.stream.node
        assert source is not None
        self.source: Node = source
        self.target = next(node for node in self.world.nodes if node is not source)
        self.run_until(lambda: len(self.stream.tokens) > 2)
        self.world.migrate(source)
        source.wire.refuse = ""
        (self.key,) = source.calls.open_keys
        self.migration = source.outgoing._migrations[self.key]

    def run_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(3000):
            if condition():
                return
            self.world.rng.choice(self.world.actions())()
        raise AssertionError("the condition never came true")

    def held(self, node: Node) -> int:
        return node.engine.pool.num_pages - node.engine.pool.num_available


@pytest.fixture(params=range(5))
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(request.param)


def test_pages_in_flight_outlive_their_sequence(scene: Scene) -> None:
    scene.run_until(lambda: scene.migration.phase is CopyPhase.PAUSED or scene.stream.over)
    assert not scene.stream.over
    assert scene.stream.request is not None
    scene.source.worker.cancel(scene.stream.request)
    scene.stream.cancelled = True
    assert scene.held(scene.source) == len(scene.migration.shared) > 0
    scene.run_until(lambda: not scene.source.wire.links)
    assert scene.held(scene.source) == 0
    scene.run_until(lambda: not scene.world.busy())
    assert (scene.held(scene.target), scene.target.incoming.num_kept) == (0, 0)


def test_a_sequence_that_its_source_took_back_does_not_wait_for_its_lease(scene: Scene) -> None:
    scene.run_until(lambda: scene.target.incoming.num_kept == 1)
    scene.source.outgoing.on_failed(scene.key, DeadlineExceeded("no answer"))
    scene.run_until(lambda: not scene.world.network.calls and not scene.target.steps.is_busy)
    assert (scene.held(scene.target), scene.target.incoming.num_kept) == (0, 0)
    scene.run_until(lambda: scene.stream.over)
    assert scene.stream.tokens == expected_tokens(PROMPT, MAX_TOKENS)[0]
    assert scene.stream.node is scene.source


def test_a_ticket_for_other_tokens_gets_nothing(scene: Scene) -> None:
    scene.run_until(lambda: scene.target.incoming.num_kept == 1)
    sequence = Sequence(RequestId("r"), PROMPT, len(PROMPT), SamplingParams(max_tokens=1), b"salt")
    request = DecodeRequest(0, sequence, scene.source, deque(), deadline_s=1e6)
    assert not scene.target.incoming.attach(TransferId(scene.key.transfer_id), request)
    assert not scene.target.incoming.attach(TransferId("unknown"), request)
    assert scene.target.incoming.num_kept == 0
    scene.run_until(lambda: scene.stream.over)
    assert scene.stream.tokens == expected_tokens(PROMPT, MAX_TOKENS)[0]
