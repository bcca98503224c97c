"""Shows a run's progress on standard error: a live bar on a terminal if rich is installed, otherwise a line every ten
seconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from typing import Any

from penstock.bench.driver.run import LiveCounts

_LINE_PERIOD_S, _BAR_PERIOD_S = 10.0, 0.25


class ShownProgress:
    """Shows counts while its `async with` block runs."""

    def __init__(self, name: str, counts: LiveCounts, is_quiet: bool = False) -> None:
        self._name, self._counts, self._is_quiet = name, counts, is_quiet
        self._started_s = time.perf_counter()
        self._task: asyncio.Task[None] | None = None
        self._bar: Any = None

    def line(self) -> str:
        counts, elapsed_s = self._counts, time.perf_counter() - self._started_s
        failed = f", {counts.failed} failed" if counts.failed else ""
        return (
            f"{self._name}: {counts.done} of {counts.total} done, {counts.in_flight} in flight{failed}, "
            f"{counts.tokens / max(elapsed_s, 1e-9):.0f} tokens/s"
        )

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(_LINE_PERIOD_S if self._bar is None else _BAR_PERIOD_S)
            if self._bar is None:
                print(self.line(), file=sys.stderr, flush=True)
            else:
                self._bar.update(self._bar.task_ids[0], completed=self._counts.done, description=self.line())

    async def __aenter__(self) -> ShownProgress:
        if not self._is_quiet:
            self._bar = _open_bar(self._name, self._counts.total)
            self._task = asyncio.create_task(self._show())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._bar is not None:
            self._bar.stop()


def _open_bar(name: str, total: int) -> Any:
    """Returns a running bar, or None if standard error is not a terminal or rich is missing."""
    if not sys.stderr.isatty():
        return None
    with suppress(ImportError):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        bar = Progress(
            BarColumn(30), TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True)
        )
        bar.add_task(name, total=total)
        bar.start()
        return bar
    return None
