"""Tests where prompts are computed: the break-even points, the objective, and how wrong estimates are corrected.

`TrueCosts` stands in for the workers: the policy predicts, the true cost answers, and the policy learns.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.prefill.placement_policy import (
    PrefillDecision,
    PrefillPlace,
    PrefillPlacement,
    PricedPlace,
    PromptDemand,
    RemoteOption,
    describe_limits,
)
from decode_worker.prefill.remote_costs import RemoteTimes
from decode_worker.schedule.step_costs import StepWork
from penstock.config import DecodeConfig
from penstock.scheduling.chunk_costs import costs_of_chunks
from penstock.v1 import worker_pb2
from tests.support.suite.examples import examples

IDLE = PromptDemand(
    num_tokens=512,
    cached_tokens=0,
    queued_tokens=0,
    num_running=0,
    step_tokens=256,
    page_size=16,
    token_bytes=1e4,
)
FREE = RemoteOption("p", queue_s=0.0, prefill_s=512 * 5e-4)
LOCAL, REMOTE, SPLIT = PrefillPlace.LOCAL, PrefillPlace.REMOTE, PrefillPlace.SPLIT


class TrueCosts:
    """Gives the time that this worker's steps really take."""

    def __init__(self, token_s: float = 5e-4, row_s: float = 1e-4, fixed_s: float = 5e-3) -> None:
        self.token_s, self.row_s, self.fixed_s = token_s, row_s, fixed_s

    def step_s(self, chunk_tokens: int, num_rows: int) -> float:
        return self.fixed_s + chunk_tokens * self.token_s + num_rows * self.row_s

    def teach(self, policy: PrefillPlacement, num_steps: int = 200, seed: int = 0, noise: float = 0.0) -> None:
        rng = random.Random(seed)
        for _ in range(num_steps):
            chunk, rows = rng.choice([0, 16, 64, 256]), rng.randint(0, 30)
            if not (chunk or rows):
                continue
            elapsed_s = self.step_s(chunk, rows) * (1 + noise * rng.random())
            if rng.random() < noise / 10:
                elapsed_s *= 50  # another process held the core
            policy.steps.count_step(chunk)
            policy.steps.on_step(StepWork(chunk, chunk * 100.0, rows, rows * 200.0), elapsed_s)


def taught(config: DecodeConfig | None = None, **costs: float) -> PrefillPlacement:
    policy = PrefillPlacement(config or DecodeConfig())
    TrueCosts(**costs).teach(policy)
    return policy


def place(policy: PrefillPlacement, demand: PromptDemand, *options: RemoteOption) -> PrefillPlace:
    return policy.choose(demand, options, 0.0).chosen.place


@pytest.mark.parametrize(
    ("mode", "options", "wanted"),
    [
        ("local", (FREE,), LOCAL),
        ("local", (), LOCAL),
        ("remote", (FREE,), REMOTE),
        ("remote", (replace(FREE, queue_s=100.0),), REMOTE),
        ("remote", (), LOCAL),
        ("split", (FREE,), SPLIT),
        ("split", (), LOCAL),
        ("auto", (), LOCAL),
    ],
)
def test_a_configured_mode_overrides_the_costs(mode: Any, options: tuple[RemoteOption, ...], wanted: str) -> None:
    assert place(taught(DecodeConfig(placement=mode)), replace(IDLE, num_running=10), *options) is wanted


def test_an_idle_worker_computes_a_prompt_that_a_busy_one_gives_away() -> None:
    policy = taught()
    short = replace(IDLE, num_tokens=128)
    assert place(policy, short, replace(FREE, prefill_s=128 * 5e-4)) is LOCAL  # the hand-off takes longer than a step
    assert place(policy, replace(IDLE, num_running=20), FREE) is REMOTE
    assert place(policy, replace(IDLE, num_running=20), replace(FREE, queue_s=60.0)) is not REMOTE
    assert place(policy, replace(IDLE, queued_tokens=2000), FREE) is REMOTE
    assert place(policy, replace(IDLE, cached_tokens=508, num_running=4), FREE) is LOCAL
    assert place(policy, replace(IDLE, token_bytes=1e9, num_running=3), FREE) is LOCAL  # the transfer alone takes 512 s


def test_prompts_that_queue_at_both_workers_count_at_both() -> None:
    """Otherwise a worker keeps a prompt behind its own queue although a prefill worker would begin sooner."""
    here = replace(IDLE, queued_tokens=900)
    policy = taught()
    for _ in range(200):
        decided = place(policy, here, replace(FREE, queue_s=0.1))
    assert decided is REMOTE
    assert place(policy, here, replace(FREE, queue_s=2.0)) is not REMOTE


def test_must_be_remote_overrides_the_costs() -> None:
    assert taught().choose(IDLE, [FREE], 0.0, must_be_remote=True).chosen.place is REMOTE


def test_the_routers_first_candidate_is_preferred_over_a_faster_one() -> None:
    policy = taught()
    slower = replace(FREE, worker_id="slower", queue_s=0.1)
    chosen = policy.choose(replace(IDLE, num_running=20), [slower, FREE], 0.0).chosen
    assert (chosen.place, chosen.option) == (REMOTE, slower)


def test_a_split_shares_a_prompt_between_two_busy_workers() -> None:
    """The first half of the prompt delays nobody here, and prompts behind it at the prefill worker wait half as
    long."""
    policy = taught()
    crowded = replace(FREE, queue_s=1e-3, cached_tokens=256, prefill_s=256 * 5e-4)
    for _ in range(200):
        decision = policy.choose(replace(IDLE, num_tokens=512), [crowded], 0.0)
    assert decision.chosen.place is SPLIT
    assert decision.chosen.num_remote == 256
    assert {decision.chosen.place, *(other.place for other in decision.others)} == {LOCAL, REMOTE, SPLIT}


def test_the_ttft_target_takes_precedence_over_harm() -> None:
    busy, queued = replace(IDLE, num_running=20), replace(FREE, queue_s=1.5)
    assert place(taught(), busy, queued) is REMOTE
    assert place(taught(DecodeConfig(ttft_target_s=1.0)), busy, queued) is not REMOTE
    # If no place meets the target, the smallest total decides.
    assert place(taught(DecodeConfig(ttft_target_s=0.01)), busy, queued) is REMOTE


def test_a_delay_within_the_target_between_tokens_counts_less() -> None:
    """A step decodes 20 sequences in 7 ms; a chunk of 64 tokens makes it 39 ms."""
    busy = replace(IDLE, num_running=20, step_tokens=64)
    queued = replace(FREE, queue_s=2.0)
    assert place(taught(), busy, queued) is REMOTE
    assert place(taught(DecodeConfig(itl_target_s=0.05)), busy, queued) is LOCAL
    assert place(taught(DecodeConfig(itl_target_s=0.02)), busy, queued) is not LOCAL
    assert place(taught(DecodeConfig(itl_target_s=0.05)), busy, FREE) is REMOTE  # it begins at once and delays nobody


def test_prompts_over_the_limit_stay_local() -> None:
    policy = taught(DecodeConfig(max_local_tokens=100))
    assert place(policy, IDLE, FREE) is REMOTE
    assert place(policy, replace(IDLE, cached_tokens=448), FREE) is LOCAL
    for mode, limit in (("auto", None), ("remote", 0), ("local", 4096)):
        described = worker_pb2.WorkerDescription(context_length=4096)
        describe_limits(described, DecodeConfig(placement=mode))  # type: ignore[arg-type]
        assert (described.max_local_tokens if described.HasField("max_local_tokens") else None) == limit
        assert described.itl_target_s == 0.0
    describe_limits(described, DecodeConfig(itl_target_s=0.05))
    assert described.itl_target_s == 0.05


def test_a_worker_without_a_measured_chunk_assumes_the_speed_of_its_peers() -> None:
    for token_s in (1e-6, 1e-2):
        policy = PrefillPlacement(DecodeConfig())
        option = replace(FREE, prefill_s=512 * token_s)
        decision = policy.choose(replace(IDLE, num_running=5), [option], 0.0)
        by_place = {priced.place: priced for priced in (decision.chosen, *decision.others)}
        assert by_place[LOCAL].first_token_s == pytest.approx(512 * token_s, abs=0.02)


def test_steps_are_predicted_within_a_tenth_despite_outliers() -> None:
    for seed in range(5):
        truth, policy = TrueCosts(token_s=7e-4, row_s=3e-4, fixed_s=8e-3), PrefillPlacement(DecodeConfig())
        truth.teach(policy, 600, seed, noise=0.1)
        for tokens, rows in ((256, 0), (256, 20), (16, 10)):
            costs = costs_of_chunks(policy.steps.chunk_speed(rows, 256), tokens, 100, 0, rows > 0)
            half_a_step_s = truth.step_s(0, rows) / 2 if rows else 0.0
            assert costs.total_s == pytest.approx(truth.step_s(tokens, rows) + half_a_step_s, rel=0.2)
            assert costs.added_s == pytest.approx(tokens * truth.token_s, rel=0.2, abs=2e-3)


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_not_blamed_for_chunks_that_fill_every_step_up_to_a_target(seed: int) -> None:
    """A GPU hides the first chunk tokens behind reading its weights, and the more rows, the smaller the chunks."""
    rng, costs = random.Random(seed), PrefillPlacement(DecodeConfig()).steps

    def decode_s(rows: int) -> float:
        return 7e-3 + rows * 1e-4

    def step_s(tokens: int, rows: int) -> float:
        return decode_s(rows) + max(0.0, tokens * 3e-5 - 6e-3)

    for _ in range(400):
        rows = rng.randint(2, 8)
        tokens = rng.choice([0, 650 - 10 * rows, 700 - 10 * rows])
        work = StepWork(tokens, tokens * rng.uniform(0.0, 8000.0), rows, rows * 8000.0)
        if costs.count_step(tokens):
            costs.on_step(work, step_s(tokens, rows))
    for rows in (2, 8):
        assert costs.step_s(rows) == pytest.approx(decode_s(rows), rel=0.1)
        tokens = 650 - 10 * rows
        predicted_s = costs_of_chunks(costs.chunk_speed(rows, tokens), 12 * tokens, 0, 0, True).total_s
        assert predicted_s == pytest.approx(12.5 * step_s(tokens, rows), rel=0.15)


def test_measured_prefill_times_are_learned_and_fade() -> None:
    policy = taught()
    for _ in range(20):
        policy.remote.on_first_token("p", RemoteTimes(1.05, 0.0, 1.0, FREE.prefill_s, 512), now_s=100.0)
    busy = replace(IDLE, num_running=3)
    assert policy.remote.prefill_s("p", FREE.prefill_s, 512, 100.0) == pytest.approx(1.0, rel=0.1)
    assert policy.remote.hop_s("p") == pytest.approx(0.05, rel=0.3)
    assert policy.choose(busy, [FREE], 100.0).chosen.place is not REMOTE
    assert policy.remote.prefill_s("p", FREE.prefill_s, 512, 1000.0) == pytest.approx(FREE.prefill_s, rel=0.01)
    assert policy.remote.prefill_s("another", 0.5, 512, 100.0) == 0.5


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_prefill_that_the_router_has_learned_from_corrects_nothing(factor: float) -> None:
    remote, wrong_s = taught().remote, FREE.prefill_s * factor
    remote.on_first_token("p", RemoteTimes(wrong_s, 0.0, wrong_s, FREE.prefill_s, 512), now_s=0.0)
    assert remote.prefill_s("p", FREE.prefill_s, 512, 0.0) == pytest.approx(wrong_s, rel=0.2)
    assert remote.prefill_s("p", wrong_s, 512, 0.0) == pytest.approx(wrong_s, rel=0.2)
    assert remote.prefill_s("p", wrong_s * 10, 5120, 0.0) == pytest.approx(wrong_s * 10, rel=0.2)


@examples(100)
@given(data=st.data())
def test_a_choice_is_feasible_finite_and_never_costlier_than_another(data: st.DataObject) -> None:
    number = st.integers(0, 5000)
    seconds = st.floats(0, 1e3)
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    num_tokens = 1 + data.draw(number)
    demand = PromptDemand(
        num_tokens=num_tokens,
        cached_tokens=data.draw(st.integers(0, (num_tokens - 1) // page_size)) * page_size,
        queued_tokens=data.draw(number),
        num_running=data.draw(st.integers(0, 300)),
        step_tokens=data.draw(st.integers(1, 2048)),
        page_size=page_size,
        token_bytes=data.draw(st.floats(0, 1e7)),
    )
    mode = data.draw(st.sampled_from(["auto", "remote", "local", "split"]))
    target_s = data.draw(st.none() | st.floats(0.01, 10))
    itl_target_s = data.draw(st.none() | st.floats(1e-3, 1))
    policy = PrefillPlacement(DecodeConfig(placement=mode, ttft_target_s=target_s, itl_target_s=itl_target_s))
    for _ in range(data.draw(st.integers(0, 5))):
        work = StepWork(*(data.draw(st.integers(0, 500)) for _ in range(4)))
        policy.steps.count_step(work.chunk_tokens)
        policy.steps.on_step(work, data.draw(seconds))
        policy.remote.on_first_token(
            "0", RemoteTimes(*(data.draw(seconds) for _ in range(4)), 1 + data.draw(number)), data.draw(seconds)
        )
        policy.remote.on_landed("0", data.draw(number), data.draw(seconds))
    options = [
        RemoteOption(str(name), data.draw(seconds), data.draw(seconds), data.draw(number))
        for name in range(data.draw(st.integers(0, 3)))
    ]
    decision = policy.choose(demand, options, data.draw(seconds))
    check(decision, demand, options, target_s)


def check(decision: PrefillDecision, demand: PromptDemand, options: list[RemoteOption], target_s: float | None) -> None:
    places: list[PricedPlace] = [decision.chosen, *decision.others]
    assert len({place.place for place in places}) == len(places)

    def rank(place: PricedPlace) -> tuple[bool, float]:
        return target_s is not None and place.first_token_s > target_s, place.total_s

    assert all(rank(before) <= rank(after) for before, after in pairwise(places))
    for place in places:
        assert 0 <= place.first_token_s < 1e9
        assert 0 <= place.harm_s < 1e12
        assert (place.option is None) == (place.place is LOCAL)
        assert place.option is None or place.option in options
        if place.place is SPLIT:
            assert place.num_remote % demand.page_size == 0
            assert demand.cached_tokens < place.num_remote < demand.num_tokens
        if place.place is REMOTE:
            assert place.num_remote == demand.num_tokens
    if not options:
        assert decision.chosen.place is LOCAL


@pytest.mark.parametrize("remote_factor", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("num_running", [0, 8])
def test_placements_total_regret_stays_below_fifteen_percent(remote_factor: float, num_running: int) -> None:
    """Prefill workers are slower than routers predict; the decode worker learns it at little cost."""
    rng, truth = random.Random(1), TrueCosts()
    policy = PrefillPlacement(DecodeConfig())
    truth.teach(policy, 20)
    regret_s = best_s = 0.0
    for number in range(300):
        now_s, tokens = number * 0.5, rng.choice([40, 200, 600])
        option = RemoteOption("p", 0.0, tokens * 5e-4)  # no prompt queues behind it
        demand = replace(IDLE, num_tokens=tokens, num_running=num_running)
        chosen = policy.choose(demand, [option], now_s).chosen
        steps = -(-tokens // 256)
        local_s = truth.step_s(0, num_running) * steps + (1 + num_running) * tokens * truth.token_s
        prefill_s = remote_factor * tokens * 5e-4
        remote_s = option.queue_s + prefill_s + 0.004
        taken_s = {LOCAL: local_s, REMOTE: remote_s}.get(chosen.place, max(local_s, remote_s))
        best_s += min(local_s, remote_s)
        regret_s += taken_s - min(local_s, remote_s)
        if chosen.place is REMOTE:
            times = RemoteTimes(remote_s, option.queue_s, prefill_s, option.prefill_s, tokens)
            policy.remote.on_first_token("p", times, now_s)
            policy.remote.on_landed("p", int(tokens * 1e4), 0.002)
    assert regret_s < 0.15 * best_s, (regret_s, best_s)
