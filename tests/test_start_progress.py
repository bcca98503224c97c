"""How far a worker is on its way: what it says, and what is made of that."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from penstock.start_progress import Stages, on_terminal, stage_of


def test_a_worker_says_something_new_now_and_then() -> None:
    lines: list[str] = []
    stages = Stages(lines.append)
    for step in range(1000):
        stages.on_weights(step / 1000)
    stages.on_weights(1.0)
    stages.on_weights(1.0)
    assert lines[:3] == ["loading weights 0%", "loading weights 5%", "loading weights 10%"]
    assert lines[-1] == "warming up"
    assert len(lines) <= 21
    for done in range(1, 4):
        stages.on_graphs(done, 3)
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
def test_lines_tell_their_stage_and_share(line: str, stage: str, share: float | None) -> None:
    assert stage_of(line) == (stage, share)


def test_without_a_terminal_each_stage_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.start_progress"), on_terminal("decode-0") as tell:
        for line in ("loading weights 5%", "loading weights 50%", "warming up", "capturing graphs 1/2"):
            tell(line)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["decode-0: loading weights", "decode-0: warming up", "decode-0: capturing graphs"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with on_terminal("decode-0") as tell:
        tell("capturing graphs 7/14")
    assert "capturing graphs 7/14" in terminal.getvalue()
