"""Tests the validation of the simulator without processes: workloads, a fit to known costs, tables and charts."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.validation.__main__ import compare, publish
from benchmarks.validation.measured import Latencies
from benchmarks.validation.predicted import fit_profile, predict
from benchmarks.validation.workloads import WORKLOADS, make_calibration, make_workload, sequential, spell_prompt
from penstock.types import Role
from simulator.costs.cost_file import CostProfile, FrontCosts
from simulator.costs.fit import StepRecorder
from simulator.costs.step_costs import DecodeCosts, LinkCosts, PrefillCosts
from simulator.fleet import FleetSpec, SimulatedFleet

SPEC = FleetSpec(1, 1, prefill_pages=4000, decode_pages=4000)
PREFILL = PrefillCosts(0.004, 0.0001, 1e-8)
TRUTH = CostProfile(
    "here", "made up", PREFILL, DecodeCosts(0.006, 0.0004, 1e-6, PREFILL), LinkCosts(3e9, token_bytes=3072),
    FrontCosts(0.003),
)  # fmt: skip


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_depends_only_on_its_seed_and_fits_the_model(name: str) -> None:
    requests = make_workload(name, 20.0, 1)
    assert requests == make_workload(name, 20.0, 1) != make_workload(name, 20.0, 2)
    assert len(requests) > 10
    assert all(request.num_input_tokens + request.num_output_tokens <= 2048 for request in requests)
    assert all(0 <= request.arrival_s <= 20 for request in requests)


def test_prompts_share_exactly_their_shared_blocks() -> None:
    first, *_, second = make_workload("shared prefixes", 20.0, 1)
    same = sum(left == right for left, right in zip(first.block_ids, second.block_ids, strict=False)) * 16
    left, right = (spell_prompt(each, 2048, "salt") for each in (first, second))
    assert left[:same] == right[:same]
    assert left[:same] != spell_prompt(first, 2048, "another")[:same] or not same
    assert len(left) == first.num_input_tokens


def test_a_fit_to_a_run_predicts_another_run_of_the_same_system() -> None:
    """A simulated system stands in for the real one; the fit sees only its load reports and latencies."""
    real = SPEC.with_costs(TRUTH)
    recorder, fleet = StepRecorder(), SimulatedFleet(real, 1)
    for request in make_calibration(15.0, 92):
        fleet.submit(request)
    while not fleet.all_ended:
        fleet.sim.run(until_s=fleet.sim.now_s + 0.05)
        for name, worker in fleet.workers.items():
            recorder.observe(name, Role.PREFILL if name.startswith("prefill") else Role.DECODE, worker.load())
    alone = sequential(12, 91)
    profile = fit_profile(SPEC, recorder.records, 3072, (alone, predict(real, alone)), "fitted")
    requests = make_workload("bursts", 15.0, 3)
    rows = compare("simulated", "bursts", predict(real, requests), predict(SPEC.with_costs(profile), requests))
    assert {row["figure"] for row in rows if abs(float(str(row["error"]))) > 0.1} == set()


def test_results_of_another_shape_are_kept_and_charted(tmp_path: Path) -> None:
    seen = Latencies([0.1, 0.2], [0.01, 0.02], 100, 0, 10.0)
    publish(compare("one", "w", seen, seen), tmp_path)
    publish(compare("other", "w", seen, Latencies([0.2, 0.4], [0.01, 0.02], 100, 0, 10.0)), tmp_path)
    result = json.loads((tmp_path / "validation.json").read_text())
    assert [row["shape"] for row in result["rows"]] == ["one"] * 5 + ["other"] * 5
    assert result["num_within"] == 8
    image = ElementTree.parse(tmp_path / "validation-0.svg")
    assert [each.text for each in image.iter("{http://www.w3.org/2000/svg}text")].count("one, w: TTFT p50") == 1
