"""Tests the suite's own rules: which tests may start processes, how forks behave, and how files are distributed."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support.prefork import mirror as mirror_script
from tests.support.prefork import ray_worker
from tests.support.prefork.module_process import ModuleProcess, forked_ray_workers, start_module
from tests.support.repository.house import ROOT, tracked_files
from tests.support.suite import costs
from tests.support.suite.examples import DEPTH, examples
from tests.support.suite.own_processes import ProcessStarted, is_own
from tests.support.suite.scheduling import RAY_FILES, SOURCE_FILES, GroupedFiles

NOTHING = [sys.executable, "-c", ""]
TIMEOUT_S = 240.0


def test_a_test_without_the_marker_starts_no_process() -> None:
    with pytest.raises(ProcessStarted, match="mark it with"):
        subprocess.run(NOTHING, check=True)
    with pytest.raises(ProcessStarted, match="mark it with"):
        multiprocessing.get_context("spawn").Process().start()
    subprocess.run(["git", "--version"], check=True, capture_output=True, timeout=30)


@pytest.mark.processes
def test_a_test_with_the_marker_starts_processes() -> None:
    subprocess.run(NOTHING, check=True, timeout=60)


def mirror(tmp_path: Path, *arguments: str, fresh: bool = False) -> ModuleProcess:
    with (tmp_path / "log").open("wb") as log:
        return start_module(
            "tests.support.prefork.mirror", arguments, log, environment={"ONLY_HERE": "yes"}, fresh=fresh
        )


@pytest.mark.processes
@pytest.mark.parametrize("fresh", [False, True])
def test_a_process_has_its_own_arguments_environment_and_files(tmp_path: Path, fresh: bool) -> None:
    process = mirror(tmp_path, "3", fresh=fresh)
    with process.stdout:
        assert json.loads(process.stdout.readline()) == {
            "pid": process.pid,
            "arguments": ["3"],
            "environment": "yes",
            "folder": str(ROOT),
            "num_threads": 1,
        }
        assert process.stdout.read() == b""
    assert process.wait(TIMEOUT_S) == process.poll() == 3
    assert (tmp_path / "log").read_text() == "to the log\n"


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_forked_process_gets_its_own_signals(tmp_path: Path, number: signal.Signals) -> None:
    victim, other = mirror(tmp_path), mirror(tmp_path)
    for process in (victim, other):
        assert process.stdout.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        victim.wait(0.01)
    victim.send_signal(number)
    assert victim.wait(TIMEOUT_S) == -number
    victim.send_signal(signal.SIGTERM)  # it has already ended, which is not an error
    assert other.poll() is None
    other.kill()
    assert other.wait(TIMEOUT_S) == -signal.SIGKILL
    for process in (victim, other):
        process.stdout.close()


def stand_in(tmp_path: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts a process that Ray takes for a worker, with the mirror as the worker's script."""
    context = json.dumps({"env_vars": {"ONLY_HERE": "yes"}})
    options = ["--language=PYTHON", f"--serialized-runtime-env-context={context}"]
    command = [sys.executable, ray_worker.__file__, mirror_script.__file__, *arguments, *options]
    with forked_ray_workers(), (tmp_path / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT)


@pytest.mark.processes
def test_a_ray_worker_is_forked_with_its_environment_and_its_status_is_passed_on(tmp_path: Path) -> None:
    process = stand_in(tmp_path, "3")
    assert process.stdout is not None
    with process.stdout:
        seen = json.loads(process.stdout.read())
    assert process.wait(TIMEOUT_S) == 3
    assert (seen["arguments"], seen["environment"], seen["folder"]) == (["3"], "yes", str(ROOT))
    assert seen["pid"] != process.pid
    assert (tmp_path / "log").read_text() == "to the log\n"


@pytest.mark.processes
@pytest.mark.parametrize("victim", ["worker", "stand-in"])
def test_a_ray_worker_and_its_stand_in_end_together(tmp_path: Path, victim: str) -> None:
    process = stand_in(tmp_path)
    assert process.stdout is not None
    with process.stdout:
        worker = json.loads(process.stdout.readline())["pid"]
        os.kill(worker if victim == "worker" else process.pid, signal.SIGKILL)
        assert process.stdout.read() == b""  # when both end
    assert process.wait(TIMEOUT_S) == (128 + signal.SIGKILL if victim == "worker" else -signal.SIGKILL)


def test_a_test_without_the_marker_forks_no_process(tmp_path: Path) -> None:
    for fresh in (False, True):
        with pytest.raises(ProcessStarted, match="mark it with"):
            mirror(tmp_path, "0", fresh=fresh)


@pytest.mark.parametrize(
    ("command", "own"),
    [
        (["git", "ls-files"], False),
        (["/usr/bin/g++", "-shared"], False),
        ([sys.executable, "-m", "ruff", "check"], False),
        ([sys.executable, "-m", "router.text.template_sandbox"], False),
        ([sys.executable, "-m", "router.text.grammar_sandbox"], False),
        ([sys.executable, "-m", "router", "--config", "file"], True),
        (["python3", "script.py"], True),
        (["/venv/ray/core/src/ray/gcs/gcs_server", "--port=0"], True),
        ("python -c pass", True),
    ],
)
def test_own_processes_are_not_tools(command: list[str] | str, own: bool) -> None:
    assert is_own(command) is own


def test_the_slowest_files_come_first_and_each_file_stays_together() -> None:
    names = ["a.py::1", "b.py::1", "c.py::1", "a.py::2", "d.py::1", "b.py::2"]
    items = [cast(pytest.Item, SimpleNamespace(nodeid=name)) for name in names]
    costs.slowest_first(items, {"a.py": 2.0, "b.py": 9.0, "d.py": 2.0})
    assert [item.nodeid for item in items] == ["b.py::1", "b.py::2", "c.py::1", "a.py::1", "a.py::2", "d.py::1"]


def test_all_files_that_start_a_ray_go_to_one_process() -> None:
    scopes = object.__new__(GroupedFiles)
    assert {scopes._split_scope(f"{file}::test_a") for file in RAY_FILES} == {"ray"}
    assert {scopes._split_scope(f"{file}::test_a") for file in SOURCE_FILES} == {"sources"}
    assert scopes._split_scope("tests/a/test_b.py::test_c") == "tests/a/test_b.py"
    starts_ray = re.compile(
        r"^from cluster\.ray\.launch import .*\blaunch\b|^from tests\.support\.ray_nodes|--head --block"
        r"|\"cluster\.cli\", \"serve\"",
        re.M,
    )
    names = {name for name in tracked_files() if name.startswith("tests/") and "/test_" in name} - {
        "tests/repository/test_suite.py"
    }
    assert {name for name in names if starts_ray.search((ROOT / name).read_text())} == RAY_FILES


def test_tests_of_slow_files_are_marked_slow() -> None:
    marked: list[str] = []
    items = [
        cast(pytest.Item, SimpleNamespace(nodeid=name, add_marker=lambda marker, name=name: marked.append(name)))
        for name in ("dear.py::1", "new.py::1", "cheap.py::1", "dear.py::2")
    ]
    costs.mark_slow(items, {"dear.py": costs.SLOW_S + 0.1, "cheap.py": costs.SLOW_S})
    assert marked == ["dear.py::1", "dear.py::2"]


@pytest.mark.parametrize(
    ("file", "markers", "skipped"),
    [
        ("dear.py", "not processes and not slow", True),
        ("dear.py", "not slow", True),
        ("cheap.py", "not processes and not slow", False),
        ("new.py", "not processes and not slow", False),
        ("dear.py", "not processes", False),
        ("dear.py", "not slow or gpu", False),
        ("dear.py", "slow", False),
        ("dear.py", "", False),
    ],
)
def test_files_without_a_selected_test_are_not_imported(file: str, markers: str, skipped: bool) -> None:
    assert costs.may_skip(file, markers, {"dear.py": costs.SLOW_S + 0.1, "cheap.py": costs.SLOW_S}) is skipped


def test_a_deep_run_takes_many_times_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEPTH, raising=False)
    assert examples(40).max_examples == 40
    monkeypatch.setenv(DEPTH, "10")
    deep = examples(40, stateful_step_count=25)
    assert (deep.max_examples, deep.stateful_step_count, deep.deadline) == (400, 25, None)
    assert f"{DEPTH}=10 $(PYTEST) --hypothesis-profile explore -m hypothesis" in (ROOT / "Makefile").read_text()


def test_recorded_costs_are_of_existing_files() -> None:
    gone = set(costs.recorded()) - set(tracked_files())
    assert not gone, f"record the costs again with make test-costs: {sorted(gone)}"


def test_the_everyday_run_leaves_out_exactly_the_marked_tests() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^test-fast: setup\n\t(.*)$", makefile, re.MULTILINE)
    assert recipe is not None
    assert recipe[1] == '$(PYTEST) -m "not processes and not slow"'
