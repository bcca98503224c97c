"""How far a worker is on its way to its first request: weights are read, kernels tried, decode steps captured.

A worker's server tells a `Stages` of it, which makes lines for people of it. On Ray they go to the controller, which
shows them in `penstock status` and `top`; a plain process shows them by itself.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

_STEP = 0.05  # of the weights, between two lines
Tell = Callable[[str], None]


class Stages:
    """`tell` hears a line whenever there is something new to say, on whatever thread comes that far."""

    def __init__(self, tell: Tell = lambda line: None) -> None:
        self._tell = tell
        self._told_share = -1.0

    def on_weights(self, share: float) -> None:
        """Of them that much is read, 0 to 1."""
        if share - self._told_share >= _STEP or share >= 1.0 > self._told_share:
            self._told_share = share
            self._tell(f"loading weights {share:.0%}" if share < 1.0 else "warming up")

    def on_graphs(self, done: int, of: int) -> None:
        """So many sizes of decode steps are captured."""
        self._tell(f"capturing graphs {done}/{of}")


def stage_of(line: str) -> tuple[str, float | None]:
    """("loading weights", 0.45) of "loading weights 45%", ("capturing graphs", 0.5) of "capturing graphs 7/14"; None
    where the line tells no share."""
    stage, _, number = line.rpartition(" ")
    if number.endswith("%") and number[:-1].isdigit():
        return stage, int(number[:-1]) / 100
    done, _, of = number.partition("/")
    if done.isdigit() and of.isdigit() and int(of):
        return stage, int(done) / int(of)
    return line, None


@contextlib.contextmanager
def on_terminal(name: str) -> Iterator[Tell]:
    """A bar on a terminal, elsewhere a line in the log whenever a stage begins."""
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

        def tell(line: str) -> None:
            bars.update(bar, description=f"{name}  {line}", completed=stage_of(line)[1] or 0.0)

        yield tell


def _log_stages(name: str) -> Tell:
    last = ""

    def tell(line: str) -> None:
        nonlocal last
        stage, _ = stage_of(line)
        if stage != last:
            last = stage
            log.info("%s: %s", name, stage)

    return tell
