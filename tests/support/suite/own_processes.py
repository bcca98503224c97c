"""Keeps tests that are not marked `processes` from starting any: `make test-fast` runs exactly those tests.

A process means one of our own Pythons (a worker, a router, a controller, a script) or a daemon of Ray. Tools such as
git, a compiler and ruff are allowed, and so are the sandboxes of chat templates and grammars, which every router has.
"""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

MARKER = "processes"
_FREE_MODULES = frozenset({"router.text.template_sandbox", "router.text.grammar_sandbox", "ruff", "grpc_tools.protoc"})
_running: list[pytest.Item] = []  # the running test, if it may start no process


class ProcessStarted(Exception):
    """Reports that a test that is not marked `processes` tried to start one."""


def install() -> None:
    """Checks every process start of this process from now on."""
    subprocess.Popen.__init__ = _guarded(subprocess.Popen.__init__)  # type: ignore[method-assign]
    base = multiprocessing.process.BaseProcess
    base.start = _guarded_start(base.start)  # type: ignore[method-assign, assignment]


def enter(item: pytest.Item) -> None:
    """Records the test that runs from now on."""
    _running.clear()
    if item.get_closest_marker(MARKER) is None:
        _running.append(item)


def leave() -> None:
    _running.clear()


def is_own(command: str | bytes | os.PathLike[str] | Sequence[str | bytes | os.PathLike[str]]) -> bool:
    """Returns whether a command starts one of our own processes or a daemon of Ray."""
    words = [command] if isinstance(command, str | bytes | os.PathLike) else list(command)
    names = [os.fsdecode(word) for word in words]
    if not names or _FREE_MODULES.intersection(names):
        return False
    return os.path.basename(names[0]).startswith("python") or names[0] == sys.executable or "/ray/" in names[0]


def check(command: str | bytes | os.PathLike[str] | Sequence[str | bytes | os.PathLike[str]]) -> None:
    """Raises ProcessStarted if the current test may not start this process."""
    if _running and is_own(command):
        _refuse(str(command)[:80])


def _refuse(what: str) -> None:
    raise ProcessStarted(
        f"{_running[0].nodeid} starts a process ({what}); mark it with @pytest.mark.{MARKER}, or its file with "
        f"pytestmark, so that `make test-fast` leaves it out"
    )


def _guarded(begin: Callable[..., None]) -> Callable[..., None]:
    def guarded(self: subprocess.Popen[Any], args: Any, *rest: Any, **options: Any) -> None:
        check(args)
        begin(self, args, *rest, **options)

    return guarded


def _guarded_start(begin: Callable[[Any], None]) -> Callable[[Any], None]:
    def guarded(self: multiprocessing.process.BaseProcess) -> None:
        if _running:
            _refuse(self.name)
        begin(self)

    return guarded
