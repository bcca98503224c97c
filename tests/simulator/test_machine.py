"""Tests machines whose cores are shared and whose speed varies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import InvalidInput
from simulator import check
from simulator.check import random_spec
from simulator.costs.machine import FrontThread, SharedCores, StepKind, StepSpread
from simulator.world.machine_model import CoresModel, MachineModel
from simulator.world.virtual_time import Simulation


def test_work_beyond_the_cores_slows_all_work() -> None:
    sim, ends = Simulation(), {}
    cores = CoresModel(sim, SharedCores(num_cores=2))

    def start(name: str, work_s: float) -> None:
        cores.start(work_s, 1, lambda: ends.update({name: sim.now_s}))

    for name, begin_s, work_s in (("a", 0.0, 4.0), ("b", 1.0, 2.0), ("c", 2.0, 1.0)):
        sim.at(begin_s, lambda name=name, work_s=work_s: start(name, work_s))  # type: ignore[misc]
    sim.run()
    # three share two cores from 2.0 until b and c are done at 3.5
    assert ends == {"b": pytest.approx(3.5), "c": pytest.approx(3.5), "a": pytest.approx(4.5)}


def test_a_step_of_several_threads_slows_beside_messages() -> None:
    sim, ends = Simulation(), []
    costs = SharedCores(2, decode_threads=2.0, prompt_threads=1.5, router=FrontThread(frame_s=0.5, token_s=0.25))
    cores = CoresModel(sim, costs)
    cores.start_step(4.0, StepKind.DECODE, lambda: ends.append(sim.now_s))
    for _ in range(2):  # one after the other
        cores.handle_frame(2)
    sim.run()
    assert ends == [5.0]
    cores.start_step(1.0, StepKind.CHUNK, lambda: ends.append(sim.now_s))
    cores.handle_frame(2)  # from 5.0 to 6.25, as 2.5 threads share 2 cores
    sim.run()
    assert ends == [5.0, 6.25]


def test_requests_wait_for_each_other_at_clients_and_at_routers() -> None:
    sim, placed_s = Simulation(), []
    costs = SharedCores(2, router=FrontThread(request_s=2.0, frame_s=1.0), client=FrontThread(request_s=1.0))
    cores = CoresModel(sim, costs)
    cores.handle_frame(1)
    for _ in range(3):
        cores.take_request(lambda: placed_s.append(sim.now_s))
    sim.run()
    assert placed_s == [3.0, 5.0, 7.0]


def test_the_spread_depends_on_seed_worker_and_time_only() -> None:
    spread = StepSpread(dict.fromkeys(StepKind, (0.5, 1.0, 2.0)), spell_s=0.1)
    times_s = [number / 30 for number in range(60)]

    def slowness(seed: int, worker: str, order: list[float]) -> dict[float, float]:
        machine = MachineModel(Simulation(seed), spread=spread)
        return {at_s: machine.slowness(worker, StepKind.DECODE, at_s) for at_s in order}

    seen = slowness(1, "decode-0", times_s)
    assert seen == slowness(1, "decode-0", times_s[::-1])
    assert seen != slowness(2, "decode-0", times_s)
    assert seen != slowness(1, "decode-1", times_s)
    assert all(0.5 <= each <= 2.0 for each in seen.values())


def test_a_spread_and_cores_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InvalidInput, match="fewer than two quantiles of prefill steps"):
        StepSpread({StepKind.DECODE: (0.5, 1.0)}, spell_s=0.1)
    with pytest.raises(InvalidInput, match=r"spell_s = 0\.0; give a time above 0"):
        StepSpread(dict.fromkeys(StepKind, (1.0, 1.0)), spell_s=0.0)
    with pytest.raises(InvalidInput, match="0 cores"):
        SharedCores(num_cores=0)


def test_faults_on_shared_cores_break_no_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, spread = (
        SharedCores(2, router=FrontThread(frame_s=0.002)),
        StepSpread(dict.fromkeys(StepKind, (0.7, 1.0, 4.0)), 0.05),
    )
    monkeypatch.setattr(check, "random_spec", lambda rng: replace(random_spec(rng), cores=cores, spread=spread))
    runs = [check.run_seed(seed) for seed in range(12)]
    assert [problem for run in runs for problem in run.problems] == []
    assert runs[3] == check.run_seed(3)
