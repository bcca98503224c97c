"""Stops a migration at single moments and tests what each worker holds then and what it frees."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from decode_worker.migrate.outgoing import CopyPhase
from decode_worker.request import DecodeRequest
from engine.step.sequence import Sequence
from kv_transfer.session.transfer_session import Manifest
from penstock.errors import Cancelled, DeadlineExceeded, InvalidInput, PenstockError, TransferRefused
from penstock.kv.page_hash import hash_pages
from penstock.types import Epoch, PageId, RequestId, SamplingParams, TransferId, TransferKey
from penstock.v1 import worker_pb2
from tests.support.decode.migration_world import Node, World
from tests.support.engine.fake_engine import CONTEXT, expected_tokens

PROMPT = list(range(10, 28))
MAX_TOKENS = 40


class Scene:
    """Runs one stream that migrates from `source` to `target`, up to the moment that a test chooses."""

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

    def num_held(self, node: Node) -> int:
        return node.engine.pool.num_pages - node.engine.pool.num_available


@pytest.fixture(params=range(5))
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(request.param)


def test_pages_of_unfinished_writes_outlive_their_sequence(scene: Scene) -> None:
    scene.run_until(lambda: scene.migration.phase is CopyPhase.PAUSED or scene.stream.over)
    assert not scene.stream.over
    assert scene.stream.request is not None
    scene.source.worker.cancel(scene.stream.request)
    scene.stream.cancelled = True
    assert scene.num_held(scene.source) == len(scene.migration.shared) > 0
    scene.run_until(lambda: not scene.source.wire.links)
    assert scene.num_held(scene.source) == 0
    scene.run_until(lambda: not scene.world.busy())
    assert (scene.num_held(scene.target), scene.target.incoming.num_kept) == (0, 0)


def test_a_target_frees_a_sequence_as_soon_as_its_source_resumes_it(scene: Scene) -> None:
    scene.run_until(lambda: scene.target.incoming.num_kept == 1)
    scene.source.outgoing.on_failed(scene.key, DeadlineExceeded("no answer"))
    scene.run_until(lambda: not scene.world.network.calls and not scene.target.steps.is_busy)
    assert (scene.num_held(scene.target), scene.target.incoming.num_kept) == (0, 0)
    scene.run_until(lambda: scene.stream.over)
    assert scene.stream.tokens == expected_tokens(PROMPT, MAX_TOKENS)[0]
    assert scene.stream.node is scene.source


def test_a_ticket_for_other_tokens_is_refused(scene: Scene) -> None:
    scene.run_until(lambda: scene.target.incoming.num_kept == 1)
    sequence = Sequence(RequestId("r"), PROMPT, len(PROMPT), SamplingParams(max_tokens=1), b"salt")
    request = DecodeRequest(0, sequence, scene.source, deque(), deadline_s=1e6)
    assert not scene.target.incoming.attach(TransferId(scene.key.transfer_id), request)
    assert not scene.target.incoming.attach(TransferId("unknown"), request)
    assert scene.target.incoming.num_kept == 0
    scene.run_until(lambda: scene.stream.over)
    assert scene.stream.tokens == expected_tokens(PROMPT, MAX_TOKENS)[0]


class LyingSource:
    """Records what the target answers to a source whose state is inconsistent."""

    def __init__(self) -> None:
        self.error: PenstockError | None = None
        self.num_held: int | None = None

    def destination(self, num_pages_held: int, pages: list[PageId]) -> None:
        self.num_held = num_pages_held

    def landed(self, num_pages: int) -> None: ...

    def accepted(self) -> None: ...

    def refused(self, error: PenstockError) -> None:
        self.error = error

    def heartbeat(self) -> None: ...


@pytest.mark.parametrize(
    ("window", "num_tokens", "num_dropped_tokens", "kind", "why"),
    [
        (None, 40, 4, InvalidInput, "num_dropped_tokens: is 4, but later tokens read some of them"),
        (9, 40, 2**32 - 1, InvalidInput, "num_dropped_tokens: is 4294967295, but later tokens read some of them"),
        (9, 40, 28, InvalidInput, "num_dropped_tokens: is 28, but later tokens read some of them"),
        (9, 40, 22, TransferRefused, "dropped the first 22 tokens, which end inside a page of 4 tokens here"),
        (9, 1, 24, InvalidInput, "num_tokens: is 1; give at least the sequence's own 33"),
        (None, 0, 0, InvalidInput, "num_tokens: is 0; give at least the sequence's own 33"),
    ],
)
def test_a_source_with_inconsistent_token_counts_is_refused_by_field(
    window: int | None, num_tokens: int, num_dropped_tokens: int, kind: type[PenstockError], why: str
) -> None:
    world = World(0)
    world.window, world.alternates = window, False
    node = world.start_node(7)
    while node.page_size != 4:
        node = world.start_node(7)
    state = worker_pb2.SequenceState(request_id="r", token_ids=range(33), num_prompt_tokens=20, timeout_ms=1_000_000)
    state.sampling.max_tokens = 40
    start = worker_pb2.MigrationStart(state=state, num_tokens=num_tokens, num_dropped_tokens=num_dropped_tokens)
    source = LyingSource()
    # Caches a prefix here, since a refused reservation might keep references to its pages.
    cached = node.engine.pool.allocate(4)
    node.engine.prefix_cache.insert(hash_pages(list(range(16)), 4, b""), cached)
    node.engine.pool.release(cached)
    node.incoming.on_start(TransferKey(TransferId("t"), Epoch(1), node.epoch), start, source)
    node.incoming.answer()
    assert source.num_held is None
    with pytest.raises(kind, match=why):
        raise source.error or AssertionError("accepted")
    assert node.engine.pool.num_available == node.engine.pool.num_pages
    assert not node.transfers.num_open


@pytest.mark.parametrize(
    ("token_ids", "why"),
    [([10**6], "token_ids: hold 1000000; the vocabulary ends at"), ([5] * CONTEXT, "token_ids: are [0-9]+, but this")],
)
def test_a_last_state_that_no_step_can_compute_is_refused_by_field(token_ids: list[int], why: str) -> None:
    """A token outside the model's vocabulary would end the step loop, and with it every other request."""
    node, source, key = World(0).start_node(7), LyingSource(), TransferKey(TransferId("t"), Epoch(1), Epoch(7))
    state = worker_pb2.SequenceState(request_id="r", token_ids=range(9), num_prompt_tokens=8, timeout_ms=1_000_000)
    state.sampling.max_tokens = 40
    node.incoming.on_start(key, worker_pb2.MigrationStart(state=state, num_tokens=12), source)
    node.incoming.answer()
    assert source.num_held == 0
    last = worker_pb2.SequenceState(request_id="r", num_known=9, token_ids=token_ids, timeout_ms=1_000_000)
    node.incoming.on_finish(key, last, Manifest(8 + len(token_ids), 1, ()), 0.0)
    with pytest.raises(InvalidInput, match=why):
        raise source.error or AssertionError("accepted")
    node.incoming.on_closed(key, Cancelled("refused"))
    for then in node.receiver.settling:
        then()
    assert node.engine.pool.num_available == node.engine.pool.num_pages
