"""Progress while a deployment starts: a live view with rich on a terminal, else a line for each change."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from cluster.cli.table import state_changes
from penstock.v1 import admin_pb2
from worker.start_progress import parse_stage


class StartProgress:
    """Shows each worker on its way to ready. A `with` block around `launch`, which calls `show`."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._stages: dict[str, str] = {}
        self._live: Any = None

    def __enter__(self) -> StartProgress:
        if sys.stderr.isatty():
            self._live = _make_live()
        if self._live is not None:
            self._live.start()
        return self

    def show(self, status: admin_pb2.StatusResponse) -> None:
        if self._live is not None:
            self._live.update(_start_grid(status))
            return
        for line in (*state_changes(self._states, status), *self._stage_changes(status)):
            print(line, file=sys.stderr, flush=True)

    def _stage_changes(self, status: admin_pb2.StatusResponse) -> Iterator[str]:
        """Yields a line for each worker that has begun another stage of its start."""
        for worker in status.workers:
            name, (stage, _) = worker.member.worker_id, parse_stage(worker.detail)
            if worker.state == "starting" and stage and self._stages.get(name) != stage:
                self._stages[name] = stage
                yield f"{name}: {stage}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _make_live() -> Any:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return None
    return Live(console=Console(stderr=True), refresh_per_second=8, transient=True)


def _start_grid(status: admin_pb2.StatusResponse) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for worker in status.workers:
        mark: Any = "[green]ready[/]" if worker.state == "ready" else Spinner("dots", style="cyan")
        _, share = parse_stage(worker.detail)
        bar: Any = ProgressBar(total=1.0, completed=share, width=24) if share is not None else ""
        grid.add_row(worker.member.worker_id, mark, worker.detail or worker.state, bar)
    return grid
