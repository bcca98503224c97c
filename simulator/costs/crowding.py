"""Finds how crowded the cores of a machine were during measured steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, product
from math import prod

import numpy as np

from penstock.types import Role
from simulator.costs.machine import SharedCores
from simulator.costs.records import StepRecord

_LEAST_S = 0.02  # time between two reports of a worker, unless a step takes longer


def crowded_slowness(records: Sequence[StepRecord], cores: SharedCores) -> np.ndarray:
    """Returns how much longer the steps of each record took than on a core of their own.

    A worker is busy before each of its reports for as long as the steps in it took; routers and clients for what the
    messages of these steps cost them.
    """
    return np.array([_slowness(record, records, cores) for record in records])


def _slowness(record: StepRecord, records: Sequence[StepRecord], cores: SharedCores) -> float:
    begin_s, length_s = _begin_s(record), record.at_s - _begin_s(record)
    busy: dict[str, float] = {}  # share of this record's time, by worker
    front = 0.0
    for other in records:
        both_s = min(record.at_s, other.at_s) - max(begin_s, _begin_s(other))
        if both_s <= 0:
            continue
        part = both_s / (other.at_s - _begin_s(other)) / length_s
        busy[other.worker_id] = busy.get(other.worker_id, 0.0) + part * other.totals.seconds
        front += part * cores.frame_s * (other.totals.steps if other.role is Role.DECODE else 0)
    busy.pop(record.worker_id, None)
    shares = [min(1.0, share) for share in (*busy.values(), front)]
    threads = [*[cores.worker_threads] * len(busy), 1]
    mean = 0.0
    for are_busy in product((False, True), repeat=len(shares)):
        chance = prod(share if is_busy else 1.0 - share for share, is_busy in zip(shares, are_busy, strict=True))
        mean += chance * cores.slowness(cores.worker_threads + sum(compress(threads, are_busy)))
    return mean


def _begin_s(record: StepRecord) -> float:
    return record.at_s - max(record.totals.seconds, _LEAST_S)
