"""Tests output on terminals: tables, colours, progress, and untrusted text."""

from __future__ import annotations

import io
import sys
from typing import cast

import pytest

from cluster.cli.commands.calling.generate import print_stream
from cluster.cli.commands.inspecting.doctor import format_finding
from cluster.cli.commands.inspecting.status import format_status
from cluster.cli.main import main
from cluster.cli.progress import Progress
from cluster.cli.table import STATE_STYLES, styles_for
from cluster.diagnose.findings import Finding, Severity
from penstock.charts.table import columns_of, format_table, printable
from penstock.client.results import Chunk
from penstock.client.sync_client import GenerateStream
from penstock.v1 import admin_pb2, worker_pb2


class Terminal(io.StringIO):
    """Stands in for a terminal."""

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


def test_a_reason_that_does_not_fit_gets_its_own_lines() -> None:
    reason = "no node has 2 GPUs free: " + "node-with-a-long-name holds another deployment; " * 3
    lines = format_status(status_with(reason), 80).splitlines()
    assert max(map(len, lines)) <= 80
    at = next(number for number, line in enumerate(lines) if line.startswith("prefill-3"))
    assert lines[at + 1].startswith("    no node has 2 GPUs free")
    words = " ".join(line.strip() for line in lines[at + 1 : at + 4])
    assert words.startswith(reason.strip()[:100])
    # Piped output has one line for each worker.
    assert max(map(len, format_status(status_with(reason)).splitlines())) > 200


def test_columns_without_digits_are_dropped_first() -> None:
    header, rows = ("pair", "harm", "total"), [["a > b", "0.0", "12.5"], ["c > d", "-", "9.0"]]
    assert format_table(header, rows, 16) == "pair   total\na > b   12.5\nc > d    9.0"
    assert format_table(header, rows, 40) == format_table(header, rows)


def test_a_single_row_becomes_a_list() -> None:
    header, row = ("queue ms", "served by", "pages"), ["1.5", "prefill-0 > decode-1", "3"]
    assert format_table(header, [row], 32) == "queue ms   1.5\nserved by  prefill-0 > decode-1\npages      3"


def test_colours_appear_only_on_terminals_that_want_them() -> None:
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


def test_progress_appears_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with Progress("waiting [for] it") as progress:
            progress.show("3 of 4 [are] ready", 0.75)
        shown[stream.isatty()] = stream.getvalue()
    assert "3 of 4 [are] ready" in shown[True]
    assert shown[False] == ""


def test_progress_shows_nothing_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with Progress("waiting") as progress:
        progress.show("half", 0.5)
    assert terminal.getvalue() == ""


def test_results_stay_in_the_pipe_while_progress_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("sys.stdout", pipe)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("draining"):
        print('{"stage": "drained"}')
    assert pipe.getvalue() == '{"stage": "drained"}\n'
    assert "drained" not in terminal.getvalue()


def test_untrusted_text_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "a\x1b]0;title\x07\x1b[2J\x9b1mb"
    assert printable(f"{evil}\r\n\tc") == "a\ufffd]0;title\ufffd\ufffd[2J\ufffd1mb\n\tc"
    for columns in (None, 20):
        for header in (("worker", ""), ("worker", "address")):
            assert "\x1b" not in format_table(header, [["decode-0", evil]], columns)
    assert "\x1b" not in format_finding(Finding("link", evil, Severity.OK, evil, evil))
    assert main([evil]) == 2
    assert "\x1b" not in capsys.readouterr().err
    stream = cast(GenerateStream, iter([Chunk(evil, ()), Chunk("👩\u200d💻", ())]))
    assert print_stream(stream).text.startswith(evil)
    assert evil in capsys.readouterr().out  # a pipe gets the model's exact text
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    print_stream(cast(GenerateStream, iter([Chunk(evil, ()), Chunk("👩\u200d💻", ())])))
    assert terminal.getvalue() == f"{printable(evil)}👩\u200d💻\n"
