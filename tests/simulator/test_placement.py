"""Tests where simulated decode workers have prompts computed, and that they keep the target between tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest

from penstock.config import DecodeConfig
from simulator.costs.step_costs import DecodeCosts, PrefillCosts
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.request import Outcome, TraceRequest

PREFILL = PrefillCosts(step_s=0.012, token_s=7e-4, context_s=1e-7)
DECODE = DecodeCosts(step_s=0.01, sequence_s=5e-4, kv_token_s=1e-6, chunk=replace(PREFILL, step_s=0.0), mixed_s=0.004)
ITL_S, LONGEST_ITL_S = 0.06, 0.07


def long_prompts(per_s: float, seed: int) -> list[TraceRequest]:
    rng, blocks, at_s, requests = random.Random(seed), count(), 0.0, []
    for number in range(80):
        at_s += rng.expovariate(per_s)
        num_input = rng.randint(512, 1536)
        block_ids = tuple(next(blocks) for _ in range(-(-num_input // 16)))
        requests.append(TraceRequest(number, at_s, num_input, rng.randint(16, 32), block_ids, 16))
    return requests


def run(spec: FleetSpec, per_s: float, seed: int = 0) -> list[Outcome]:
    fleet = SimulatedFleet(spec, seed)
    for request in long_prompts(per_s, seed):
        fleet.submit(request)
    fleet.run()
    assert all(outcome.is_complete for outcome in fleet.outcomes)
    return fleet.outcomes


def spec(num_prefill: int, num_decode: int, itl_target_s: float | None = ITL_S) -> FleetSpec:
    config = DecodeConfig(max_batch_sequences=64, max_batch_tokens=256, itl_target_s=itl_target_s)
    return FleetSpec(num_prefill, num_decode, prefill_costs=PREFILL, decode_costs=DECODE, decode=config)


def mean_ttft_s(outcomes: list[Outcome]) -> float:
    return sum(outcome.ttft_s or 0.0 for outcome in outcomes) / len(outcomes)


def test_chunks_of_prompts_keep_the_target_between_tokens() -> None:
    bounded, free = run(spec(0, 1), 1.0), run(spec(0, 1, None), 1.0)
    assert max(outcome.tpot_s for outcome in bounded) < LONGEST_ITL_S
    assert max(outcome.tpot_s for outcome in free) > 0.1


@pytest.mark.parametrize("per_s", [1.0, 1.6, 2.2])
def test_a_prefill_and_a_decode_worker_keep_up_with_two_colocated_ones(per_s: float) -> None:
    """Sends long prompts, for which either worker alone would form a queue; no sequence waits for pages behind it."""
    pair, colocated = run(spec(1, 1), per_s), run(spec(0, 2), per_s)
    assert mean_ttft_s(pair) < 1.2 * mean_ttft_s(colocated)
    assert max(outcome.tpot_s for outcome in pair) < 1.5 * ITL_S
    assert {outcome.computed_by for outcome in pair} == {"prefill-0", "decode-0"}


@pytest.mark.parametrize("max_run", [1, 64])
def test_a_first_token_from_a_prefill_worker_does_not_wait_for_decode_steps(max_run: int) -> None:
    """The worker takes calls while a step computes, and sends what is ready."""
    remote = DecodeConfig(max_batch_sequences=64, max_batch_tokens=256, placement="remote")
    slow = replace(spec(1, 1), decode_costs=replace(DECODE, step_s=2.0), decode=remote, max_run=max_run)
    fleet = SimulatedFleet(slow, 0)
    fleet.submit(TraceRequest(0, 0.5, 16, 32, (0,), 16))
    late = fleet.submit(TraceRequest(1, 5.0, 64, 2, (1, 2, 3, 4), 16))
    fleet.run()
    assert late.ttft_s is not None
    assert late.ttft_s < 0.2  # less than what the step in flight still takes
    assert late.end_s > 7.0  # its second token comes with the end of a step
