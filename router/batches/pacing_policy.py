"""Decides how many requests of batches run at once, depending on how much room other requests leave. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.router import BatchConfig


@dataclass(frozen=True, slots=True)
class PoolUse:
    """The requests of all callers at one moment."""

    num_lines: int  # lines of batches in flight at this router
    num_others: int  # other requests in flight, at this router or reported by workers
    num_waiting: int  # requests, including lines, that wait at this router or at workers
    num_decode_workers: int


def lines_at_once(use: PoolUse, config: BatchConfig) -> int:
    """Returns how many lines of batches may be in flight. If more are, they go on, and none is added."""
    if not use.num_decode_workers:
        return 0
    if use.num_waiting:
        return min(use.num_lines, config.max_running)  # there is no room for more
    if use.num_others:
        return min(config.beside * use.num_decode_workers, config.max_running)
    return config.max_running
