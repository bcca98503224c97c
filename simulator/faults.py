"""Faults by seed: which worker dies or freezes, which link is cut or slow, which events go astray, and when."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.types import Role
from simulator.fleet import Fleet
from simulator.request import Outcome

ROUTER = "router"


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How many of each come in a run, on average; how long one lasts, in seconds."""

    kills: float = 1.5
    freezes: float = 1.0
    cuts: float = 1.0
    slow_links: float = 1.0
    event_faults: float = 0.5  # chance that events are mishandled for a while
    abandons: float = 1.0
    longest_s: float = 6.0


def schedule_faults(fleet: Fleet, rng: random.Random, until_s: float, rates: FaultRates) -> list[str]:
    """Draws the faults of a run and puts them on its heap. All are over soon after `until_s`. Returns what they are."""
    names = list(fleet.spec.names)
    told: list[str] = []

    def begin(kind: str, what: str, start: Callable[[], None], end: Callable[[], None]) -> None:
        at_s, lasts_s = rng.uniform(0, until_s), rng.uniform(0.05, rates.longest_s)
        fleet.sim.at(at_s, start)
        fleet.sim.at(at_s + lasts_s, end)
        told.append(f"{at_s:.3f} {kind} {what} for {lasts_s:.3f} s")

    for _ in range(_count(rng, rates.kills)):
        name = rng.choice(names)
        begin("kill", name, lambda name=name: fleet.kill(name), lambda name=name: _restart(fleet, name))  # type: ignore[misc]
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
        begin("events", "astray", lambda: _spoil_events(fleet, rng), lambda: _mend_events(fleet))
    for _ in range(_count(rng, rates.abandons)):
        _abandon(fleet, rng, fleet.outcomes, until_s)
    return sorted(told)


def _count(rng: random.Random, mean: float) -> int:
    """Poisson, by waiting times."""
    count, passed = 0, rng.expovariate(1.0)
    while passed < mean:
        count, passed = count + 1, passed + rng.expovariate(1.0)
    return count


def _pair(fleet: Fleet, rng: random.Random) -> tuple[str, str]:
    """Two that talk to each other."""
    names = fleet.spec.names
    decode = rng.choice([name for name, role in names.items() if role is Role.DECODE])
    prefill = [name for name, role in names.items() if role is Role.PREFILL]
    return rng.choice([(ROUTER, rng.choice(list(names))), *[(name, decode) for name in prefill]])


def _restart(fleet: Fleet, name: str) -> None:
    if fleet.find(name) is None:
        fleet.start_worker(name)


def _freeze(fleet: Fleet, name: str) -> None:
    worker = fleet.find(name)
    if worker is not None:
        fleet.network.freeze(worker.node)


def _thaw(fleet: Fleet, name: str) -> None:
    worker = fleet.find(name)
    if worker is not None:
        fleet.network.thaw(worker.node)


def _spoil_events(fleet: Fleet, rng: random.Random) -> None:
    faults = fleet.event_faults
    faults.lost, faults.repeated, faults.late = rng.random() * 0.5, rng.random() * 0.5, rng.random() * 0.5


def _mend_events(fleet: Fleet) -> None:
    faults = fleet.event_faults
    faults.lost = faults.repeated = faults.late = 0.0


def _abandon(fleet: Fleet, rng: random.Random, outcomes: Sequence[Outcome], until_s: float) -> None:
    outcome = rng.choice(outcomes)
    fleet.sim.at(outcome.request.arrival_s + rng.uniform(0, until_s / 4), lambda: fleet.router.abandon(outcome))
