"""Decides which runs of a text's pages are worth writing into the shared store. Pure."""

from __future__ import annotations

from collections.abc import Callable


def choose_runs(num_pages: int, run_pages: int, is_stored: Callable[[int], bool], max_runs: int) -> list[int]:
    """Returns the runs to write, by their numbers from 0, of a text of which the leading `num_pages` are worth it.

    Only whole runs are; the first ones go first, because later ones are of no use without them.
    """
    runs: list[int] = []
    for run in range(num_pages // run_pages):
        if len(runs) >= max_runs:
            break
        if not is_stored(run):
            runs.append(run)
    return runs


def worth_at_end(mode: str, num_pages: int, is_pinned: bool) -> int:
    """Returns how many leading pages of a text that has ended are written, though nobody has begun with it again."""
    return num_pages if mode == "computed" or (is_pinned and mode != "never") else 0


def worth_at_start(mode: str, num_cached: int) -> int:
    """Returns how many leading pages of a new prompt are written, of which `num_cached` were computed before."""
    return 0 if mode == "never" else num_cached
