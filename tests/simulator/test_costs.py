"""Tests cost libraries: published shapes, rooflines, fits to measured steps, and cost files."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import pytest

from penstock.errors import InvalidInput
from penstock.sizing.accelerators import ACCELERATORS
from penstock.sizing.model_shape import MODEL_SHAPES, find_shape
from penstock.types import Role, StepTotals
from simulator.costs.accelerators import find_accelerator
from simulator.costs.cost_file import read_costs, write_costs
from simulator.costs.crowding import crowded_slowness
from simulator.costs.fit import fit_steps
from simulator.costs.machine import FrontThread, SharedCores, StepKind, StepSpread
from simulator.costs.records import StepRecord
from simulator.costs.roofline import num_kv_tokens, ridge_batch, roofline_costs
from simulator.costs.step_costs import DecodeCosts, PrefillCosts


@pytest.mark.parametrize(
    ("name", "billions", "active", "kv_bytes"),
    [  # as their publishers state them
        ("llama-3.1-8b", 8.03, 7.5, 131_072),
        ("llama-3.1-70b", 70.6, 69.5, 327_680),
        ("llama-3.1-405b", 405.9, 403.7, 516_096),
        ("qwen3-30b-a3b", 30.5, 3.0, 98_304),
        ("mixtral-8x7b", 46.7, 12.7, 131_072),
        ("deepseek-v3", 671.0, 36.6, 70_272),
    ],
)
def test_shapes_have_the_published_sizes(name: str, billions: float, active: float, kv_bytes: int) -> None:
    shape = MODEL_SHAPES[name]
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    assert shape.kv_token_bytes == kv_bytes


def test_a_folder_or_a_config_file_gives_a_shape(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "models" / "penstock-tiny"
    shape = find_shape(str(folder))
    assert shape == find_shape(str(folder / "config.json"))
    assert (shape.num_layers, shape.weight_bytes_per_value, shape.kv_token_bytes) == (6, 4.0, 6 * 2 * 2 * 32 * 4)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(InvalidInput, match="num_attention_heads"):
        find_shape(str(tmp_path))
    with pytest.raises(InvalidInput, match=r"'llama-9' is neither a config\.json nor a known shape; give a folder"):
        find_shape("llama-9")


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_step_takes_as_long_as_its_slower_limit(name: str) -> None:
    shape, device = MODEL_SHAPES["llama-3.1-8b"], find_accelerator(name.lower())
    costs = roofline_costs(shape, device)
    ridge = int(ridge_batch(shape, device))
    reading_s = shape.always_read_parameters * 2 / (device.memory_bytes_per_s * device.efficiency.memory)
    flops_s = shape.token_flops / (device.flops * device.efficiency.compute)
    fixed_s = device.efficiency.step_overhead_s
    decode = replace(costs.decode, sequence_s=0.0)
    assert decode.batch_s(1) == pytest.approx(fixed_s + reading_s)
    assert decode.batch_s(ridge - 1) == pytest.approx(fixed_s + reading_s)
    assert decode.batch_s(4 * ridge) == pytest.approx(fixed_s + 4 * ridge * flops_s, rel=0.01)
    assert costs.prefill.prompt_s(2048, 2048) == pytest.approx(
        fixed_s + max(reading_s, 2048 * flops_s) + costs.prefill.context_s * 2048**2 / 2, rel=0.01
    )


def test_tensor_parallel_divides_work_and_adds_collectives() -> None:
    shape, device = MODEL_SHAPES["llama-3.1-70b"], ACCELERATORS["H100"]
    assert num_kv_tokens(shape, device) == 0
    assert num_kv_tokens(shape, device, 4) > 100_000
    four, eight = roofline_costs(shape, device, 4), roofline_costs(shape, device, 8)
    assert eight.decode.step_s < four.decode.step_s < 2 * eight.decode.step_s
    assert eight.prefill.token_s > four.prefill.token_s / 2


def test_only_the_experts_that_a_batch_uses_are_read() -> None:
    decode = roofline_costs(MODEL_SHAPES["deepseek-v3"], ACCELERATORS["H200"], 8).decode
    dense_s = replace(decode, expert_s=0.0).batch_s(1)
    assert decode.batch_s(1) - dense_s == pytest.approx(decode.expert_s * 8 / 256)
    assert decode.batch_s(256) - decode.batch_s(1) > 0.8 * decode.expert_s


def records(decode: DecodeCosts, spread: float) -> list[StepRecord]:
    found = []
    for number in range(24):
        noise = 1 + spread * (-1) ** number
        batch, context, chunk = 1 + number % 8 * 4, 200 + number * 97, 32 << number % 5
        contexts = batch * context
        decoding = decode.decode_s(batch, contexts)
        found.append(StepRecord(Role.DECODE, False, StepTotals(9, 9 * batch, 9 * contexts, 9 * decoding * noise)))
        pairs = chunk * (context + chunk / 2)
        prompt_s = decode.chunk.step_s + decode.chunk.chunk_s(chunk, context)
        found.append(StepRecord(Role.PREFILL, True, StepTotals(3, 3 * chunk, 3 * pairs, 3 * prompt_s * noise)))
    return found


def test_a_fit_recovers_the_costs_behind_the_records() -> None:
    made = DecodeCosts(0.004, 0.0003, 2e-6, PrefillCosts(0.005, 0.0002, 1e-8))
    fitted = fit_steps(records(made, 0.0))
    for name in ("step_s", "sequence_s", "kv_token_s"):
        assert getattr(fitted.decode, name) == pytest.approx(getattr(made, name), rel=1e-6)
    for name in ("step_s", "token_s", "context_s"):
        assert getattr(fitted.prefill, name) == pytest.approx(getattr(made.chunk, name), rel=1e-6)
    noisy = fit_steps(records(made, 0.05))
    assert noisy.errors["decode_p50"] == pytest.approx(0.05, abs=0.02)
    assert noisy.decode.decode_s(8, 4000) == pytest.approx(made.decode_s(8, 4000), rel=0.05)


def test_a_few_stalled_steps_do_not_change_a_fit() -> None:
    made = DecodeCosts(0.004, 0.0003, 2e-6, PrefillCosts(0.005, 0.0002, 1e-8))
    all_records = records(made, 0.01)
    stalled = [
        replace(record, totals=replace(record.totals, seconds=10 * record.totals.seconds))
        if number in {5, 6}
        else record
        for number, record in enumerate(all_records)
    ]
    assert fit_steps(stalled).decode.decode_s(8, 4000) == pytest.approx(made.decode_s(8, 4000), rel=0.1)


def test_a_fit_finds_the_spread_of_times() -> None:
    made = DecodeCosts(0.004, 0.0003, 2e-6, PrefillCosts(0.005, 0.0002, 1e-8))
    exact, noisy = (fit_steps(records(made, spread)).spread for spread in (0.0, 0.05))
    for kind in StepKind:
        assert exact.slowness(kind, 0.0) == pytest.approx(exact.slowness(kind, 1.0))
        assert noisy.slowness(kind, 1.0) - noisy.slowness(kind, 0.0) == pytest.approx(0.1, abs=0.03)


def test_a_fit_on_shared_cores_finds_the_costs_of_steps_alone() -> None:
    """Two workers compute together half of the time, and routers and clients need a core whenever one of them does."""
    cores, found = SharedCores(2, router=FrontThread(frame_s=0.3)), []
    for number in range(40):
        at_s, batch, is_together = number * 1.0, 1 + number % 5, number % 2
        seconds = (0.1 + 0.02 * batch) * (1.5 if is_together else 1.0)
        totals = StepTotals(3, 3 * batch, 300 * batch, 3 * seconds)
        found.append(StepRecord(Role.DECODE, False, totals, "decode", at_s))
        if is_together:
            prompt = StepTotals(1, 100 + 10 * number, 5000 * number, 0.9)
            found.append(StepRecord(Role.PREFILL, True, prompt, "prefill", at_s))
    assert fit_steps(found, cores).decode.batch_s(4) == pytest.approx(0.18, rel=0.1)
    assert fit_steps(found).decode.batch_s(4) > 0.2


def test_slowness_beside_several_workers_is_the_mean_over_which_of_them_compute() -> None:
    """Each other worker computes during a given share of a record's time, independently of the rest."""
    cores, rng = SharedCores(2, 1.5, 1.5), random.Random(1)
    others = {f"decode-{number}": rng.random() for number in range(4)}
    found = [StepRecord(Role.DECODE, False, StepTotals(1, 1, 1, 1.0), "decode", 1.0)]
    found += [
        StepRecord(Role.PREFILL, True, StepTotals(1, 1, 1, share * 1.0), name, 0.5 + share / 2)
        for name, share in others.items()
    ]
    expected = 0.0
    for are_busy in product((False, True), repeat=len(others)):
        chance = prod(share if is_busy else 1 - share for share, is_busy in zip(others.values(), are_busy, strict=True))
        expected += chance * max(1.0, 1.5 * (1 + sum(are_busy)) / 2)
    assert crowded_slowness(found, cores)[0] == pytest.approx(expected)


def test_too_few_records_are_refused_by_kind() -> None:
    with pytest.raises(InvalidInput, match="0 decode records; at least 4 are needed: send more varied traffic"):
        fit_steps([])


def test_a_cost_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    profile = roofline_costs(MODEL_SHAPES["qwen3-8b"], ACCELERATORS["L40S"])
    write_costs(profile, path)
    assert read_costs(path) == profile
    spread = StepSpread({str(kind): [0.9, 1.0, 1.5] for kind in StepKind}, spell_s=0.02)
    profile = replace(
        profile, spread=spread, cores=SharedCores(2, 1.5, 1.8, FrontThread(0.003, 0.001, 0.0001), FrontThread(0.002))
    )
    write_costs(profile, path)
    assert read_costs(path) == profile
    path.write_text(path.read_text().replace('"token_bytes": ', '"token_bytes": -'))
    with pytest.raises(
        InvalidInput, match=r"costs\.json: link: token_bytes = -\d+; give a number that is not negative"
    ):
        read_costs(path)
    path.write_text("{}")
    with pytest.raises(InvalidInput, match="not a cost file of format 1; write it with `penstock fit`"):
        read_costs(path)


def test_several_decode_steps_cost_the_sum_of_single_ones() -> None:
    decode = roofline_costs(MODEL_SHAPES["llama-3.1-8b"], ACCELERATORS["H100"]).decode
    assert decode.decode_each_s(7, 5000, 40) == [decode.decode_s(7, 5000 + 7 * step) for step in range(40)]
