"""Tests that a run of some conformance suites keeps the results of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.suites import DEFAULT, read_other_results

RESULTS: dict[str, dict[str, object]] = {
    name: {"passed": True} for name in ("clients", "lm_eval", "schemathesis", "vllm_bench")
}


@pytest.mark.parametrize("chosen", [("clients",), ("vllm_bench",), ("clients", "vllm_bench"), DEFAULT])
def test_the_file_keeps_results_of_suites_that_do_not_run(chosen: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "conformance.json"
    file.write_text(json.dumps(RESULTS))
    others = read_other_results(file, chosen)
    assert others == {name: result for name, result in RESULTS.items() if name not in chosen}


def test_a_first_run_has_no_other_results(tmp_path: Path) -> None:
    assert read_other_results(tmp_path / "conformance.json", ("clients",)) == {}
    assert read_other_results(None, ("clients",)) == {}
