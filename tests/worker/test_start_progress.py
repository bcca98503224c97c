"""Tests the progress of a start: which lines a worker reports, and how they are parsed and shown."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable

import pytest

from penstock.config import DecodeConfig, EngineConfig, WorkerConfig
from penstock.types import Role
from worker.start_progress import StartReporter, load_replica, parse_stage, progress_bar


def test_a_worker_reports_each_twentieth_of_its_weights_and_each_graph() -> None:
    lines: list[str] = []
    reporter = StartReporter(lines.append)
    for step in range(1000):
        reporter.on_weights(step / 1000)
    reporter.on_weights(1.0)
    reporter.on_weights(1.0)
    assert lines[:3] == ["loading weights 0%", "loading weights 5%", "loading weights 10%"]
    assert lines[-1] == "warming up"
    assert len(lines) <= 21
    for done in range(1, 4):
        reporter.on_graphs(done, 3)
    assert lines[-3:] == ["capturing graphs 1/3", "capturing graphs 2/3", "capturing graphs 3/3"]


@pytest.mark.parametrize(
    ("line", "stage", "share"),
    [
        ("loading weights 45%", "loading weights", 0.45),
        ("capturing graphs 7/14", "capturing graphs", 0.5),
        ("capturing graphs 0/0", "capturing graphs 0/0", None),
        ("warming up", "warming up", None),
        ("answers its first request", "answers its first request", None),
        ("", "", None),
    ],
)
def test_a_line_is_split_into_its_stage_and_share(line: str, stage: str, share: float | None) -> None:
    assert parse_stage(line) == (stage, share)


def test_without_a_terminal_each_stage_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "worker.start_progress"), progress_bar("decode-0") as report:
        for line in ("loading weights 5%", "loading weights 50%", "warming up", "capturing graphs 1/2"):
            report(line)
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["decode-0: loading weights", "decode-0: warming up", "decode-0: capturing graphs"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("decode-0") as report:
        report("capturing graphs 7/14")
    assert "capturing graphs 7/14" in terminal.getvalue()


@pytest.mark.parametrize("built", [True, False])
def test_a_first_start_says_that_kernels_are_built(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    loaded = object()

    def load(
        config: object, on_progress: Callable[[float], None], launch: object, *, has_prompt_stream: bool
    ) -> object:
        assert has_prompt_stream
        on_progress(0.5)
        return loaded

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("engine.cpu.library.needs_build", lambda: not built)
    monkeypatch.setattr("engine.replica.Replica.load", load)
    worker = WorkerConfig(
        worker_id="w", role=Role.PREFILL, engine=EngineConfig(model="m"), decode=DecodeConfig(prompt_sm_share=0.3)
    )
    assert load_replica(worker, StartReporter(lines.append), None) is loaded  # type: ignore[arg-type, comparison-overlap]
    building = [] if built else ["building CPU kernels, once for this machine"]
    assert lines == [*building, "loading weights 50%"]
    assert all(parse_stage(line) == (line, None) for line in building)
