"""The GPU check runs end to end before there is a GPU, keeps what it has measured, and goes on after a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, tune
from benchmarks.gpu import Section
from benchmarks.gpu_figures import is_met
from benchmarks.ground import Rehearsal
from benchmarks.report import Row
from benchmarks.shapes import write_tiled
from engine.kernels.tuning import KernelConfig

# Of the list: what each figure's row says.
FIGURES = (
    "check: paged decode",
    "check: a token of context in fp8 pages",
    "check: whole step, 8B, batch 1 ",
    "check: whole step, 8B, batch 2 ",
    "check: idle between kernels, 8B",
    "check: prompt of",
)


@pytest.fixture(scope="module")
def ground() -> Rehearsal:
    return Rehearsal()


def test_a_rehearsal_runs_every_benchmark(ground: Rehearsal, tmp_path: Path) -> None:
    rows, problems = gpu.run(ground, 600, tmp_path)
    assert problems == []
    names = [row.metric for row in rows]
    for figure in FIGURES:
        assert any(name.startswith(figure) for name in names), figure
    others = ("latents", "draws, top-k", "fp8 product", "exposed over", "gather of", "int8, 2 x", "of prompts, ahead")
    for other in others:
        assert any(other in name for name in names), other
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["metric"] for row in written["rows"]] == names


def test_a_section_that_fails_or_takes_too_long_does_not_keep_the_others_from_running(
    ground: Rehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Iterator[Row]:
        yield Row("before it", 1.0, "s")
        raise RuntimeError("an illegal memory access was encountered")

    def endless() -> Iterator[Row]:
        while True:
            yield Row("again", 1.0, "s")

    made = [Section("one", 60, fail), Section("two", 0, endless), Section("three", 60, lambda: [Row("last", 1.0, "s")])]
    monkeypatch.setattr(gpu, "sections", lambda ground, found: made)
    rows, problems = gpu.run(ground, 600, tmp_path)
    assert [row.metric for row in rows] == ["before it", "again", "last"]
    assert ["illegal memory access" in problems[0], "ended after 'again'" in problems[1]] == [True, True]
    assert len(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == 3
    rows, problems = gpu.run(ground, -1, tmp_path)
    assert rows == []
    assert all("not begun" in problem for problem in problems)


def test_a_check_says_whether_it_is_met() -> None:
    assert is_met(Row("a", 0.9, "of it", "wanted at least", 0.85))
    assert not is_met(Row("a", 0.8, "of it", "wanted at least", 0.85))
    assert is_met(Row("a", 0.5, "of it", "wanted at most", 0.55))
    assert is_met(Row("a", 0.0, "%", "wanted at most", 3.0))
    assert not is_met(Row("a", 0.6, "of it", "wanted at most", 0.55))
    assert is_met(Row("a", 1.0, "GB/s", "device copy", 2.0)) is None


def test_the_tuner_measures_and_keeps_what_it_finds(ground: Rehearsal, tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    assert tune.tune(ground, file) == 6
    found = json.loads(file.read_text())
    assert sorted(found) == ["paged_decode", "paged_latent", "paged_prefill"]
    assert len(found["paged_decode"]) == 3
    assert KernelConfig(**next(iter(found["paged_prefill"].values())))
    assert tune.tune(ground, file, seconds=-1) == 0


def test_a_large_checkpoint_is_noise_of_the_size_that_was_asked_for(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    file = tmp_path / "model.safetensors"
    write_tiled(file, {"first": (300, 64), "norm": (70,), "second": (33, 16)}, tile=1 << 13)
    tensors = load_file(file)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "first": (300, 64), "norm": (70,), "second": (33, 16),
    }  # fmt: skip
    assert torch.equal(tensors["norm"].float(), torch.ones(70))
    for name, width in (("first", 64), ("second", 16)):
        values = tensors[name].float()
        assert abs(values.std() * width**0.5 - 1) < 0.1
        assert not torch.equal(values[0], values[1])
