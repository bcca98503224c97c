"""Tests steps in flight: sequences get exactly their tokens, and no page that a step writes is reused meanwhile."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.delivery.router_stream import encode_plain
from decode_worker.schedule.bulk_policy import BulkLimits
from decode_worker.schedule.scheduler import DecodeScheduler
from decode_worker.schedule.step_driver import StepDriver
from engine.cache.prefix_cache import PrefixCache
from engine.sampling.counter_random import uniform, uniforms
from engine.sampling.row_params import SamplingRows
from engine.sampling.sampler import sample, sample_rows
from engine.step.batch import build_host_batch
from engine.step.compute import StepTokens
from engine.step.plan import EndConditions, StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence
from engine.step.speculation.proposal import Proposal, ProposalKind
from engine.step.speculation.speculator import Speculator
from engine.step.thread import StepThread
from penstock.config import DecodeConfig
from penstock.errors import InternalError
from penstock.types import Grammar, GrammarKind, Lane, PageId, RequestId, Role, SamplingParams
from penstock.v1 import worker_pb2
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.serving import GREEDY, SALT, caller, wait_until_empty, worker_config, workers
from tests.support.suite.examples import examples

PAGE_SIZE = 4
EOS = 0
_SOME = st.sampled_from([None, 1, 2, 5])
_BULK = st.builds(BulkLimits, st.integers(0, 2), _SOME, _SOME)


def next_token(token_ids: list[int]) -> int:
    """Returns a token that depends on the preceding tokens alone, as a model's does; sometimes it ends the sequence."""
    return (sum(token_ids) * 31 + len(token_ids)) % 23


class Machine:
    """Runs a scheduler and stands in for the device, which computes one or two steps at a time."""

    def __init__(self, num_pages: int, speculator: Speculator | None = None) -> None:
        cache = PrefixCache(num_pages, PAGE_SIZE)
        self.pool = cache.pool
        self._allocate, self.pool.allocate = self.pool.allocate, self.allocate  # type: ignore[method-assign]
        config = DecodeConfig(max_batch_sequences=4, max_batch_tokens=8, watermark=0.0)
        self.scheduler = DecodeScheduler(
            self.pool, cache, PAGE_SIZE, config, RowTable(PAGE_SIZE, EndConditions({EOS}, 60)), speculator
        )
        self.in_flight: deque[tuple[StepPlan, list[int | None], set[PageId]]] = deque()
        self.num_accepted = 0  # proposed tokens that were accepted
        # How many tokens follow a sampled one without sampling, as a grammar forces them.
        self.num_forced: Callable[[], int] = lambda: 0
        self.kv: dict[tuple[PageId, int], int] = {}  # the token whose KV lies in this place
        self.live: list[Sequence] = []
        self.landing: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.ended: list[Sequence] = []

    def allocate(self, num_pages: int) -> list[PageId]:
        pages = self._allocate(num_pages)
        for _, _, written in self.in_flight:
            assert not written & set(pages), "a step in flight may still write it"
        return pages

    def launch(self, plan: StepPlan | None) -> None:
        """Computes the step at once, from what a device has: the columns of rows and the tokens that rows await."""
        if not plan:
            return
        tokens: list[int | None] = []
        written: set[PageId] = set()
        rows = plan.rows
        awaited: dict[int, int] = {}
        if rows.awaited_rows is not None and rows.awaited_places is not None:
            awaited.update(zip(rows.awaited_rows.tolist(), rows.awaited_places.tolist(), strict=True))
        for place, item in enumerate(rows.items):
            known = item.sequence.token_ids
            if place in awaited:
                before, sampled, _ = self.in_flight[-1]
                assert before[awaited[place]].sequence is item.sequence
                token = sampled[awaited[place]]
                assert token is not None
                known = [*known, token]
            else:
                assert rows.token_ids_R[place] == known[-1]
            position = int(rows.positions_R[place])
            assert position == len(known) - 1
            written.add(PageId(int(plan.rows.pages_RW[place, position // PAGE_SIZE])))
            self.compute(plan.rows.pages_RW[place].tolist(), known, position)
            tokens.append(next_token(known))
        for chunk in plan.chunks:
            sequence, start = chunk.sequence, chunk.start
            written |= set(sequence.pages[start // PAGE_SIZE : -(-(start + chunk.num_positions) // PAGE_SIZE)])
            self.compute(sequence.pages, [*sequence.token_ids[: start + chunk.num_tokens], *chunk.proposed], start)
            tokens.append(next_token(sequence.token_ids) if chunk.is_sampled else None)
        self.in_flight.append((plan, tokens, written))

    def compute(self, pages: list[PageId], token_ids: list[int], start: int) -> None:
        """Writes KV from `start` on, and reads all KV of the sequence."""
        slots = [(pages[place // PAGE_SIZE], place % PAGE_SIZE) for place in range(len(token_ids))]
        self.kv.update(zip(slots[start:], token_ids[start:], strict=True))
        assert [self.kv.get(slot) for slot in slots] == token_ids, "KV that is missing or of another sequence"

    def record(self) -> None:
        plan, tokens, _ = self.in_flight.popleft()
        sampled = np.array(tokens[: len(plan.rows)], np.int64)
        discarded = self.scheduler.record(plan, sampled, tokens[len(plan.rows) :])
        over = {plan.rows.items[place].sequence for place in plan.rows.may_end(sampled, {EOS}).nonzero()[0]}
        for item, token in zip(plan, tokens, strict=True):
            if token is None or item.sequence in discarded:
                continue
            is_over = token == EOS or len(item.sequence.token_ids) >= self.end(item.sequence)
            assert not is_over or item.sequence in over or item in plan.chunks
            if is_over:
                self.retire(item.sequence)
            else:
                self.append_accepted(item)
                self.append_forced(item.sequence)

    def append_forced(self, sequence: Sequence) -> None:
        """Appends tokens that no step samples, whether or not a step in flight computes the sequence."""
        forced: list[int] = []
        for _ in range(self.num_forced() if sequence in self.live and sequence not in self.paused else 0):
            forced.append(next_token([*sequence.token_ids, *forced]))
            if forced[-1] == EOS or len(sequence.token_ids) + len(forced) >= self.end(sequence):
                sequence.append_uncomputed(forced)
                self.retire(sequence)
                return
        self.scheduler.extend(sequence, forced)

    def append_accepted(self, item: ScheduledSequence) -> None:
        sequence = item.sequence
        for proposed in item.proposed:
            if proposed != sequence.token_ids[-1]:
                return
            self.num_accepted += 1
            self.scheduler.append_verified(sequence, next_token(sequence.token_ids))
            if sequence.token_ids[-1] == EOS or len(sequence.token_ids) >= self.end(sequence):
                self.retire(sequence)
                return

    def end(self, sequence: Sequence) -> int:
        return min(60, sequence.num_prompt_tokens + sequence.sampling.max_tokens)

    def retire(self, sequence: Sequence) -> None:
        self.scheduler.forget(sequence)
        for where in (self.live, self.landing, self.paused):
            if sequence in where:
                where.remove(sequence)
        self.ended.append(sequence)

    def check(self) -> None:
        self.pool.check_integrity()
        if not self.in_flight:
            self.scheduler.check_integrity()
        for sequence in (*self.live, *self.ended):
            tokens = sequence.token_ids
            for length in range(sequence.num_prompt_tokens, len(tokens)):
                assert tokens[length] == next_token(tokens[:length]), f"{sequence.request_id}: wrong at {length}"


class FlawedProposer:
    """Proposes the tokens that really follow, each wrong with probability `wrong`."""

    def __init__(self, seed: int, wrong: float, least: int = 0) -> None:
        self._random = random.Random(seed)
        self._wrong = wrong
        self._least = least

    def propose(self, counts: Mapping[Sequence, int]) -> Mapping[Sequence, Proposal]:
        return {sequence: self._propose(sequence.token_ids, count) for sequence, count in counts.items()}

    def _propose(self, token_ids: list[int], count: int) -> Proposal:
        text = list(token_ids)
        for _ in range(self._random.randint(min(self._least, count), count)):
            right = next_token(text)
            text.append((right + 1) % 23 if self._random.random() < self._wrong else right)
        return Proposal(tuple(text[len(token_ids) :]), ProposalKind.LONG_MATCH)

    def forget(self, sequence: Sequence) -> None: ...


def speculator_of(seed: int, wrong: float, least: int = 0) -> Speculator:
    return Speculator(5, lambda: 0.0, always=True, lookups=FlawedProposer(seed, wrong, least))


def runs_on(prompt: list[int], count: int) -> bool:
    """Returns whether at least `count` tokens follow the prompt before one ends the sequence."""
    text = list(prompt)
    while len(text) < len(prompt) + count and text[-1] != EOS:
        text.append(next_token(text))
    return text[-1] != EOS


@examples(75)
@given(
    data=st.data(),
    num_pages=st.integers(8, 30),
    wrong=st.sampled_from([None, 0.0, 0.3, 1.0]),
    forces=st.booleans(),
)
def test_every_history_gives_exact_tokens_and_overwrites_no_page(
    data: st.DataObject, num_pages: int, wrong: float | None, forces: bool
) -> None:
    machine = Machine(num_pages, None if wrong is None else speculator_of(num_pages, wrong))
    if forces and wrong is None:  # a sequence with a grammar gets no proposals
        machine.num_forced = lambda: data.draw(st.sampled_from([0, 0, 1, 2, 5]))
    scheduler = machine.scheduler
    actions = ["local", "remote", "land", "cancel", "pause", "resume", "record", "record", *["step", "ahead"] * 3]
    for number in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(actions))
        if action in ("local", "remote") and len(machine.live) < 6:
            length = data.draw(st.integers(1, 16))
            tokens = [(number % 3 + i) % 20 + 1 for i in range(length)]  # prefixes repeat
            sampling = SamplingParams(max_tokens=data.draw(st.integers(1, 12)))
            lane = data.draw(st.sampled_from([Lane.STANDARD, Lane.BULK]))
            sequence = Sequence(RequestId(str(number)), tokens, length, sampling, SALT, lane=lane)
            scheduler.track(sequence)
            machine.live.append(sequence)
            if action == "remote" and (granted := scheduler.reserve(sequence, length)):
                sequence.pages = [*granted.held, *granted.fresh]
                machine.landing.append(sequence)
            else:
                scheduler.compute_here(sequence)
        elif action == "land" and machine.landing:
            sequence = machine.landing.pop(data.draw(st.integers(0, len(machine.landing) - 1)))
            machine.compute(sequence.pages, sequence.token_ids, 0)
            sequence.token_ids.append(next_token(sequence.token_ids))
            scheduler.join(sequence, sequence.num_prompt_tokens)
            if sequence.sampling.max_tokens == 1 or sequence.token_ids[-1] == EOS:
                machine.retire(sequence)
        elif action == "cancel" and machine.live:
            machine.retire(machine.live[data.draw(st.integers(0, len(machine.live) - 1))])
        elif action == "pause":
            running = [sequence for sequence in machine.live if scheduler.is_running(sequence)]
            if running:
                machine.paused.append(data.draw(st.sampled_from(running)))
                scheduler.pause(machine.paused[-1])
        elif action == "resume" and machine.paused:
            scheduler.resume(machine.paused.pop())
        elif action == "record" and machine.in_flight:
            machine.record()
        elif action == "step" and not machine.in_flight:
            machine.launch(scheduler.schedule(None, data.draw(_BULK)))
        elif action == "ahead":
            machine.launch(scheduler.schedule_ahead(None, data.draw(_BULK)))
        machine.check()
    while machine.in_flight:
        machine.record()
    for sequence in list(machine.live):
        machine.retire(sequence)
    machine.check()
    assert machine.pool.num_available == machine.pool.num_pages


@pytest.mark.parametrize(("wrong", "num_steps"), [(0.0, 1 + 7), (1.0, 1 + 40)])
def test_accepted_proposals_save_steps_and_rejected_ones_add_none(wrong: float, num_steps: int) -> None:
    machine = Machine(60, speculator_of(1, wrong, least=5))
    tokens = next(prompt for prompt in ([number] * 3 for number in range(1, 200)) if runs_on(prompt, 41))
    sequence = Sequence(RequestId("0"), tokens, 3, SamplingParams(max_tokens=41), SALT)
    machine.scheduler.track(sequence)
    machine.scheduler.compute_here(sequence)
    machine.live.append(sequence)
    num_taken = 0
    while machine.live:
        machine.launch(machine.scheduler.schedule())
        machine.record()
        machine.check()
        num_taken += 1
    assert (num_taken, sequence.num_output_tokens) == (num_steps, 41)


def test_a_failed_step_cancels_the_one_scheduled_ahead() -> None:
    machine = Machine(40)
    scheduler = machine.scheduler
    for number in range(3):
        sequence = Sequence(RequestId(str(number)), [number + 1] * 3, 3, SamplingParams(max_tokens=50), SALT)
        scheduler.track(sequence)
        scheduler.compute_here(sequence)
        machine.live.append(sequence)
    for _ in range(2):
        machine.launch(scheduler.schedule())
        machine.record()
    machine.launch(scheduler.schedule())
    machine.launch(scheduler.schedule_ahead())
    plan, tokens, _ = machine.in_flight.popleft()
    machine.in_flight.clear()
    scheduler.cancel_ahead()
    victim = plan[1].sequence
    machine.retire(victim)
    survivors = [(item, token) for item, token in zip(plan, tokens, strict=True) if item.sequence is not victim]
    scheduler.record_some([item for item, _ in survivors], [token for _, token in survivors])
    for _ in range(8):
        machine.check()
        machine.launch(scheduler.schedule())
        machine.record()
    assert {len(sequence.token_ids) for sequence in machine.live} <= {3 + 2 + 1 + 8}


def test_prompts_are_computed_ahead_beside_decoding_and_their_first_tokens_fed_back() -> None:
    machine = Machine(60)
    scheduler = machine.scheduler
    for number, length in enumerate((3, 21, 5)):
        sequence = Sequence(RequestId(str(number)), [number + 1] * length, length, SamplingParams(max_tokens=9), SALT)
        scheduler.track(sequence)
        scheduler.compute_here(sequence)
        machine.live.append(sequence)
    machine.launch(scheduler.schedule())
    steps = []
    while machine.live:
        machine.launch(scheduler.schedule_ahead())
        if len(machine.in_flight) > 1:
            plan = machine.in_flight[-1][0]
            steps.append((len(plan.rows), [chunk.num_tokens for chunk in plan.chunks]))
        machine.record()
        machine.check()
        if not machine.in_flight:
            machine.launch(scheduler.schedule())
    # The first prompt ends in the first step, beside 5 tokens of the second, and its row awaits its token at once. The
    # third is admitted when the second leaves room, and its first token is sampled in a run-ahead step.
    assert steps[:5] == [(1, [7]), (1, [7]), (1, [2, 5]), (3, []), (3, [])]
    assert {sequence.num_output_tokens for sequence in machine.ended} <= set(range(1, 10))
    assert all(sequence.token_ids[-1] == EOS or sequence.num_output_tokens == 9 for sequence in machine.ended)


def test_run_ahead_waits_for_proposals_and_for_their_verification() -> None:
    proposer = FlawedProposer(0, 0.0, least=2)
    found = dict[Sequence, Proposal]()
    propose, proposer.propose = proposer.propose, lambda counts: found  # type: ignore[method-assign]
    machine = Machine(60, Speculator(5, lambda: 0.0, always=True, lookups=proposer))
    scheduler = machine.scheduler
    prompt = next([number] * 5 for number in range(1, 23) if runs_on([number] * 5, 12))
    sequence = Sequence(RequestId("0"), prompt, len(prompt), SamplingParams(max_tokens=40), SALT)
    scheduler.track(sequence)
    scheduler.compute_here(sequence)
    machine.live.append(sequence)
    machine.launch(scheduler.schedule())
    machine.record()
    machine.launch(scheduler.schedule())
    machine.launch(scheduler.schedule_ahead())
    assert len(machine.in_flight) == 2, "there was nothing to propose"
    machine.record()
    proposer.propose = propose  # type: ignore[method-assign]
    assert scheduler.schedule_ahead() is None  # the next step verifies what follows the token in flight
    machine.record()
    machine.launch(scheduler.schedule())
    assert machine.in_flight[-1][0].speculates
    proposer.propose = lambda counts: found  # type: ignore[method-assign]
    assert scheduler.schedule_ahead() is None  # nobody knows yet how many tokens are accepted
    machine.record()
    assert machine.num_accepted >= 2
    machine.check()


def test_run_ahead_waits_for_a_first_token_that_depends_on_the_text() -> None:
    sampling = SamplingParams(max_tokens=9, allowed_token_ids=(3, 4), bad_sequences=((3, 4),))
    machine = Machine(60)
    scheduler = machine.scheduler
    for number, params in enumerate((SamplingParams(max_tokens=9), sampling)):
        sequence = Sequence(RequestId(str(number)), [number + 1] * 10, 10, params, SALT)
        scheduler.track(sequence)
        scheduler.compute_here(sequence)
        machine.live.append(sequence)
    machine.launch(scheduler.schedule())
    assert [chunk.num_tokens for chunk in machine.in_flight[-1][0].chunks] == [8]
    # It would admit the second prompt, which needs a step that follows no other.
    assert scheduler.schedule_ahead() is None
    machine.record()
    machine.launch(scheduler.schedule())
    assert [chunk.num_tokens for chunk in machine.in_flight[-1][0].chunks] == [2, 6]
    assert scheduler.schedule_ahead() is None  # it would sample the second prompt's first token
    machine.record()
    machine.launch(scheduler.schedule())
    assert [chunk.is_sampled for chunk in machine.in_flight[-1][0].chunks] == [True]
    machine.record()
    machine.launch(scheduler.schedule())
    assert len(machine.in_flight[-1][0].rows) == 2
    assert scheduler.schedule_ahead() is None  # it would sample the second prompt's next token
    machine.record()
    machine.check()


def test_forced_tokens_discard_what_a_run_ahead_step_samples() -> None:
    """A grammar forces tokens while the next step is in flight: they replace the token of that step."""
    machine = Machine(60)
    scheduler = machine.scheduler
    sampling = SamplingParams(max_tokens=20, grammar=Grammar(GrammarKind.REGEX, "a*"))
    sequence, other = (Sequence(RequestId(name), [5] * 10, 10, sampling, SALT) for name in ("forced", "other"))
    for each in (sequence, other):
        scheduler.track(each)
        scheduler.compute_here(each)
        machine.live.append(each)
    for _ in range(4):  # until both sequences decode
        machine.launch(scheduler.schedule())
        machine.record()
    machine.launch(scheduler.schedule())
    ahead = scheduler.schedule_ahead()
    assert ahead is not None
    machine.launch(ahead)
    machine.record()
    text, count = list(sequence.token_ids), other.num_output_tokens
    assert not scheduler.discarded(ahead)
    scheduler.extend(sequence, [8, 9])
    assert set(scheduler.discarded(ahead)) == {sequence}
    following = scheduler.schedule_ahead()
    assert following is not None
    assert [(chunk.sequence, chunk.num_tokens) for chunk in following.chunks] == [(sequence, 3)]
    machine.launch(following)
    machine.record()
    assert sequence.token_ids == [*text, 8, 9]
    assert other.num_output_tokens == count + 1
    machine.record()
    assert sequence.num_output_tokens == len(text) - 10 + 3
    scheduler.check_integrity()


rows_of = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=6)


@examples(40)
@given(lengths=rows_of, chunk=st.integers(0, 9), seed=st.integers(0, 99))
def test_columns_lay_out_the_same_batch_as_sequences(lengths: list[tuple[int, bool]], chunk: int, seed: int) -> None:
    """Rows that were removed in between make no difference."""
    rng = np.random.default_rng(seed)
    table = RowTable(PAGE_SIZE)
    for number, (length, stays) in enumerate(lengths):
        sequence = Sequence(RequestId(str(number)), rng.integers(0, 9, length).tolist(), 1, SamplingParams(9), SALT)
        sequence.pages = [PageId(int(page)) for page in rng.integers(0, 99, -(-length // PAGE_SIZE))]
        sequence.num_computed_tokens = length - 1
        table.add(sequence)
        if not stays:
            table.remove(sequence)
    other = Sequence(RequestId("chunk"), list(range(9)), 9, SamplingParams(9), SALT, [PageId(i) for i in range(3)])
    plan = StepPlan(table.launch(1), [ScheduledSequence(other, chunk)] if chunk else [])
    if not plan:
        return
    columns, one_by_one = build_host_batch(plan, PAGE_SIZE), build_host_batch(list(plan), PAGE_SIZE)
    assert one_by_one.edits_R is None  # only rows of a table have numbers
    for name in set(columns.__slots__) - {"edits_R"}:
        assert np.array_equal(getattr(columns, name), getattr(one_by_one, name)), name


@given(
    pairs=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**20)), min_size=1, max_size=9),
)
def test_vectorized_uniforms_equal_single_ones(pairs: list[tuple[int, int]]) -> None:
    seeds = np.array([seed for seed, _ in pairs], np.uint64)
    positions = np.array([position for _, position in pairs], np.int64)
    assert uniforms(seeds, positions).tolist() == [uniform(seed, position) for seed, position in pairs]


def test_columns_sample_what_sequences_sample() -> None:
    samplings = [
        SamplingParams(9, temperature=0.0),
        SamplingParams(9, seed=3),
        SamplingParams(9, seed=2**63 + 5, top_k=5, temperature=0.7),
        SamplingParams(9, seed=4, top_p=0.5, min_p=0.01),
        SamplingParams(9, top_k=1, seed=8),
    ]
    logits = torch.randn(len(samplings), 300, generator=torch.Generator().manual_seed(0)) * 3
    sequences = [Sequence(RequestId(str(i)), [1] * (i + 2), 1, params, SALT) for i, params in enumerate(samplings)]
    rows = [ScheduledSequence(sequence, 1) for sequence in sequences]
    wanted = [token.token_id for token in sample(logits, rows, ())]
    token_ids, valid = sample_rows(logits, SamplingRows.of(sequences))
    assert (token_ids.tolist(), valid.all().item()) == (wanted, True)
    logits[1] = float("nan")
    token_ids, valid = sample_rows(logits, SamplingRows.of(sequences))
    assert valid.tolist() == [True, False, True, True, True]
    assert [token for token, good in zip(token_ids.tolist(), valid, strict=True) if good] == [
        token for i, token in enumerate(wanted) if i != 1
    ]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=9))
def test_encoded_plain_tokens_read_like_messages(pairs: list[tuple[int, int]]) -> None:
    streams, tokens = [stream for stream, _ in pairs], [token for _, token in pairs]
    deltas = [worker_pb2.StepDelta(stream_id=stream, token_ids=[token]) for stream, token in pairs]
    encoded = encode_plain(np.array(streams, np.uint64), np.array(tokens, np.int64))
    assert worker_pb2.StepFrame.FromString(encoded) == worker_pb2.StepFrame(deltas=deltas)


class StepError(Exception):
    pass


def test_a_step_error_reaches_the_loop() -> None:
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    thread: StepThread[Tokens] = StepThread("test", calls.put, is_async=False)
    outcomes: list[object] = []
    thread.start(lambda before: Tokens([7]), outcomes.append, False)
    thread.start(lambda before: Tokens([*before.tokens, 8]) if before else Tokens([]), outcomes.append, True)
    thread.start(lambda before: fail(InternalError("no number")), outcomes.append, False)
    thread.start(lambda before: Tokens([9]), outcomes.append, True)  # it follows a failed step
    thread.start(lambda before: Tokens([10]), outcomes.append, False)
    thread.start(lambda before: fail(StepError()), outcomes.append, False)
    for _ in range(5):
        calls.get(timeout=60)()
    tokens = [outcome.chunks if isinstance(outcome, StepTokens) else str(outcome) for outcome in outcomes]
    assert tokens == [[7], [7, 8], "no number", "the step before it failed", [10]]
    with pytest.raises(StepError):
        calls.get(timeout=60)()
    assert thread.stop()


def test_a_failed_step_is_reported_after_the_step_that_the_device_still_computes() -> None:
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    thread: StepThread[Tokens] = StepThread("test", calls.put, is_async=True)
    outcomes: list[object] = []
    over, failed = threading.Event(), threading.Event()

    def fail_ahead(before: Tokens | None) -> Tokens:
        failed.set()
        raise InternalError("no number")

    thread.start(lambda before: Tokens([7], over), outcomes.append, False)
    thread.start(fail_ahead, outcomes.append, True)
    assert failed.wait(60)
    thread.drain()
    over.set()
    for _ in range(2):
        calls.get(timeout=60)()
    assert [outcome.chunks if isinstance(outcome, StepTokens) else str(outcome) for outcome in outcomes] == [
        [7],
        "no number",
    ]
    assert thread.stop()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_can_be_sampled_after_its_forward(is_async: bool) -> None:
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    thread: StepThread[Tokens] = StepThread("test", calls.put, is_async=is_async)
    outcomes: list[object] = []
    thread.start(lambda before: Tokens([7]), outcomes.append, False)
    step = thread.start_forward(lambda before: before, outcomes.append, lambda: None)
    calls.get(timeout=60)()
    assert outcomes.pop().chunks == [7]  # type: ignore[attr-defined]
    thread.start_sampling(step, lambda before: Tokens([*before.tokens, 8]) if before else Tokens([]), outcomes.append)
    thread.start(lambda before: Tokens([*before.tokens, 9]) if before else Tokens([]), outcomes.append, True)
    for tokens in ([7, 8], [7, 8, 9]):
        calls.get(timeout=60)()
        assert outcomes.pop().chunks == tokens  # type: ignore[attr-defined]
    assert thread.stop()


def test_a_step_whose_forward_failed_is_not_sampled() -> None:
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    thread: StepThread[Tokens] = StepThread("test", calls.put, is_async=False)
    outcomes: list[object] = []
    discarded: list[bool] = []
    thread.start(lambda before: Tokens([7]), outcomes.append, False)
    step = thread.start_forward(lambda before: fail(InternalError("no memory")), outcomes.append, lambda: None)
    thread.start_sampling(step, lambda before: fail(StepError()), outcomes.append)
    late = thread.start_forward(lambda before: before, outcomes.append, lambda: discarded.append(True))
    thread.start_sampling(late, lambda before: fail(StepError()), outcomes.append)
    thread.start(lambda before: Tokens([8]), outcomes.append, False)
    for _ in range(4):
        calls.get(timeout=60)()
    texts = [outcome.chunks if isinstance(outcome, StepTokens) else str(outcome) for outcome in outcomes]
    assert texts == [[7], "no memory", "the step before it failed", [8]]
    assert discarded == [True]
    assert thread.stop()


class Tokens:
    def __init__(self, tokens: list[int | None], over: threading.Event | None = None) -> None:
        self.tokens = tokens
        self._over = over

    def wait(self) -> StepTokens:
        assert self._over is None or self._over.wait(60)
        return StepTokens(np.array([], np.int64), self.tokens)


def fail(error: Exception) -> Tokens:
    raise error


@pytest.mark.parametrize("waits", [False, True])
async def test_run_ahead_changes_no_token(waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, seeded and penalized sequences run together, beside ends, cancellations and locally computed prompts."""
    model = make_checkpoint("llama", tmp_path / "llama")
    if waits:  # as on a GPU, one thread launches and another waits
        monkeypatch.setattr(
            "decode_worker.schedule.step_driver.StepThread",
            lambda name, post, is_async, device_thread: StepThread(name, post, True, device_thread),
        )
    kinds = [
        GREEDY,
        SamplingParams(max_tokens=40, temperature=0.75, top_p=0.875, top_k=50, seed=7, ignore_eos=True),
        SamplingParams(max_tokens=33, temperature=1.0, seed=9, stop_token_ids=tuple(range(3, 40))),
        SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=1.25, ignore_eos=True),
        SamplingParams(max_tokens=28, temperature=0.5, seed=1, logprobs=2, min_tokens=20),
        SamplingParams(max_tokens=31, temperature=0.5, seed=2, presence_penalty=0.5, logit_bias={7: 1.5, 8: -4.0}),
        SamplingParams(max_tokens=31, seed=3, frequency_penalty=0.5, bad_sequences=((5,), (6, 7), (9, 9, 9))),
    ]
    prompts = [[(7 * i + j) % (VOCAB_SIZE - 2) + 2 for j in range(3 + 11 * i)] for i in range(8)]
    answers = []
    num_ahead = num_chunks_ahead = num_special_ahead = 0
    counted = DecodeScheduler.schedule_ahead

    def count(scheduler: DecodeScheduler, max_chunk_tokens: int | None, bulk: BulkLimits) -> StepPlan | None:
        nonlocal num_ahead, num_chunks_ahead, num_special_ahead
        plan = counted(scheduler, max_chunk_tokens, bulk)
        num_ahead += plan is not None
        num_chunks_ahead += len(plan.chunks) if plan is not None else 0
        num_special_ahead += len(plan.rows.special()) if plan is not None else 0
        return plan

    monkeypatch.setattr(DecodeScheduler, "schedule_ahead", count)
    for ahead in (False, True):
        engine = {"dtype": "float32", "run_ahead": ahead, "num_pages": 40}
        steps = {"max_batch_tokens": 16, "max_batch_sequences": 16}  # makes prompts take several chunks
        async with workers(
            worker_config(Role.PREFILL, model, engine={"dtype": "float32", "run_ahead": ahead}),
            worker_config(Role.DECODE, model, engine=engine, decode=steps),
        ) as (prefill, decode):
            async with caller(decode) as router:
                received = []
                for only in (kinds[:2], kinds[:3], kinds):
                    streams = [
                        router.submit(prompt, only[i % len(only)], [prefill] if i % 3 else [])
                        for i, prompt in enumerate(prompts)
                    ]
                    gone = router.submit(prompts[2], kinds[1], [])
                    await asyncio.sleep(0)
                    router.cancel(gone)
                    received += [(await router.answer(stream)).token_ids for stream in streams]
                answers.append(received)
            await wait_until_empty(prefill, decode)
            assert isinstance(decode._driver, StepDriver)
        assert (num_ahead > 0) == ahead
        assert (num_chunks_ahead > 0) == ahead
        assert (num_special_ahead > 0) == ahead
    assert answers[0] == answers[1]


async def test_a_first_token_does_not_wait_for_the_step_in_flight(tmp_path: Path) -> None:
    """While a step is blocked, a request arrives, is computed remotely, and gets its first token."""
    model = make_checkpoint("llama", tmp_path / "llama")
    async with workers(worker_config(Role.PREFILL, model), worker_config(Role.DECODE, model)) as (prefill, decode):
        engine = decode.replica.engine
        compute, is_blocked, may_go_on = engine.compute, threading.Event(), threading.Event()

        def block(*arguments: object) -> object:
            is_blocked.set()
            assert may_go_on.wait(60)
            return compute(*arguments)  # type: ignore[arg-type]

        engine.compute = block
        async with caller(decode) as router:
            first = router.submit([5] * 20, replace(GREEDY, max_tokens=4), [prefill])
            assert len((await router.next_delta(first)).token_ids) == 1
            assert await asyncio.to_thread(is_blocked.wait, 60)
            second = router.submit([9] * 30, replace(GREEDY, max_tokens=4), [prefill])
            assert len((await router.next_delta(second)).token_ids) == 1
            gone = router.submit([8] * 30, GREEDY, [prefill])
            assert len((await router.next_delta(gone)).token_ids) == 1
            router.cancel(gone)
            assert decode.worker.scheduler.num_in_flight == 1
            may_go_on.set()
            for stream in (first, second):
                assert (await router.answer(stream)).error is None
        await wait_until_empty(prefill, decode)
