"""Tests that `penstock plan` takes the cost files that `penstock fit` writes."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.cli.commands.sizing import plan
from penstock.errors import InvalidInput
from penstock.sizing.model_shape import find_shape
from simulator.costs.accelerators import find_accelerator
from simulator.costs.cost_file import write_costs
from simulator.costs.roofline import roofline_costs

MODEL = "llama-3.1-8b"
TRAFFIC = ["--rate=8", "--input-tokens=900", "--output-tokens=80", "--limit=100", "--verify=0"]


def arguments(*more: str):  # type: ignore[no-untyped-def]
    parser = ArgumentParser()
    plan.add_arguments(parser)
    return parser.parse_args([f"--model={MODEL}", "--accelerator=H100=3", *TRAFFIC, *more])


@pytest.fixture
def fitted(tmp_path: Path) -> Path:
    costs = roofline_costs(find_shape(MODEL), find_accelerator("H100"), 2)
    write_costs(replace(costs, name=MODEL, source="fitted to 77 reports"), tmp_path / "h100.json")
    return tmp_path / "h100.json"


def test_a_plan_names_the_measurement_it_uses(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.run(arguments(f"--costs=H100={fitted}")) == 0
    printed = capsys.readouterr().out
    assert f"Costs of steps on 2 x H100: fitted to 77 reports, of {MODEL}." in printed
    assert "nothing was measured" not in printed
    assert plan.run(arguments()) == 0
    assert "nothing was measured on H100" in capsys.readouterr().out


def test_costs_that_fit_no_offer_are_refused(fitted: Path) -> None:
    for given, message in (
        ([f"--costs=L40S={fitted}"], "give NAME=FILE with an accelerator that is offered: H100"),
        (["--costs=H100"], "give NAME=FILE"),
        (["--costs=H100=/nowhere.json"], "give a file that `penstock fit` wrote"),
        ([f"--costs=H100={fitted}", "--tensor-parallel=1,4"], "add it to --tensor-parallel"),
        ([f"--costs=H100={fitted}"] * 2, "names two files of H100 at degree 2"),
    ):
        with pytest.raises(InvalidInput, match=message):
            plan.run(arguments(*given))
