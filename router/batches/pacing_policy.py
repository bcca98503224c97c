"""Decides how many requests of batches run at once: as many as others leave room for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.router import BatchConfig


@dataclass(frozen=True, slots=True)
class PoolUse:
    """The requests of all callers at a moment."""

    num_lines: int  # of batches, in flight here
    num_others: int  # other requests, at this router or, as far as workers report them, at all
    num_waiting: int  # requests that wait for a place at a router or worker, those of batches included
    num_decode_workers: int


def lines_at_once(use: PoolUse, config: BatchConfig) -> int:
    """Returns how many requests of batches may be in flight; where that is fewer than there are, none is added."""
    if not use.num_decode_workers:
        return 0
    if use.num_waiting:
        return min(use.num_lines, config.max_running)  # there is no room: what runs goes on, and nothing is added
    if use.num_others:
        return min(config.beside * use.num_decode_workers, config.max_running)
    return config.max_running
