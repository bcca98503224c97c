"""Decides which workers may start now, so that starts never cost a serving worker its place. Pure.

Loading a model takes every core that it can get, and a worker that gets no core is silent and soon counts as lost. So
newcomers start a few at a time, none while a serving worker is silent, and none before the successor of a lost worker
has its place. Successors start at once: fewer than before serve until they are ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.pools.pool import ROUTER, Incarnation, Slot, WorkerState
from penstock.types import Role

_CORES_A_START = 2.0  # while workers serve: one start at a time on two cores, two on four
_STARTS_A_CORE = 2.0  # while none serves: nothing suffers, and processes also wait for disks
_FIRST_STARTS = 4  # while none serves, at least: a small deployment starts at once
_PATIENCE = 3  # failures in a row of a successor, after which newcomers no longer wait for it


@dataclass(frozen=True, slots=True)
class StartDecision:
    """The action for workers that do not run yet."""

    begin: tuple[Incarnation, ...]
    withdraw: tuple[Incarnation, ...]  # newcomers that would take the place of a lost worker's successor


def max_starts(num_cores: float, *, serving: bool) -> int:
    """Returns how many workers may load at once on machines with so many cores in all."""
    if serving:
        return max(1, int(num_cores / _CORES_A_START))
    return max(_FIRST_STARTS, int(num_cores * _STARTS_A_CORE))


def choose_starts(slots: Sequence[Slot], num_cores: float | None) -> StartDecision:
    """`slots` are all of the deployment, `num_cores` those of its machines; None: starts are not bounded.

    Decode workers come before prefill workers, which can only answer their first request through one.
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
    """Returns the newcomers that ask for a place and have none: each would get one that a lost worker leaves."""
    asking = (WorkerState.UNPLACED, WorkerState.STARTING)
    return tuple(
        slot.incarnation
        for slot in slots
        if slot.state in asking and not slot.is_placed and not slot.has_served and slot.incarnation.pool_name != ROUTER
    )


def _needs_place(slot: Slot) -> bool:
    """Returns whether a lost worker's successor has not asked for its place yet, or has no answer."""
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
