"""Tests tables on terminals: they fit the width, colour what has a style, and obey NO_COLOR."""

from __future__ import annotations

import io
import sys

import pytest

from cluster.cli.commands.inspecting.status import format_status
from cluster.cli.progress import Progress
from cluster.cli.table import STATE_STYLES, columns_of, format_table, styles_for
from penstock.v1 import admin_pb2, worker_pb2


class Terminal(io.StringIO):
    """Stands for a terminal."""

    def isatty(self) -> bool:
        return True


def status_with(detail: str) -> admin_pb2.StatusResponse:
    load = worker_pb2.Load(num_running=3, free_pages=21845, total_pages=21845)
    workers = [
        admin_pb2.WorkerStatus(
            member=admin_pb2.Member(worker_id=f"prefill-{number}", role="prefill", address="10.128.17.142:35153"),
            state="ready",
            pid=1234567,
            load=load,
            detail=detail if number == 3 else "",
        )
        for number in range(12)
    ]
    return admin_pb2.StatusResponse(model="m", ready=True, workers=workers, routers_elsewhere=["10.0.0.1:80"])


def test_a_reason_that_does_not_fit_gets_lines_of_its_own() -> None:
    reason = "no node has 2 GPUs free: " + "node-with-a-long-name holds another deployment; " * 3
    lines = format_status(status_with(reason), 80).splitlines()
    assert max(map(len, lines)) <= 80
    at = next(number for number, line in enumerate(lines) if line.startswith("prefill-3"))
    assert lines[at + 1].startswith("    no node has 2 GPUs free")
    words = " ".join(line.strip() for line in lines[at + 1 : at + 4])
    assert words.startswith(reason.strip()[:100])
    assert max(map(len, format_status(status_with(reason)).splitlines())) > 200  # piped: a line a worker


def test_columns_without_figures_go_first() -> None:
    header, rows = ("pair", "harm", "total"), [["a > b", "0.0", "12.5"], ["c > d", "-", "9.0"]]
    assert format_table(header, rows, 16) == "pair   total\na > b   12.5\nc > d    9.0"
    assert format_table(header, rows, 40) == format_table(header, rows)


def test_a_single_row_becomes_a_list() -> None:
    assert format_table(("queue ms", "served by"), [["1.5", "prefill-0 > decode-1"]], 20) == (
        "queue ms   1.5\nserved by  prefill-0 > decode-1"
    )


def test_colours_are_for_terminals_that_want_them() -> None:
    assert styles_for(Terminal(), STATE_STYLES, {}) is STATE_STYLES
    for stream, environment in (
        (io.StringIO(), {}),
        (Terminal(), {"NO_COLOR": "1"}),
        (Terminal(), {"TERM": "dumb"}),
    ):
        assert styles_for(stream, STATE_STYLES, environment) == {}
    coloured = format_table(("worker", "state"), [["decode-0", "ready"], ["decode-1", "lost"]], None, STATE_STYLES)
    assert coloured.splitlines()[1:] == ["decode-0  \x1b[32mready\x1b[0m", "decode-1  \x1b[31mlost \x1b[0m"]


def test_only_a_terminal_limits_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert columns_of(Terminal()) == 72
    assert columns_of(io.StringIO()) is None


def test_progress_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with Progress("waiting [for] it") as progress:
            progress.show("3 of 4 [are] ready", 0.75)
        shown[stream.isatty()] = stream.getvalue()
    assert "3 of 4 [are] ready" in shown[True]
    assert shown[False] == ""


def test_progress_does_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with Progress("waiting") as progress:
        progress.show("half", 0.5)
    assert terminal.getvalue() == ""
