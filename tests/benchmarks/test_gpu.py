"""Tests that the GPU check runs end to end without a GPU, keeps its measurements, and continues after a failure."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.common.report import Row
from benchmarks.common.shapes import write_tiled
from benchmarks.gpu import __main__, checks, tune
from benchmarks.gpu.__main__ import Section
from benchmarks.gpu.bench_device import RehearsalDevice
from benchmarks.gpu.checks import sanitizer_rows
from benchmarks.gpu.figures import is_met
from benchmarks.gpu.kernels import library_rows
from engine.kernels.libraries.attention import LibraryAttention
from engine.kernels.reference import TorchAttention
from engine.kernels.triton.attention.tuning import KernelConfig
from tests.support.engine import attention_doubles

# The row names of the figures that the engine must meet.
FIGURES = (
    "check: paged decode",
    "check: a token of context in fp8 pages",
    "check: whole step, 8B, batch 1 ",
    "check: whole step, 8B, batch 2 ",
    "check: idle between kernels, 8B",
    "check: prompt of",
    "check: logits of 8B, graphs against eager",
    "check: logits of 8B, plain torch against eager",
    "check: layer 0 of",
)


@pytest.fixture(scope="module")
def bench() -> RehearsalDevice:
    return RehearsalDevice()


@pytest.mark.processes
def test_a_rehearsal_runs_every_benchmark(
    bench: RehearsalDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = __main__.sections
    monkeypatch.setattr(
        __main__, "sections", lambda *args: [replace(section, within_s=1e6) for section in sections(*args)]
    )
    rows, problems = __main__.run(bench, 1e6, tmp_path)
    assert problems == []
    names = [row.metric for row in rows]
    for figure in FIGURES:
        assert any(name.startswith(figure) for name in names), figure
    others = (
        "latents",
        "sampling, top-k",
        "sampling, NaN rows",
        "sampling, penalties",
        "paged decode, ragged",
        "fp8 product",
        "routing, 128 experts",
        "sum of 1 tokens",
        "norm launched early",
        "exposed over",
        "gather of",
        "int8, 2 x",
        "of prompts, ahead",
        "host time of a step",
        "30B-A3B, batch",
        "torch, a chunk",
        "check: equal answers of both",
        "TTFT of two processes",
        "ITL of two processes",
        "exposed transfer of two processes",
        "every kernel at toy shapes",
    )
    assert "first transfer" in names[2], "right after the ceilings"
    for other in others:
        assert any(other in name for name in names), other
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["metric"] for row in written["rows"]] == names


def test_a_failing_or_slow_section_does_not_stop_the_others(
    bench: RehearsalDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Iterator[Row]:
        yield Row("before it", 1.0, "s")
        raise RuntimeError("an illegal memory access was encountered")

    def endless() -> Iterator[Row]:
        while True:
            yield Row("again", 1.0, "s")

    made = [Section("one", 60, fail), Section("two", 0, endless), Section("three", 60, lambda: [Row("last", 1.0, "s")])]
    monkeypatch.setattr(__main__, "sections", lambda bench, found: made)
    rows, problems = __main__.run(bench, 600, tmp_path)
    assert [row.metric for row in rows] == ["before it", "again", "last"]
    assert ["illegal memory access" in problems[0], "ended after 'again'" in problems[1]] == [True, True]
    assert len(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == 3
    written: list[int] = []

    def note() -> Iterator[Row]:
        for _ in range(2):
            yield Row("one more", 1.0, "s")
            written.append(len(json.loads((tmp_path / "gpu.json").read_text())["rows"]))

    monkeypatch.setattr(__main__, "sections", lambda bench, found: [Section("streams", 60, note)])
    __main__.run(bench, 600, tmp_path)
    assert written == [1, 2], "a process that is killed keeps what it has measured"
    monkeypatch.setattr(__main__, "sections", lambda bench, found: made)
    rows, problems = __main__.run(bench, -1, tmp_path)
    assert rows == []
    assert all("not started" in problem for problem in problems)


def test_a_run_continues_where_another_was_killed(
    bench: RehearsalDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill() -> Iterator[Row]:
        yield Row("before the end", 1.0, "s")
        raise Killed

    begun: list[str] = []

    def section(name: str, rows: Callable[[], Iterator[Row]] | None = None) -> Section:
        def measure() -> Iterator[Row]:
            begun.append(name)
            yield from [Row(f"of {name}", 1.0, "s")] if rows is None else rows()

        return Section(name, 60, measure)

    def all_sections(bench: RehearsalDevice, found: list[Row]) -> list[Section]:
        found.append(Row("ceiling", float(len(begun)), "GB/s"))
        return [section("one"), section("two", kill), section("three")]

    monkeypatch.setattr(__main__, "sections", all_sections)
    with pytest.raises(Killed):
        __main__.run(bench, 600, tmp_path)
    rows, problems = __main__.run(bench, 600, tmp_path, resume=True)
    assert begun == ["one", "two", "three"]
    assert [row.metric for row in rows] == ["ceiling", "of one", "before the end", "of three"]
    assert problems == []
    assert __main__.run(bench, 600, tmp_path, resume=True) == (rows, [])
    __main__.run(bench, 600, tmp_path, "one")
    assert begun == ["one", "two", "three", "one"], "without --resume everything begins again"


def test_captured_decodes_of_a_library_have_rows(bench: RehearsalDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    attention_doubles.install(monkeypatch)
    adapter = importlib.import_module("engine.kernels.libraries.flashinfer")
    library = LibraryAttention("flashinfer", TorchAttention(), adapter.FlashInferAttention(bench.device))
    monkeypatch.setattr("benchmarks.gpu.kernels.select_backend", lambda name, device: library)
    rows = [row.metric for row in library_rows(bench, TorchAttention())]
    sys.modules.pop("engine.kernels.libraries.flashinfer")  # it has imported the double
    assert "flashinfer, decodes, captured" in rows
    assert "flashinfer, decodes, captured, plan before a replay" in rows
    assert not any("a chunk, captured" in row for row in rows)


@pytest.mark.processes
def test_a_sanitizers_finding_is_a_problem(bench: RehearsalDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(RuntimeError, match="ended with 1"):
        list(sanitizer_rows(bench))


def test_results_that_are_not_finite_never_pass_a_check() -> None:
    assert checks._difference(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")


def test_a_check_reports_whether_it_is_met() -> None:
    assert is_met(Row("a", 0.9, "of it", "wanted at least", 0.85))
    assert not is_met(Row("a", 0.8, "of it", "wanted at least", 0.85))
    assert is_met(Row("a", 0.5, "of it", "wanted at most", 0.55))
    assert is_met(Row("a", 0.0, "%", "wanted at most", 3.0))
    assert not is_met(Row("a", 0.6, "of it", "wanted at most", 0.55))
    assert is_met(Row("a", 1.0, "GB/s", "device copy", 2.0)) is None


def test_the_tuner_measures_and_stores_its_choices(bench: RehearsalDevice, tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    assert tune.tune(bench, file) == 6
    found = json.loads(file.read_text())
    assert sorted(found) == ["paged_decode", "paged_latent", "paged_prefill"]
    assert len(found["paged_decode"]) == 3
    assert KernelConfig(**next(iter(found["paged_prefill"].values())))
    assert tune.tune(bench, file, seconds=-1) == 0


def test_a_large_checkpoint_has_random_weights_of_the_requested_shapes(tmp_path: Path) -> None:
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
