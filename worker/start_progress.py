"""Tracks the start of a worker up to its first request: weights read, kernels built, decode steps captured.

A worker's server reports to a `StartReporter`, which turns the reports into lines of text. On Ray they go to the
controller for `penstock status` and `top`; a plain process shows them itself.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.parallel.leader import Launch
    from engine.replica import Replica
    from penstock.config import WorkerConfig

log = logging.getLogger(__name__)

_MIN_SHARE = 0.05  # a line for every such share of the weights
Report = Callable[[str], None]


class StartReporter:
    """Calls `report` with a line at each advance, on the thread that does the work."""

    def __init__(self, report: Report = lambda line: None) -> None:
        self._report = report
        self._reported_share: float | None = None

    def on_build(self) -> None:
        """Reports that CPU kernels are being compiled, by this process or by one that it waits for."""
        self._report("building CPU kernels, once for this machine")

    def on_weights(self, share: float) -> None:
        """Reports that a `share` of the weights is read, 0 to 1."""
        last = self._reported_share
        if last is None or share - last >= _MIN_SHARE or share >= 1.0 > last:
            self._reported_share = share
            self._report(f"loading weights {share:.0%}" if share < 1.0 else "warming up")

    def on_graphs(self, done: int, total: int) -> None:
        """Reports that `done` of `total` batch sizes are captured."""
        self._report(f"capturing graphs {done}/{total}")


def report_build(progress: StartReporter) -> None:
    """Reports a pending or running build of CPU kernels. Blocks while it imports libraries."""
    import torch

    from engine.cpu.library import needs_build

    if not torch.cuda.is_available() and needs_build():
        progress.on_build()


def load_replica(config: WorkerConfig, progress: StartReporter, launch: Launch) -> Replica:
    """Loads the replica of a worker, which may change its role later, and reports the progress. Blocks. Raises
    CheckpointError or ConfigError.
    """
    from engine.replica import Replica

    report_build(progress)
    has_prompt_stream = config.decode.prompt_sm_share > 0
    return Replica.load(config.engine, progress.on_weights, launch, has_prompt_stream=has_prompt_stream)


def parse_stage(line: str) -> tuple[str, float | None]:
    """Splits a line into its stage and its share: "loading weights 45%" into ("loading weights", 0.45), and
    "capturing graphs 7/14" into ("capturing graphs", 0.5). The share is None if the line has none."""
    stage, _, number = line.rpartition(" ")
    if number.endswith("%") and number[:-1].isdigit():
        return stage, int(number[:-1]) / 100
    done, _, total = number.partition("/")
    if done.isdigit() and total.isdigit() and int(total):
        return stage, int(done) / int(total)
    return line, None


@contextlib.contextmanager
def progress_bar(name: str) -> Iterator[Report]:
    """Shows a bar on a terminal; elsewhere logs a line whenever a stage begins."""
    if not sys.stderr.isatty():
        yield _log_stages(name)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        yield _log_stages(name)
        return
    columns = (TextColumn("{task.description}"), BarColumn(24))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(name, total=1.0)

        def report(line: str) -> None:
            bars.update(bar, description=f"{name}  {line}", completed=parse_stage(line)[1] or 0.0)

        yield report


def _log_stages(name: str) -> Report:
    last = ""

    def report(line: str) -> None:
        nonlocal last
        stage, _ = parse_stage(line)
        if stage != last:
            last = stage
            log.info("%s: %s", name, stage)

    return report
