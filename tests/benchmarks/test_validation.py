"""Tests the validation of the simulator without processes: workloads, a fit to known costs, tables and charts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.validation.__main__ import compare, judged, publish
from benchmarks.validation.cpu_clocks import CpuTimes, cpu_seconds
from benchmarks.validation.predicted import PredictedSystem, fit_costs
from benchmarks.validation.runs import (
    Latencies,
    Measurement,
    PlannedRun,
    deployments,
    fitted_runs,
    pool,
    with_references,
)
from benchmarks.validation.workloads import WORKLOADS, make_workload, spell_prompt
from penstock.types import Role
from simulator.costs.cost_file import CostProfile, FrontCosts
from simulator.costs.machine import FrontThread, SharedCores, StepKind, StepSpread
from simulator.costs.records import StepRecord, StepRecorder
from simulator.costs.step_costs import DecodeCosts, LinkCosts, PrefillCosts
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.request import TraceRequest

SPEC = FleetSpec(1, 1, prefill_pages=4000, decode_pages=4000)
PREFILL = PrefillCosts(0.004, 0.0001, 1e-8)
CORES = SharedCores(num_cores=2, router=FrontThread(request_s=0.002, frame_s=0.002))
SPREAD = StepSpread(dict.fromkeys(StepKind, (0.9, 1.0, 1.2)), 0.02)
TRUTH = CostProfile(
    "here", "made up", PREFILL, DecodeCosts(0.006, 0.0004, 1e-6, PREFILL), LinkCosts(3e9, token_bytes=3072),
    FrontCosts(0.003), spread=SPREAD, cores=CORES,
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


def recorded_steps(spec: FleetSpec, requests: Sequence[TraceRequest]) -> list[StepRecord]:
    recorder, fleet = StepRecorder(), SimulatedFleet(spec, 1)
    for request in requests:
        fleet.submit(request)
    while not fleet.all_ended:
        for name, worker in fleet.workers.items():
            recorder.observe(
                name,
                Role.PREFILL if name.startswith("prefill") else Role.DECODE,
                worker.load(),
                fleet.sim.now_s,
            )
        fleet.sim.run(until_s=fleet.sim.now_s + 0.05)
    return recorder.records


def test_a_fit_to_a_run_predicts_another_run_of_the_same_system() -> None:
    """A simulated system stands in for the real one; the fit sees only its load reports and latencies.

    Several runs are judged together: in a single one, a prompt that is placed elsewhere because of microseconds can
    move the median.
    """
    real = SPEC.with_costs(TRUTH)
    system, records, runs = PredictedSystem(real), {}, {}
    for run in with_references(fitted_runs(15.0), seed=0):
        records[run.name], runs[run.name] = (
            recorded_steps(real, run.requests),
            system.measure(run),
        )
        found, router = runs[run.name], CORES.router
        num_steps = sum(each.totals.steps for each in records[run.name] if each.role is Role.DECODE)
        found.cpu_s = {"client": 0.0, "router": router.frame_s * num_steps + router.request_s * len(found.ttft_s)}
        first_s = router.request_s + router.frame_s
        found.first_cpu_s = [{"client": 0.0, "router": first_s, "decode-0": ttft_s} for ttft_s in found.ttft_s]
        found.later_cpu_s = [{"client": 0.0, "router": router.frame_s, "decode-0": itl_s} for itl_s in found.itl_s]
    machine = {"hardware": {"cores": CORES.num_cores}}
    profile = fit_costs([Measurement("disaggregated", 0, 15.0, machine, records, runs)])
    assert profile.cores is not None
    assert profile.cores.router.frame_s == pytest.approx(CORES.router.frame_s, rel=0.01)
    assert profile.cores.router.request_s == pytest.approx(CORES.router.request_s, rel=0.01)
    assert profile.cores.decode_threads == pytest.approx(1.0)
    assert profile.cores.prompt_threads == pytest.approx(1.0)
    bursts = [PlannedRun("bursts", make_workload("bursts", 15.0, seed)) for seed in range(3, 9)]
    seen, expected = (
        pool([PredictedSystem(spec).measure(run) for run in bursts]) for spec in (real, SPEC.with_costs(profile))
    )
    rows = compare("simulated", "bursts", seen, expected)
    assert {row["figure"] for row in rows if abs(float(str(row["error"]))) > float(str(row["bound"]))} == set()


def test_rounds_have_requests_of_their_own_and_are_judged_together(tmp_path: Path) -> None:
    first, second = (
        Measurement("colocated", round, 4.0, {}, {}, {"bursts": Latencies([0.1 + round], [0.01], 2, 0, 1.0, 0, share)})
        for round, share in enumerate((0.02, None))
    )
    for measured in (first, second):
        measured.save(tmp_path)
    assert Measurement.load_rounds(tmp_path, "colocated") == [first, second]
    assert pool([first.runs["bursts"], second.runs["bursts"]]) == Latencies(
        [0.1, 1.1], [0.01, 0.01], 4, 0, 2.0, 0, 0.02
    )
    planned = [
        [run for _, runs in deployments("disaggregated", 4.0, round) for run in runs if run.is_compared]
        for round in range(2)
    ]
    assert all(one.name == other.name and one.requests != other.requests for one, other in zip(*planned, strict=True))


def test_disturbed_rounds_are_judged_only_without_others_and_marked(tmp_path: Path) -> None:
    quiet, disturbed = (Latencies([0.1], [0.01], 2, 0, 1.0, 0, share) for share in (0.02, 0.28))
    other = Latencies([0.3], [0.03], 2, 0, 1.0)
    assert judged([disturbed, quiet], [other, quiet])[1] == pool([quiet])
    seen, expected = judged([disturbed, disturbed], [other, other])
    assert seen.ttft_s == [0.1, 0.1]
    docs = tmp_path / "page.md"
    docs.write_text("<!-- validation -->\n<!-- end of validation -->\n")
    publish(compare("one", "w", seen, expected), {}, tmp_path, docs)
    assert "| **28 %** |" in docs.read_text()


def test_results_of_another_shape_are_kept_and_charted(tmp_path: Path) -> None:
    seen = Latencies([0.1, 0.2], [0.01, 0.02], 100, 0, 10.0)
    docs = tmp_path / "page.md"
    docs.write_text("<!-- validation -->\n<!-- end of validation -->\n")
    expected = Latencies([0.2, 0.4], [0.01, 0.02], 100, 0, 10.0)
    publish(compare("one", "w", seen, seen), {"date": "2026-01-01"}, tmp_path, docs)
    publish(compare("other", "w", seen, expected), {"date": "2026-01-01"}, tmp_path, docs)
    publish(compare("one", "w", seen, seen), {"date": "2026-01-02"}, tmp_path, docs)
    assert "| other, w | **200 / 400 (+100 %)** |" in docs.read_text()
    assert "| not measured |" in docs.read_text()
    result = json.loads((tmp_path / "validation.json").read_text())
    assert [row["shape"] for row in result["rows"]] == ["one"] * 5 + ["other"] * 5
    assert result["num_within"] == 8
    image = ElementTree.parse(tmp_path / "validation-0.svg")
    texts = [each.text for each in image.iter("{http://www.w3.org/2000/svg}text")]
    assert {
        "Measured and predicted: TTFT p50, ms",
        "measured",
        "predicted",
        "one, w",
        "other, w",
    } <= set(texts)


def test_processor_time_that_is_neither_idle_nor_ours_was_taken_by_others() -> None:
    before = CpuTimes(whole_s=10.0, idle_s=6.0, ours_s={"router": 0.6, "client": 0.4})
    assert CpuTimes(12.0, 7.0, {"router": 0.9, "client": 0.6}).others_share(before) == pytest.approx(0.25)
    after = CpuTimes(12.0, 7.8, {"router": 0.9, "client": 0.6})
    assert after.others_share(before) == 0.0  # ticks are coarse
    assert after.seconds_since(before)["router"] == pytest.approx(0.3)


def test_the_processor_time_of_a_process_grows_with_its_work() -> None:
    pids = {"here": os.getpid()}
    before, own_s = cpu_seconds(pids), time.process_time()
    while time.process_time() < own_s + 0.02:
        pass
    assert cpu_seconds(pids)["here"] - before["here"] >= 0.02
