"""Schedules seeded faults: workers die, freeze, drain or flip, links are cut or slow, and events are mishandled."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.types import Role
from simulator.fleet import SimulatedFleet
from simulator.request import Outcome

_MIGRATE_S = 0.5  # between two rounds of migrations of a drain
_GROUP_START_S = 0.5  # until the ranks of a group have ended and begun again


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Mean number of each fault in a run, and the longest duration in seconds."""

    kills: float = 1.5
    freezes: float = 1.0
    cuts: float = 1.0
    slow_links: float = 1.0
    event_faults: float = 0.5  # probability that events are mishandled for a while
    abandons: float = 1.0
    drains: float = 0.7  # a successor starts, the worker gets no new requests, and what it still holds is cut off later
    flips: float = 0.3  # the same with a successor of the other role
    ranks: float = 0.3  # a rank of a worker is lost: its steps hang, until the group is ended and starts again
    spares: float = 0.3  # a killed worker's place is taken by a spare, under another name
    migrations: float = 2.0  # what runs on a decode worker migrates to the others; it does in every drain, too
    router_kills: float = 0.5  # its clients continue at another router, or at its successor
    longest_s: float = 6.0


def schedule_faults(fleet: SimulatedFleet, rng: random.Random, until_s: float, rates: FaultRates) -> list[str]:
    """Schedules the faults of a run and returns their descriptions. All are over soon after `until_s`."""
    names = list(fleet.spec.names)
    descriptions: list[str] = []

    def begin(kind: str, what: str, start: Callable[[], None], end: Callable[[], None]) -> None:
        at_s, lasts_s = rng.uniform(0, until_s), rng.uniform(0.05, rates.longest_s)
        fleet.sim.at(at_s, start)
        fleet.sim.at(at_s + lasts_s, end)
        descriptions.append(f"{at_s:.3f} {kind} {what} for {lasts_s:.3f} s")

    for _ in range(_count(rng, rates.kills)):
        name = rng.choice(names)
        begin("kill", name, lambda name=name: _kill(fleet, name), lambda name=name: _restart(fleet, name))  # type: ignore[misc]
    for _ in range(_count(rng, rates.freezes)):
        name = rng.choice(names)
        begin("freeze", name, lambda name=name: _freeze(fleet, name), lambda name=name: _thaw(fleet, name))  # type: ignore[misc]
    network, links = fleet.network, fleet.links
    for _ in range(_count(rng, rates.cuts)):
        one, other = _pair(fleet, rng)
        begin(
            "cut",
            f"{one} {other}",
            lambda one=one, other=other: network.cut(one, other),  # type: ignore[misc]
            lambda one=one, other=other: network.heal(one, other),  # type: ignore[misc]
        )
    for _ in range(_count(rng, rates.slow_links)):
        one, other, factor = *_pair(fleet, rng), rng.choice((10.0, 100.0))
        begin(
            "slow",
            f"{one} {other} {factor:g}",
            lambda one=one, other=other, factor=factor: links.set_slowness(one, other, factor),  # type: ignore[misc]
            lambda one=one, other=other: links.set_slowness(one, other, 1.0),  # type: ignore[misc]
        )
    if rng.random() < rates.event_faults:
        begin("events", "mishandled", lambda: _spoil_events(fleet, rng), lambda: _restore_events(fleet))
    for _ in range(_count(rng, rates.abandons)):
        _abandon(fleet, rng, fleet.outcomes, until_s)
    for number in range(_count(rng, rates.drains) + (num_flips := _count(rng, rates.flips))):
        name = rng.choice(names)
        role = fleet.spec.names[name]
        if number < num_flips:
            role = Role.PREFILL if role is Role.DECODE else Role.DECODE
        begin(
            "flip" if number < num_flips else "drain",
            name,
            lambda name=name, role=role, number=number: _drain(fleet, name, role, number),  # type: ignore[misc]
            lambda name=name: _remove(fleet, name),  # type: ignore[misc]
        )
    for _ in range(_count(rng, rates.ranks)):
        name = rng.choice(names)
        begin("rank", name, lambda name=name: _freeze(fleet, name), lambda name=name: _end_group(fleet, name))  # type: ignore[misc]
    for number in range(_count(rng, rates.spares)):
        name = rng.choice(names)
        begin(
            "spare",
            name,
            lambda name=name: _kill(fleet, name),  # type: ignore[misc]
            lambda name=name, number=number: _take_spare(fleet, name, number),  # type: ignore[misc]
        )
    for _ in range(_count(rng, rates.migrations)):
        name = rng.choice([name for name, role in fleet.spec.names.items() if role is Role.DECODE])
        at_s = rng.uniform(0, until_s)
        fleet.sim.at(at_s, lambda name=name: fleet.migrate_away(name))  # type: ignore[misc]
        descriptions.append(f"{at_s:.3f} migrations from {name}")
    for _ in range(_count(rng, rates.router_kills)):
        name = rng.choice(fleet.spec.router_names)
        begin(
            "router",
            name,
            lambda name=name: fleet.kill_router(name),  # type: ignore[misc]
            lambda name=name: _restart_router(fleet, name),  # type: ignore[misc]
        )
    return sorted(descriptions)


def _drain(fleet: SimulatedFleet, name: str, role: Role, number: int) -> None:
    """Starts a successor and retires the worker, unless it is the last decode worker and its successor is not one."""
    left = [other for other, other_role in fleet.members.items() if other_role is Role.DECODE and other != name]
    if name not in fleet.workers or (role is Role.PREFILL and not left):
        return
    fleet.add_worker(f"{name}-successor-{number}", role)
    fleet.retire(name)
    _migrate_all(fleet, name)


def _migrate_all(fleet: SimulatedFleet, name: str) -> None:
    """Tries again and again until the worker is gone."""
    if name in fleet.workers and name not in fleet.members:
        fleet.migrate_away(name)
        fleet.sim.after(_MIGRATE_S, lambda: _migrate_all(fleet, name))


def _remove(fleet: SimulatedFleet, name: str) -> None:
    if name in fleet.workers and name not in fleet.members:
        fleet.remove_worker(name)


def _count(rng: random.Random, mean: float) -> int:
    """Returns a Poisson count, by waiting times."""
    count, passed = 0, rng.expovariate(1.0)
    while passed < mean:
        count, passed = count + 1, passed + rng.expovariate(1.0)
    return count


def _pair(fleet: SimulatedFleet, rng: random.Random) -> tuple[str, str]:
    """Returns two processes that communicate."""
    names = fleet.spec.names
    decode = rng.choice([name for name, role in names.items() if role is Role.DECODE])
    prefill = [name for name, role in names.items() if role is Role.PREFILL]
    router = rng.choice(fleet.spec.router_names)
    return rng.choice([(router, rng.choice(list(names))), *[(name, decode) for name in prefill]])


def _kill(fleet: SimulatedFleet, name: str) -> None:
    if name in fleet.workers:
        fleet.kill(name)


def _restart(fleet: SimulatedFleet, name: str) -> None:
    if name in fleet.workers and fleet.find(name) is None:
        fleet.start_worker(name)


def _restart_router(fleet: SimulatedFleet, name: str) -> None:
    if fleet.find_router(name) is None:
        fleet.start_router(name)


def _end_group(fleet: SimulatedFleet, name: str) -> None:
    """Ends a worker that has lost a rank, with all its ranks; it starts again empty and as another epoch."""
    _kill(fleet, name)
    fleet.sim.after(_GROUP_START_S, lambda: _restart(fleet, name))


def _take_spare(fleet: SimulatedFleet, name: str, number: int) -> None:
    """Gives a dead worker's role to a spare, unless the worker has been restarted or drained meanwhile."""
    if name in fleet.workers and fleet.find(name) is None and name in fleet.members:
        fleet.add_worker(f"{name}-spare-{number}", fleet.roles[name])
        fleet.retire(name)
        fleet.remove_worker(name)


def _freeze(fleet: SimulatedFleet, name: str) -> None:
    worker = fleet.find(name)
    if worker is not None:
        fleet.network.freeze(worker.node)


def _thaw(fleet: SimulatedFleet, name: str) -> None:
    worker = fleet.find(name)
    if worker is not None:
        fleet.network.thaw(worker.node)


def _spoil_events(fleet: SimulatedFleet, rng: random.Random) -> None:
    faults = fleet.event_faults
    faults.lost, faults.repeated, faults.late = rng.random() * 0.5, rng.random() * 0.5, rng.random() * 0.5


def _restore_events(fleet: SimulatedFleet) -> None:
    faults = fleet.event_faults
    faults.lost = faults.repeated = faults.late = 0.0


def _abandon(fleet: SimulatedFleet, rng: random.Random, outcomes: Sequence[Outcome], until_s: float) -> None:
    outcome = rng.choice(outcomes)
    fleet.sim.at(outcome.request.arrival_s + rng.uniform(0, until_s / 4), lambda: fleet.abandon(outcome))
