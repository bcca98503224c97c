"""Shows on a terminal what a command waits for: a spinner, and a bar once the share of the work that is done is known.

Nothing is shown where standard error is not a terminal, or rich is missing, as in the bare client.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from types import TracebackType
from typing import Any

from penstock.charts.table import printable


class Progress:
    """A line on standard error for as long as a `with` block lasts. What is printed meanwhile appears above it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._line: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            with suppress(ImportError):
                self._line = _open_line(self._text)
        return self

    def show(self, text: str, share: float | None = None) -> None:
        """Shows another text, and a bar for `share` of the work, from 0 to 1."""
        if self._line is not None:
            total = None if share is None else 1.0
            self._line.update(self._line.task_ids[0], description=printable(text), total=total, completed=share or 0.0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.stop()


def _open_line(text: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    line = RichProgress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # else results would go where progress goes, not into the file or pipe
    )
    line.add_task(printable(text), total=None)
    line.start()
    return line
