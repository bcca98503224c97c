"""Decides which workers may start now, so that a start never makes a serving worker look lost. Pure.

Loading a model takes every core it can get, and a worker that gets no core falls silent and soon counts as lost. So
newcomers start a few at a time, none while a serving worker is silent, and none before a lost worker's successor is
placed. Successors start at once, because capacity is missing until they are ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.pools.pool import ROUTER, Incarnation, Slot, WorkerState
from penstock.types import Role

_CORES_A_START = 2.0  # while workers serve: two cores allow one start at a time, four allow two
_STARTS_A_CORE = 2.0  # while none serves: a start harms nobody, and also waits for disks
_FIRST_STARTS = 4  # lower limit while none serves: a small deployment starts all at once
_PATIENCE = 3  # newcomers stop waiting for a successor after it fails this often in a row


@dataclass(frozen=True, slots=True)
class StartDecision:
    """The actions for workers that do not run yet."""

    begin: tuple[Incarnation, ...]
    withdraw: tuple[Incarnation, ...]  # newcomers that would take the resources of a lost worker's successor


def max_starts(num_cores: float, *, serving: bool) -> int:
    """Returns how many workers may load at once on machines with `num_cores` cores in total."""
    if serving:
        return max(1, int(num_cores / _CORES_A_START))
    return max(_FIRST_STARTS, int(num_cores * _STARTS_A_CORE))


def choose_starts(slots: Sequence[Slot], num_cores: float | None) -> StartDecision:
    """Chooses from the deployment's `slots`. `num_cores` counts its machines' cores; None leaves starts unbounded.

    Decode workers come before prefill workers, whose first request has to pass through one.
    """
    waiting = [slot for slot in slots if slot.state is WorkerState.WAITING and not slot.is_leaving]
    at_once = [slot for slot in waiting if slot.has_served or slot.incarnation.pool_name == ROUTER]
    newcomers = [slot for slot in waiting if slot not in at_once]
    newcomers.sort(key=lambda slot: (slot.incarnation.pool_name != Role.DECODE, slot.incarnation.place))
    blocked = any(_needs_place(slot) for slot in slots)
    begin = [slot.incarnation for slot in at_once]
    if not blocked and not any(slot.state is WorkerState.SILENT for slot in slots):
        free = len(newcomers) if num_cores is None else _free_turns(slots, num_cores) - _num_workers(at_once)
        begin += [slot.incarnation for slot in newcomers[: max(0, free)]]
    return StartDecision(tuple(begin), _find_intruders(slots) if blocked else ())


def _find_intruders(slots: Sequence[Slot]) -> tuple[Incarnation, ...]:
    """Returns the unplaced newcomers that ask for a place: each could get the one that a lost worker leaves."""
    asking = (WorkerState.UNPLACED, WorkerState.STARTING)
    return tuple(
        slot.incarnation
        for slot in slots
        if slot.state in asking and not slot.is_placed and not slot.has_served and slot.incarnation.pool_name != ROUTER
    )


def _needs_place(slot: Slot) -> bool:
    """Returns whether a lost worker's successor is not placed yet."""
    if not slot.has_served or slot.is_leaving or slot.incarnation.pool_name == ROUTER:
        return False
    if slot.state is WorkerState.LOST:
        return slot.failures_in_a_row < _PATIENCE
    return slot.state in (WorkerState.WAITING, WorkerState.STARTING) and not slot.is_placed


def _free_turns(slots: Sequence[Slot], num_cores: float) -> int:
    serving = any(slot.state in (WorkerState.READY, WorkerState.SILENT) for slot in slots if _is_worker(slot))
    loading = [slot for slot in slots if slot.state is WorkerState.STARTING and not slot.is_loaded]
    return max_starts(num_cores, serving=serving) - _num_workers(loading)


def _num_workers(slots: Sequence[Slot]) -> int:
    return sum(map(_is_worker, slots))


def _is_worker(slot: Slot) -> bool:
    return slot.incarnation.pool_name != ROUTER
