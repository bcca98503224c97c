"""Decides which runs of a text's pages are worth writing into the shared store. Pure."""

from __future__ import annotations

from collections.abc import Callable


def choose_runs(num_pages: int, run_pages: int, is_stored: Callable[[int], bool], max_runs: int) -> list[int]:
    """Returns the numbers, from 0, of the runs to write of a text whose leading `num_pages` pages are worth writing.

    Only whole runs are written. The first ones come first, because later ones are useless without them.
    """
    runs: list[int] = []
    for run in range(num_pages // run_pages):
        if len(runs) >= max_runs:
            break
        if not is_stored(run):
            runs.append(run)
    return runs


def worth_at_end(mode: str, num_pages: int, is_pinned: bool) -> int:
    """Returns how many leading pages of a text that has ended to write, although no other text has shared them yet."""
    return num_pages if mode == "computed" or (is_pinned and mode != "never") else 0


def worth_at_start(mode: str, num_cached: int) -> int:
    """Returns how many leading pages of a new prompt to write; `num_cached` of its pages were computed before."""
    return 0 if mode == "never" else num_cached
