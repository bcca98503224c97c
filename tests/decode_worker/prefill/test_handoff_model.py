"""Runs prefill and decode cores against each other under random orders of events, with network faults and dying
workers.

The two real cores, with pages of one size or of two, run in one thread (handoff_world.py). A random seed picks each
next event: a step, a message, a write, the passing of time, a cancellation, a broken call, a killed prefill worker, or
either worker frozen for longer than any lease. The fake engine fails on any page that holds another sequence's KV.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from engine.step.sequence import Sequence
from penstock import wire
from penstock.config import PrefillConfig, TransferConfig
from penstock.types import Epoch, Lane, PageId, RequestId, SamplingParams, TransferId, TransferKey
from prefill_worker.job import Closed, PrefillJob, PrefillOutcome
from prefill_worker.worker import PrefillWorker
from tests.support.decode.handoff_world import LEASE_S, World
from tests.support.engine.fake_engine import CONTEXT, FakeEngine, expected_tokens
from tests.support.suite.examples import examples


@examples(75)
@given(seed=st.integers(0, 2**32), faults=st.booleans())
def test_every_stream_is_exact_and_every_page_is_freed(seed: int, faults: bool) -> None:
    world = World(seed)
    rng = world.rng
    prompts: dict[int, tuple[list[int], int]] = {}
    for stream_id in range(rng.randint(1, 12)):
        stem = rng.randint(0, 3)  # few prompts, so that prefixes repeat
        base = [stem * 40 + i for i in range(rng.randint(1, 30))]
        prompts[stream_id] = (base, rng.randint(1, 8))
        world.submit(stream_id, base, SamplingParams(max_tokens=prompts[stream_id][1]))
        for _ in range(rng.randint(0, 25)):
            rng.choice(world.actions())()
            world.check()
        if faults and rng.random() < 0.3:
            world.kill_prefill_worker()
        if faults and rng.random() < 0.3:
            world.freeze(rng.choice([world.decode, world.prefill, None]))
        if faults and rng.random() < 0.2:
            world.receiver.num_forgotten += 1
        if faults and world.to_decode and rng.random() < 0.3:
            world.break_call(rng.choice(list(world.to_decode)))
        if rng.random() < 0.3:
            victim = rng.choice(list(world.requests))
            if world.requests[victim] is not None:
                world.decode.cancel(world.requests[victim])
                world.requests[victim] = None  # type: ignore[assignment]
        world.check()
    world.settle()
    world.check()
    for stream_id, (prompt, max_tokens) in prompts.items():
        wanted, reason = expected_tokens(prompt, max_tokens)
        if world.requests[stream_id] is None:
            got = world.tokens(stream_id)
            assert got == wanted[: len(got)]
        else:
            assert world.tokens(stream_id) == wanted
            assert world.received[stream_id][-1].finish_reason is reason
    for engine in (world.decode_engine, world.prefill_engine):
        assert engine.pool.num_available == engine.pool.num_pages


def test_chunks_leave_room_for_a_sequence_whose_pages_are_on_their_way() -> None:
    world = World(0, placement="remote", itl_target_s=0.05)
    world.decode._pace.on_step(8, 8, 100.0, 0.03)
    world.decode._pace.on_step(9, 208, 100.0, 0.08)
    assert world.decode._limits()[0] is None  # nothing decodes or will soon
    world.submit(0, [1, 2, 3], SamplingParams(max_tokens=4), Lane.STANDARD)
    request = world.requests[0]
    most = world.decode._limits()[0]
    assert most is not None
    assert most > 16
    while not world.decode.scheduler.is_running(request.sequence):
        world.decode.serve_during_step()  # reserves pages, but begins no step
        world.rng.choice([action for action in world.actions() if action != world.steps.turn])()
    request.times.first_token_s -= 1.0
    assert world.decode._limits()[0] == 16  # the fewest
    while world.decode.scheduler.is_at_rest(request.sequence):
        world.steps.turn()
    assert (world.decode._limits()[0] or 0) > 16
    world.settle()


def test_a_sender_forgotten_before_its_reservation_loses_no_token_and_no_page() -> None:
    for seed in range(20):
        world = World(seed)
        prompt = list(range(20))
        world.receiver.num_forgotten = 1
        world.submit(0, prompt, SamplingParams(max_tokens=5))
        world.settle()
        world.check()
        assert world.receiver.num_forgotten == 0
        assert world.tokens(0) == expected_tokens(prompt, 5)[0]
        assert world.decode_engine.pool.num_available == world.decode_engine.pool.num_pages


@examples(40)
@given(seed=st.integers(0, 2**32), num_before=st.integers(0, 40))
def test_a_frozen_prefill_worker_loses_its_lease_but_its_fences_stay(seed: int, num_before: int) -> None:
    """No other event comes: the decode worker's sweep notices the lost lease, and the request completes."""
    world = World(seed)
    prompt = list(range(20))
    world.submit(0, prompt, SamplingParams(max_tokens=5))
    for _ in range(num_before):
        world.rng.choice(world.actions())()
    world.freeze(world.prefill)
    fenced = world.decode_engine.pool.num_fenced
    for queue in world.to_decode.values():
        queue.clear()  # none of its messages stays in flight
    for link in world.sender.links.values():
        link.writes = deque(list(link.writes)[:1])
    for _ in range(60):
        world.pass_time(LEASE_S / 4)
        world.steps.whole()
        world.check()
    pool = world.decode_engine.pool
    assert pool.num_fenced >= fenced, "time alone lifted a fence"
    lacks_slots = pool.parts is not None and pool.parts.num_available < pool.parts.window.max_pages(25, 8)
    assert world.is_over(0) or pool.num_available * world.decode_size < 25 or lacks_slots, (
        "the pages outside the fences suffice for it"
    )
    world.kill_prefill_worker()
    world.settle()
    assert world.tokens(0) == expected_tokens(prompt, 5)[0]
    assert world.decode_engine.pool.num_available == world.decode_engine.pool.num_pages


@examples(40)
@given(seed=st.integers(0, 2**32), num_before=st.integers(0, 40))
def test_a_prefill_worker_frees_its_pages_when_the_decode_worker_freezes(seed: int, num_before: int) -> None:
    """The prefill worker frees its pages whether or not it is idle; the decode worker later finds its transfers
    ended."""
    world = World(seed)
    for stream_id in range(3):
        world.submit(stream_id, list(range(100 * stream_id, 100 * stream_id + 20)), SamplingParams(max_tokens=5))
    for _ in range(num_before):
        world.rng.choice(world.actions())()
    world.freeze(world.decode)
    while any(world.to_prefill.values()):
        world.deliver(world.to_prefill)  # delivers what it sent before it froze
    for _ in range(8):
        world.pass_time(LEASE_S / 4)
        world.prefill.step()
    for _ in range(200):
        if any(link.writes for link in world.sender.links.values()):
            world.complete_write()
        elif world.sender.links:
            world.end_sender()
    assert not world.sender.links
    assert world.prefill_engine.pool.num_available == world.prefill_engine.pool.num_pages
    world.settle()
    world.check()
    for stream_id in range(3):
        prompt = list(range(100 * stream_id, 100 * stream_id + 20))
        assert world.tokens(stream_id) == expected_tokens(prompt, 5)[0]


def test_queue_time_ends_with_the_first_step_of_a_landed_sequence() -> None:
    num_landed = 0
    for seed in range(40):
        world = World(seed)
        world.submit(0, list(range(40, 52)), SamplingParams(max_tokens=6))
        request = world.requests[0]
        while not request.times.landed_s and request in world.decode.requests:
            world.rng.choice(world.actions())()
        world.settle()
        times = request.times
        if times.landed_s and times.part is None:
            num_landed += 1
            assert times.started_s >= times.landed_s
            after_landing_s = times.started_s - max(times.landed_s, times.first_token_s)
            assert times.decode_queue_s == max(0.0, times.reserved_s - times.first_token_s) + after_landing_s
    assert num_landed


def test_the_wait_for_a_place_is_queueing_and_no_part_of_the_transfer() -> None:
    num_waited = 0
    for seed in range(10):
        world = World(seed)
        for stream_id in range(8):  # the batch takes four
            world.submit(stream_id, list(range(100 * stream_id, 100 * stream_id + 8)), SamplingParams(max_tokens=12))
        world.settle()
        for request in world.requests.values():
            times = request.times
            if times.landed_s and times.part is None and times.reserved_s > times.first_token_s:
                num_waited += 1
                assert times.exposed_s == max(0.0, times.landed_s - times.reserved_s)
                assert times.decode_queue_s >= times.reserved_s - times.first_token_s
    assert num_waited


def test_a_transfer_key_survives_its_wire_format() -> None:
    key = TransferKey("t", Epoch(2**63), Epoch(5))  # type: ignore[arg-type]
    assert wire.transfer_key_from_wire(wire.transfer_key_to_wire(key)) == key


class QuietSender:
    """Stands in for `kv_transfer.endpoints.KvSender`: sends nothing, to a receiver with pages of `page_size` tokens."""

    def __init__(self, page_size: int = 4) -> None:
        self._page_size = page_size

    def open(self, key: TransferKey, offer: bytes, lane: object) -> object:
        return SimpleNamespace(target=SimpleNamespace(page_size=self._page_size))

    def abort(self, key: TransferKey) -> None: ...


def test_a_destination_that_was_not_requested_is_refused_by_field() -> None:
    """The first page may be one that the prompt turns out not to need when it starts."""
    engine = FakeEngine(40, 4)
    config = SimpleNamespace(transfer=TransferConfig(checksums=False), prefill=PrefillConfig(max_batch_tokens=64))
    worker = PrefillWorker(cast(Any, engine), cast(Any, QuietSender()), cast(Any, config), CONTEXT)
    key = TransferKey(TransferId("t"), Epoch(1), Epoch(2))
    sequence = Sequence(RequestId("r"), list(range(12)), 12, SamplingParams(max_tokens=1), b"salt")
    outcomes: list[PrefillOutcome] = []
    worker.submit(PrefillJob(key, sequence, outcomes.append, 0.0), b"")
    worker.set_destination(key, 0, [PageId(page) for page in range(3)])
    worker.on_sent(key)
    [closed] = outcomes
    assert isinstance(closed, Closed)
    assert "destination: came before it was requested; send it after `reserve`" in str(closed.error)
    assert not worker.step()


def test_a_prompt_that_a_receivers_page_size_makes_too_large_is_refused_by_field() -> None:
    """Without the refusal it would hold its pages for ever, and no later prompt would start."""
    engine = FakeEngine(10, 4, window=9)
    config = SimpleNamespace(transfer=TransferConfig(checksums=False), prefill=PrefillConfig(max_batch_tokens=8))
    worker = PrefillWorker(cast(Any, engine), cast(Any, QuietSender(64)), cast(Any, config), CONTEXT)
    key = TransferKey(TransferId("t"), Epoch(1), Epoch(2))
    sequence = Sequence(RequestId("r"), list(range(60)), 60, SamplingParams(max_tokens=1), b"salt")
    outcomes: list[PrefillOutcome] = []
    worker.submit(PrefillJob(key, sequence, outcomes.append, 0.0), b"")
    for _ in range(20):
        worker.step()
    worker.on_sent(key)
    closed = outcomes[-1]
    assert isinstance(closed, Closed)
    assert "token_ids: need 15 pages here for a receiver whose pages hold 64 tokens, and this worker has 10" in str(
        closed.error
    )
    assert engine.pool.num_available == 10


def test_prompts_that_share_pages_can_all_end_while_a_step_computes_them() -> None:
    engine = FakeEngine(40, 4)
    engine.runs_ahead = True
    config = SimpleNamespace(transfer=TransferConfig(checksums=False), prefill=PrefillConfig(max_batch_tokens=64))
    worker = PrefillWorker(cast(Any, engine), cast(Any, QuietSender()), cast(Any, config), CONTEXT)

    def submit(number: int) -> TransferKey:
        key = TransferKey(TransferId(str(number)), Epoch(1), Epoch(2))
        sequence = Sequence(RequestId(str(number)), list(range(12)), 12, SamplingParams(max_tokens=1), b"salt")
        worker.submit(PrefillJob(key, sequence, lambda outcome: None, 0.0), b"")
        return key

    def end(key: TransferKey) -> None:
        worker.cancel(key)
        worker.on_sent(key)

    first = submit(1)
    worker.step()
    worker.step()
    end(first)
    others = [submit(2), submit(3)]  # both start with the first prompt's pages
    worker.step()
    for key in others:
        end(key)
    assert engine.pool.num_available < 40, "the step may still write them"
    worker.step()
    assert engine.pool.num_available == 40
    engine.pool.check_integrity()
