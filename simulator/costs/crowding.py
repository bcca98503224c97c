"""Finds how crowded the cores of a machine were during measured steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.types import Role
from simulator.costs.machine import SharedCores
from simulator.costs.records import StepRecord

_LEAST_S = 0.02  # time between two reports of a worker, unless a step takes longer


def crowded_slowness(records: Sequence[StepRecord], cores: SharedCores) -> np.ndarray:
    """Returns how much longer the steps of each record took than on cores of their own.

    A worker is busy before each of its reports for as long as the steps in it took; routers and clients for what the
    messages of these steps cost them. Takes time in proportion to R log R for each worker.

    R: records, W: other workers that are busy at once.
    """
    ends_R = np.array([record.at_s for record in records], float)
    seconds_R = np.array([record.totals.seconds for record in records], float)
    begins_R = ends_R - np.maximum(seconds_R, _LEAST_S)
    threads_R = np.array([cores.step_threads(record.kind) for record in records], float)
    workers_R = np.array([record.worker_id for record in records])

    def shares(chosen_R: np.ndarray, work_R: np.ndarray) -> np.ndarray:
        """Returns the chosen records' work in the time of each record, relative to that time."""
        return _work_within(begins_R, ends_R, begins_R[chosen_R], ends_R[chosen_R], work_R[chosen_R])

    busy_s = thread_s = np.zeros(len(records))
    chances_RW = np.ones((len(records), 1))  # of so many other workers being busy at once
    for worker in dict.fromkeys(workers_R):
        others_R = workers_R != worker
        share_R = np.where(others_R, shares(~others_R, seconds_R), 0.0)
        busy_s = busy_s + share_R
        thread_s = thread_s + np.where(others_R, shares(~others_R, seconds_R * threads_R), 0.0)
        chances_RW = _one_more(chances_RW, share_R)
    is_decode_R = np.array([record.role is Role.DECODE for record in records], bool)
    front_R = np.minimum(1.0, shares(is_decode_R, np.array([_front_s(record, cores) for record in records])))
    others_RW = np.outer(thread_s / np.maximum(busy_s, 1e-12), np.arange(chances_RW.shape[1]))
    alone_RW, beside_front_RW = (
        np.maximum(1.0, (threads_R[:, None] + others_RW + front) / cores.num_cores) for front in (0, 1)
    )
    means_RW = alone_RW * (1.0 - front_R)[:, None] + beside_front_RW * front_R[:, None]
    return (chances_RW * means_RW).sum(axis=1)


def _front_s(record: StepRecord, cores: SharedCores) -> float:
    """Returns the processor time of routers and clients for the messages of a decode worker's steps."""
    totals = record.totals
    num_tokens = 0 if record.has_prompts else totals.tokens
    return sum(thread.frame_s * totals.steps + thread.token_s * num_tokens for thread in (cores.router, cores.client))


def _work_within(
    from_R: np.ndarray, until_R: np.ndarray, begins_I: np.ndarray, ends_I: np.ndarray, work_I: np.ndarray
) -> np.ndarray:
    """Returns the work done in each time R relative to its length, if that of each interval I is spread evenly."""
    if not len(work_I):
        return np.zeros(len(from_R))
    rates_I = work_I / (ends_I - begins_I)
    times, rises = np.concatenate((begins_I, ends_I)), np.concatenate((rates_I, -rates_I))
    order = np.argsort(times, kind="stable")
    times, rates = times[order], np.cumsum(rises[order])
    done = np.concatenate(([0.0], np.cumsum(np.diff(times) * rates[:-1])))
    return (np.interp(until_R, times, done) - np.interp(from_R, times, done)) / (until_R - from_R)


def _one_more(chances_RW: np.ndarray, share_R: np.ndarray) -> np.ndarray:
    """Returns the chances of each number of busy workers with a further worker that is busy for that share."""
    share_R1 = np.minimum(1.0, share_R)[:, None]
    idle = np.zeros((len(chances_RW), 1))
    return np.hstack((chances_RW * (1.0 - share_R1), idle)) + np.hstack((idle, chances_RW * share_R1))
