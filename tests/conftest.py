"""Prepares a test process: settings before any import, the order of tests, and which tests may start processes."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.prefork import module_process
from tests.support.suite import costs, own_processes

if not Path("/dev/nvidiactl").exists():
    # Triton reads this at its first import, by whichever library: without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Several test processes share the cores, so a second thread of torch would mostly wait and spin. Tests of threads,
    # and processes of workers, set their own number.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Otherwise each call that ends with its process is a line of the output.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

own_processes.install()


def _end_at_once() -> None:
    """Ends a process of xdist without freeing its memory, after results are sent and other exit functions have run."""
    sys.stdout.flush()
    os._exit(0)


if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(_end_at_once)  # the function registered first runs last

with contextlib.suppress(ImportError):  # a GPU machine may lack it
    import hypothesis

    # The same examples in every run, however long they take, so that neither luck nor a busy machine fails a test.
    hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
    hypothesis.settings.register_profile("explore", deadline=None)
    hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(costs.OPTION, action="store_true", help="record what each test file costs")
    parser.addoption("--fresh-processes", action="store_true", help="start each worker and router in a new Python")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--fresh-processes"):
        module_process.use_forks()
    if config.getoption(costs.OPTION) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(costs.CostRecorder())
    # Called last of all cleanups, after pytest's own collections. Otherwise extension modules report as leaks the
    # objects that Python never deleted.
    config.add_cleanup(gc.unfreeze)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips the import of files whose tests would all be deselected."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(config.rootpath):
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    return costs.may_skip(file, config.option.markexpr, costs.recorded()) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Hides modules and tests, which stay to the end, from the garbage collector, also while they are created."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    recorded = costs.recorded()
    costs.mark_slow(items, recorded)
    costs.slowest_first(items, recorded)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from tests.support.suite.scheduling import make_scheduler  # a GPU machine may lack xdist

    return make_scheduler(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    own_processes.enter(item)
    try:
        return (yield)
    finally:
        own_processes.leave()
