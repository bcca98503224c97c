"""Progress while a deployment starts: a live view with rich on a terminal, else a line for each change."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from cluster.cli.table import state_changes
from penstock.v1 import admin_pb2
from worker.start_progress import parse_stage


class StartProgress:
    """Shows each worker on its way to ready. A `with` block around `launch`, which calls `show`."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
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
        for line in state_changes(self._states, status):
            print(line, file=sys.stderr, flush=True)

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
