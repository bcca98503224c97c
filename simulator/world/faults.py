"""Schedules seeded faults: workers die, freeze, drain or flip, links are cut or slow, and events are mishandled."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.types import Role
from simulator.fleet import SimulatedFleet
from simulator.request import Outcome

_MIGRATE_S = 0.5  # time between two rounds of migrations in a drain
_GROUP_START_S = 0.5  # time until the ranks of a group have ended and started again


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
    flips: float = 0.3  # a drain with a successor of the other role
    ranks: float = 0.3  # a rank of a worker is lost: its steps hang, until the group is ended and starts again
    spares: float = 0.3  # a killed worker's place is taken by a spare, under another name
    migrations: float = 2.0  # the running sequences of a decode worker migrate to the others, as in every drain
    router_kills: float = 0.5  # its clients continue at another router, or at its successor
    longest_s: float = 6.0


def schedule_faults(fleet: SimulatedFleet, rng: random.Random, until_s: float, rates: FaultRates) -> list[str]:
    """Schedules the faults of a run and returns their descriptions. All are over soon after `until_s`."""
    schedule = _FaultSchedule(fleet, rng, until_s, rates)
    schedule.add_process_faults()
    schedule.add_link_faults()
    schedule.add_event_faults()
    schedule.add_abandoned_requests()
    schedule.add_drains_and_flips()
    schedule.add_lost_ranks()
    schedule.add_replacements_by_spares()
    schedule.add_migrations()
    schedule.add_lost_routers()
    return sorted(schedule.descriptions)


class _FaultSchedule:
    """Chooses faults of each kind, their victims and times. A seed gives the same faults only with the same order of
    calls.
    """

    def __init__(self, fleet: SimulatedFleet, rng: random.Random, until_s: float, rates: FaultRates) -> None:
        self.descriptions: list[str] = []
        self._fleet = fleet
        self._rng = rng
        self._until_s = until_s
        self._rates = rates
        self._roles = dict(fleet.spec.names)
        self._names = list(self._roles)

    def add_process_faults(self) -> None:
        fleet = self._fleet
        for _ in range(self._count(self._rates.kills)):
            name = self._rng.choice(self._names)
            self._add("kill", name, partial(_kill, fleet, name), partial(_restart, fleet, name))
        for _ in range(self._count(self._rates.freezes)):
            name = self._rng.choice(self._names)
            self._add("freeze", name, partial(_freeze, fleet, name), partial(_thaw, fleet, name))

    def add_link_faults(self) -> None:
        network, links = self._fleet.network, self._fleet.links
        for _ in range(self._count(self._rates.cuts)):
            pair = self._choose_pair()
            self._add("cut", " ".join(pair), partial(network.cut, *pair), partial(network.heal, *pair))
        for _ in range(self._count(self._rates.slow_links)):
            pair, factor = self._choose_pair(), self._rng.choice((10.0, 100.0))
            slow, restore = partial(links.set_slowness, *pair, factor), partial(links.set_slowness, *pair, 1.0)
            self._add("slow", f"{' '.join(pair)} {factor:g}", slow, restore)

    def add_event_faults(self) -> None:
        if self._rng.random() < self._rates.event_faults:
            spoil = partial(_spoil_events, self._fleet, self._rng)
            self._add("events", "mishandled", spoil, partial(_restore_events, self._fleet))

    def add_abandoned_requests(self) -> None:
        for _ in range(self._count(self._rates.abandons)):
            _abandon(self._fleet, self._rng, self._fleet.outcomes, self._until_s)

    def add_drains_and_flips(self) -> None:
        num_drains, num_flips = self._count(self._rates.drains), self._count(self._rates.flips)
        for number in range(num_drains + num_flips):
            name, is_flip = self._rng.choice(self._names), number < num_flips
            role = self._roles[name]
            if is_flip:
                role = Role.PREFILL if role is Role.DECODE else Role.DECODE
            drain = partial(_drain, self._fleet, name, role, number)
            self._add("flip" if is_flip else "drain", name, drain, partial(_remove, self._fleet, name))

    def add_lost_ranks(self) -> None:
        fleet = self._fleet
        for _ in range(self._count(self._rates.ranks)):
            name = self._rng.choice(self._names)
            self._add("rank", name, partial(_freeze, fleet, name), partial(_end_group, fleet, name))

    def add_replacements_by_spares(self) -> None:
        fleet = self._fleet
        for number in range(self._count(self._rates.spares)):
            name = self._rng.choice(self._names)
            self._add("spare", name, partial(_kill, fleet, name), partial(_take_spare, fleet, name, number))

    def add_migrations(self) -> None:
        for _ in range(self._count(self._rates.migrations)):
            name = self._rng.choice(self._decode_names())
            at_s = self._rng.uniform(0, self._until_s)
            self._fleet.sim.at(at_s, partial(self._fleet.migrate_away, name))
            self.descriptions.append(f"{at_s:.3f} migrations from {name}")

    def add_lost_routers(self) -> None:
        fleet = self._fleet
        for _ in range(self._count(self._rates.router_kills)):
            name = self._rng.choice(fleet.spec.router_names)
            self._add("router", name, partial(fleet.kill_router, name), partial(_restart_router, fleet, name))

    def _add(self, kind: str, what: str, start: Callable[[], None], end: Callable[[], None]) -> None:
        """Chooses when a fault starts and ends, and schedules both."""
        at_s, lasts_s = self._rng.uniform(0, self._until_s), self._rng.uniform(0.05, self._rates.longest_s)
        self._fleet.sim.at(at_s, start)
        self._fleet.sim.at(at_s + lasts_s, end)
        self.descriptions.append(f"{at_s:.3f} {kind} {what} for {lasts_s:.3f} s")

    def _count(self, mean: float) -> int:
        """Returns a Poisson count, by waiting times."""
        count, passed = 0, self._rng.expovariate(1.0)
        while passed < mean:
            count, passed = count + 1, passed + self._rng.expovariate(1.0)
        return count

    def _choose_pair(self) -> tuple[str, str]:
        """Returns two processes that communicate."""
        decode = self._rng.choice(self._decode_names())
        prefill = [name for name, role in self._roles.items() if role is Role.PREFILL]
        router = self._rng.choice(self._fleet.spec.router_names)
        return self._rng.choice([(router, self._rng.choice(self._names)), *[(name, decode) for name in prefill]])

    def _decode_names(self) -> list[str]:
        return [name for name, role in self._roles.items() if role is Role.DECODE]


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
