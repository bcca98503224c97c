"""Pools that change while they serve, in virtual time: workers that take a while to start, drain before they go, and
change their role. What decides is a `Scaler`: the real autoscaler, or one to hold it against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cluster.autoscaler import Autoscaler
from cluster.scaling_signals import Change, DemandSignal, Flip, PoolSignal, Record, Resize, Signals, WorkerSignal
from penstock.autoscaler_config import SloConfig
from penstock.types import Role
from simulator.events import Simulation
from simulator.fleet import Fleet, FleetSpec
from simulator.prefill_model import PrefillModel
from simulator.request import Outcome, TraceRequest

_FLIP_S = 1.0  # once it is empty; its cache is taken to be lost, which is worse than it is
_LOOK_S = 1.0  # between two looks at workers that drain
_QUIET_LOOKS = 2


class Scaler(Protocol):
    interval_s: float

    def decide(self, signals: Signals, now_s: float) -> Sequence[Change]: ...

    def on_started(self, after_s: float) -> None: ...


class Deployment(Protocol):
    """What changes its size: in full (`Detailed`), or coarsely (`simulator.coarse`)."""

    sim: Simulation
    outcomes: list[Outcome]
    on_end: Callable[[Outcome], None]  # called for each request that has ended

    def submit(self, request: TraceRequest) -> Outcome: ...

    def run(self) -> None:
        """Until every request submitted so far has ended."""
        ...

    def names(self, role: Role) -> list[str]: ...

    def signal(self, name: str) -> WorkerSignal: ...

    def num_open(self, name: str) -> int:
        """Requests that it has."""
        ...

    def add_worker(self, name: str, role: Role) -> object: ...

    def retire(self, name: str) -> None:
        """It gets no new requests, and keeps what it has."""
        ...

    def remove_worker(self, name: str) -> None: ...


class Detailed:
    """A `Fleet`: every step, page and token."""

    def __init__(self, spec: FleetSpec, seed: int) -> None:
        self.fleet = Fleet(spec, seed)
        self.sim, self.outcomes = self.fleet.sim, self.fleet.outcomes
        self.on_end: Callable[[Outcome], None] = lambda outcome: None
        self.submit, self.run = self.fleet.submit, self.fleet.run
        self.add_worker, self.remove_worker = self.fleet.add_worker, self.fleet.remove_worker
        self.retire = self.fleet.router.retire
        count_end = self.fleet.router.on_end

        def on_end(outcome: Outcome) -> None:
            count_end(outcome)
            self.on_end(outcome)

        self.fleet.router.on_end = on_end

    def names(self, role: Role) -> list[str]:
        return [name for name, worker in self.fleet.workers.items() if worker.role is role]

    def signal(self, name: str) -> WorkerSignal:
        worker = self.fleet.workers[name]
        return WorkerSignal(worker.worker_id, worker.load(), 0.0, worker.node.epoch)

    def num_open(self, name: str) -> int:
        worker = self.fleet.workers[name]
        return worker.num_open if isinstance(worker, PrefillModel) else worker.num_held


class Planned:
    """The real autoscaler."""

    def __init__(self, autoscaler: Autoscaler) -> None:
        self.interval_s = autoscaler.config.interval_s
        self.records: list[Record] = []  # of what was changed
        self._autoscaler = autoscaler

    def decide(self, signals: Signals, now_s: float) -> Sequence[Change]:
        decision = self._autoscaler.decide(signals, now_s)
        self.records += [one for one in decision.records if one.decided != one.current]
        return decision.changes

    def on_started(self, after_s: float) -> None:
        self._autoscaler.on_started(after_s)


@dataclass(slots=True)
class _Counts:
    """As a router counts them."""

    demand: DemandSignal = field(default_factory=DemandSignal)

    def add(self, **more: int) -> None:
        now = {name: getattr(self.demand, name) + count for name, count in more.items()}
        self.demand = replace(self.demand, **now)


class ElasticFleet:
    """Owns the pools' desired sizes and the workers on their way in and out."""

    def __init__(
        self,
        spec: FleetSpec,
        seed: int,
        scaler: Scaler,
        slo: SloConfig,
        start_s: float,
        make: Callable[[FleetSpec, int], Deployment] = Detailed,
        warm_s: float = 0.0,
    ) -> None:
        """Until `warm_s` a scaler gets to know the traffic; a caller may leave that out of what it counts."""
        self.fleet = make(spec, seed)
        self.worker_s = 0.0  # of all workers, from being asked for to being gone
        self.num_changes = 0
        self.warm_worker_s, self.warm_changes = 0.0, 0  # what of these came before `warm_s`
        self._scaler = scaler
        self._slo = slo
        self._start_s = start_s
        self._desired = {Role.PREFILL: spec.num_prefill, Role.DECODE: spec.num_decode}
        self._starting: dict[Role, list[float]] = {role: [] for role in Role}  # since when
        self._draining: dict[str, tuple[Role | None, int]] = {}  # the role to come, and looks that found it empty
        self._flipping = 0
        self._next = {Role.PREFILL: spec.num_prefill, Role.DECODE: spec.num_decode}
        self._counts = _Counts()
        self._open: list[Outcome] = []
        self._last_s = 0.0
        self.fleet.on_end = self._count
        self.fleet.sim.after(_LOOK_S, self._look)
        self.fleet.sim.after(scaler.interval_s, self._decide)
        self.fleet.sim.at(warm_s, self._note_warm)

    def run(self, requests: Sequence[TraceRequest]) -> list[Outcome]:
        for request in requests:
            outcome = self.fleet.submit(request)
            self.fleet.sim.at(request.arrival_s, lambda outcome=outcome: self._arrive(outcome))  # type: ignore[misc]
        self.fleet.run()
        self._account()
        return self.fleet.outcomes

    # What the scaler is told.

    def _arrive(self, outcome: Outcome) -> None:
        length = outcome.request.num_input_tokens
        self._counts.add(requests=1, prompt_tokens=length, squared_prompt_tokens=length * length)
        self._open.append(outcome)

    def _count(self, outcome: Outcome) -> None:
        if outcome.num_ends != 1 or not outcome.is_complete:
            return
        prompt = outcome.request.num_input_tokens
        self._counts.add(ended_prompt_tokens=prompt, cached_tokens=outcome.cached_tokens)
        if outcome.num_tokens > 1:
            self._counts.add(ended=1, ended_in_time=int(outcome.tpot_s <= self._slo.itl_s))

    def _count_first_tokens(self) -> None:
        begun = [one for one in self._open if one.ttft_s is not None]
        if begun:
            in_time = sum(is_prompt(one, self._slo) for one in begun)
            self._counts.add(first_tokens=len(begun), first_tokens_in_time=in_time)
        self._open = [one for one in self._open if one.ttft_s is None and not one.num_ends]

    def _signals(self) -> Signals:
        pools = {
            role: PoolSignal(
                self._desired[role],
                tuple(self.fleet.signal(name) for name in self.fleet.names(role) if name not in self._draining),
                tuple(self._starting[role]),
            )
            for role in Role
        }
        return Signals(pools, self._counts.demand)

    # What it decides.

    def _decide(self) -> None:
        self._count_first_tokens()
        for change in self._scaler.decide(self._signals(), self.fleet.sim.now_s):
            self.num_changes += 1
            if isinstance(change, Resize):
                self._desired[change.role] = change.replicas
            else:
                self._flip(change)
        for role in Role:
            self._reconcile(role)
        self.fleet.sim.after(self._scaler.interval_s, self._decide)

    def _reconcile(self, role: Role) -> None:
        there = self._ready(role)
        lacking = self._desired[role] - len(there) - len(self._starting[role])
        for _ in range(lacking):
            self._begin_start(role)
        for _ in range(min(-lacking, len(self._starting[role]))):
            self._account()
            self._starting[role].pop()  # asked for in vain
            lacking += 1
        for name in sorted(there, key=self._work)[: max(0, -lacking)]:
            self._drain(name, None)

    def _ready(self, role: Role) -> list[str]:
        """Those that flip are already counted where they go to."""
        staying = [name for name in self.fleet.names(role) if name not in self._draining]
        coming = [name for name, (to, _) in self._draining.items() if to is role]
        return staying + coming

    def _work(self, name: str) -> float:
        """The least goes first; one that flips never."""
        return float("inf") if name in self._draining else self.fleet.num_open(name)

    def _begin_start(self, role: Role) -> None:
        self._account()
        since_s = self.fleet.sim.now_s
        self._starting[role].append(since_s)
        self.fleet.sim.after(self._start_s, lambda: self._end_start(role, since_s))

    def _end_start(self, role: Role, since_s: float) -> None:
        if since_s not in self._starting[role]:
            return
        self._starting[role].remove(since_s)
        self._add(role)
        self._scaler.on_started(self._start_s)

    def _add(self, role: Role) -> None:
        self._account()
        number, self._next[role] = self._next[role], self._next[role] + 1
        self.fleet.add_worker(f"{role.value}-{number}", role)

    def _flip(self, flip: Flip) -> None:
        names = [name for name in self.fleet.names(flip.from_role) if name not in self._draining]
        self._desired[flip.from_role] -= 1
        self._desired[flip.to_role] += 1
        self._drain(min(names, key=self._work), flip.to_role)

    def _drain(self, name: str, to_role: Role | None) -> None:
        self._draining[name] = (to_role, 0)
        self.fleet.retire(name)

    def _look(self) -> None:
        for name, (to_role, quiet) in list(self._draining.items()):
            quiet = quiet + 1 if not self.fleet.num_open(name) else 0
            self._draining[name] = (to_role, quiet)
            if quiet >= _QUIET_LOOKS:
                self._account()
                del self._draining[name]
                self.fleet.remove_worker(name)
                if to_role is not None:
                    self._flipping += 1
                    self._add_flipped(to_role)
        self.fleet.sim.after(_LOOK_S, self._look)

    def _add_flipped(self, role: Role) -> None:
        since_s = self.fleet.sim.now_s
        self._starting[role].append(since_s)

        def arrive() -> None:
            self._flipping -= 1
            if since_s in self._starting[role]:
                self._starting[role].remove(since_s)
                self._add(role)

        self.fleet.sim.after(_FLIP_S, arrive)

    def _note_warm(self) -> None:
        self._account()
        self.warm_worker_s, self.warm_changes = self.worker_s, self.num_changes

    def _account(self) -> None:
        """Called before the number of workers changes."""
        now_s = self.fleet.sim.now_s
        count = sum(len(self.fleet.names(role)) for role in Role) + sum(map(len, self._starting.values()))
        self.worker_s += count * (now_s - self._last_s)
        self._last_s = now_s


def is_prompt(outcome: Outcome, slo: SloConfig) -> bool:
    """Its first token came in time."""
    return outcome.ttft_s is not None and outcome.ttft_s <= slo.first_token_s(outcome.request.num_input_tokens)


def is_good(outcome: Outcome, slo: SloConfig) -> bool:
    return outcome.is_complete and is_prompt(outcome, slo) and outcome.tpot_s <= slo.itl_s
