"""Tests that every benchmark imports and prints its help, so that a change elsewhere cannot break one unnoticed."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

import benchmarks
import tests.conformance

_ELSEWHERE = ("clients_suite", "langchain_suite")  # they run in an environment of their own
_PARSED_BY_ANOTHER = ("benchmarks.router.switched",)  # passes its arguments to the router's main
MODULES = sorted(
    found.name
    for package in (benchmarks, tests.conformance)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not found.name.endswith(_ELSEWHERE)
)


@pytest.fixture
def without_signal_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the test process's signal handlers: some benchmarks install theirs before they parse arguments."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: signal.SIG_DFL)


def runs_as_a_program(module: ModuleType) -> bool:
    source = Path(str(module.__file__)).read_text()
    return any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        for node in ast.parse(source).body
    )


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.usefixtures("without_signal_handlers")
@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
def test_a_module_imports_and_a_program_prints_its_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(name)
    if not runs_as_a_program(module):
        return
    parses = hasattr(module, "argparse") or name in _PARSED_BY_ANOTHER
    assert parses, f"{name} ignores its arguments: --help would run the benchmark"
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert ended.value.code == 0
    usage = capsys.readouterr().out
    assert usage.startswith(
        "usage: " if name in _PARSED_BY_ANOTHER else f"usage: python -m {name.removesuffix('.__main__')} "
    )
