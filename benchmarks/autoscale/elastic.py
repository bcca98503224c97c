"""Pools that change while they serve, in virtual time: workers take a while to start, drain and flip.

A `Scaler` decides: the real autoscaler or a baseline. `ElasticFleet` owns the desired sizes and carries out decisions
on a deployment, which only serves requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from benchmarks.autoscale.coarse_fleet import CoarseFleet
from cluster.scaling.autoscaler_policy import AutoscalerPolicy
from cluster.scaling.signals import Change, DemandSignal, Flip, PoolSignal, Resize, ScalingRecord, Signals, WorkerSignal
from penstock.config.autoscaler import SloConfig
from penstock.types import Role
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.request import Outcome, TraceRequest
from simulator.workers.prefill_model import PrefillModel

_FLIP_S = 1.0  # once the worker is empty; its cache counts as lost, which is worse than in reality
_DRAIN_CHECK_S = 1.0  # time between two checks of draining workers
_EMPTY_CHECKS = 2  # checks in a row that find it empty, after which a worker has drained


class Scaler(Protocol):
    interval_s: float

    def decide(self, signals: Signals, now_s: float) -> Sequence[Change]: ...

    def on_started(self, after_s: float) -> None: ...


class DetailedDeployment:
    """Serves with a `SimulatedFleet`, which simulates every step, page and token."""

    def __init__(self, spec: FleetSpec, seed: int) -> None:
        self.fleet = SimulatedFleet(spec, seed)
        self.sim, self.outcomes = self.fleet.sim, self.fleet.outcomes
        self.on_end: Callable[[Outcome], None] = lambda outcome: None
        self.submit, self.run = self.fleet.submit, self.fleet.run
        self.add_worker, self.remove_worker = self.fleet.add_worker, self.fleet.remove_worker
        self.retire = self.fleet.retire
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


ElasticDeployment = DetailedDeployment | CoarseFleet


class PolicyScaler:
    """Decides with the real autoscaler."""

    def __init__(self, autoscaler: AutoscalerPolicy) -> None:
        self.interval_s = autoscaler.config.interval_s
        self.records: list[ScalingRecord] = []  # records of decisions that changed a pool
        self._autoscaler = autoscaler

    def decide(self, signals: Signals, now_s: float) -> Sequence[Change]:
        decision = self._autoscaler.decide(signals, now_s)
        self.records += [each for each in decision.records if each.decided != each.current]
        return decision.changes

    def on_started(self, after_s: float) -> None:
        self._autoscaler.on_started(after_s)


@dataclass(slots=True)
class _DemandCounts:
    """Counts demand as a router does."""

    demand: DemandSignal = field(default_factory=DemandSignal)

    def add(self, **more: int) -> None:
        now = {name: getattr(self.demand, name) + count for name, count in more.items()}
        self.demand = replace(self.demand, **now)


class ElasticFleet:
    """Owns the pools' desired sizes and the workers that start or drain."""

    def __init__(
        self,
        spec: FleetSpec,
        seed: int,
        scaler: Scaler,
        slo: SloConfig,
        start_s: float,
        make: Callable[[FleetSpec, int], ElasticDeployment] = DetailedDeployment,
        warm_s: float = 0.0,
    ) -> None:
        """`warm_s` is the end of the warm-up, in which the scaler first sees the traffic; callers count it
        separately.
        """
        self.fleet = make(spec, seed)
        self.worker_s = 0.0  # seconds of all workers, from the decision to start each to its end
        self.num_changes = 0
        self.warm_worker_s, self.warm_changes = 0.0, 0  # counted until `warm_s`
        self._scaler = scaler
        self._slo = slo
        self._start_s = start_s
        self._desired = {Role.PREFILL: spec.num_prefill, Role.DECODE: spec.num_decode}
        self._starting: dict[Role, list[float]] = {role: [] for role in Role}  # the times at which they were ordered
        self._draining: dict[str, tuple[Role | None, int]] = {}  # the next role, and the checks that found it empty
        self._next = {Role.PREFILL: spec.num_prefill, Role.DECODE: spec.num_decode}
        self._counts = _DemandCounts()
        self._open: list[Outcome] = []
        self._last_s = 0.0
        self.fleet.on_end = self._count
        self.fleet.sim.after(_DRAIN_CHECK_S, self._check_draining)
        self.fleet.sim.after(scaler.interval_s, self._decide)
        self.fleet.sim.at(warm_s, self._note_warm)

    def run(self, requests: Sequence[TraceRequest]) -> list[Outcome]:
        for request in requests:
            outcome = self.fleet.submit(request)
            self.fleet.sim.at(request.arrival_s, lambda outcome=outcome: self._arrive(outcome))  # type: ignore[misc]
        self.fleet.run()
        self._account()
        return self.fleet.outcomes

    # Signals for the scaler.

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
        begun = [each for each in self._open if each.ttft_s is not None]
        if begun:
            in_time = sum(has_prompt_start(each, self._slo) for each in begun)
            self._counts.add(first_tokens=len(begun), first_tokens_in_time=in_time)
        self._open = [each for each in self._open if each.ttft_s is None and not each.num_ends]

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

    # The scaler's decisions.

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
        workers = self._workers(role)
        lacking = self._desired[role] - len(workers) - len(self._starting[role])
        for _ in range(lacking):
            self._begin_start(role, self._start_s)
        for _ in range(min(-lacking, len(self._starting[role]))):
            self._account()
            self._starting[role].pop()  # cancels its start
            lacking += 1
        for name in sorted(workers, key=self._num_open)[: max(0, -lacking)]:
            self._drain(name, None)

    def _workers(self, role: Role) -> list[str]:
        """Returns the workers of a pool; a flipping worker already counts in its next pool."""
        staying = [name for name in self.fleet.names(role) if name not in self._draining]
        flipping = [name for name, (to_role, _) in self._draining.items() if to_role is role]
        return staying + flipping

    def _num_open(self, name: str) -> float:
        """Ranks workers for draining: the emptiest first, flipping ones never."""
        return float("inf") if name in self._draining else self.fleet.num_open(name)

    def _begin_start(self, role: Role, start_s: float, is_flip: bool = False) -> None:
        self._account()
        since_s = self.fleet.sim.now_s
        self._starting[role].append(since_s)

        def end_start() -> None:
            if since_s in self._starting[role]:
                self._starting[role].remove(since_s)
                self._add(role)
                if not is_flip:
                    self._scaler.on_started(start_s)

        self.fleet.sim.after(start_s, end_start)

    def _add(self, role: Role) -> None:
        self._account()
        number, self._next[role] = self._next[role], self._next[role] + 1
        self.fleet.add_worker(f"{role.value}-{number}", role)

    def _flip(self, flip: Flip) -> None:
        names = [name for name in self.fleet.names(flip.from_role) if name not in self._draining]
        self._desired[flip.from_role] -= 1
        self._desired[flip.to_role] += 1
        self._drain(min(names, key=self._num_open), flip.to_role)

    def _drain(self, name: str, to_role: Role | None) -> None:
        self._draining[name] = (to_role, 0)
        self.fleet.retire(name)

    def _check_draining(self) -> None:
        for name, (to_role, checks) in list(self._draining.items()):
            checks = checks + 1 if not self.fleet.num_open(name) else 0
            self._draining[name] = (to_role, checks)
            if checks >= _EMPTY_CHECKS:
                self._account()
                del self._draining[name]
                self.fleet.remove_worker(name)
                if to_role is not None:
                    self._begin_start(to_role, _FLIP_S, is_flip=True)
        self.fleet.sim.after(_DRAIN_CHECK_S, self._check_draining)

    def _note_warm(self) -> None:
        self._account()
        self.warm_worker_s, self.warm_changes = self.worker_s, self.num_changes

    def _account(self) -> None:
        """Adds up worker seconds; called before the number of workers changes."""
        now_s = self.fleet.sim.now_s
        count = sum(len(self.fleet.names(role)) for role in Role) + sum(map(len, self._starting.values()))
        self.worker_s += count * (now_s - self._last_s)
        self._last_s = now_s


def has_prompt_start(outcome: Outcome, slo: SloConfig) -> bool:
    """Returns whether the first token came in time."""
    return outcome.ttft_s is not None and outcome.ttft_s <= slo.first_token_s(outcome.request.num_input_tokens)


def is_good(outcome: Outcome, slo: SloConfig) -> bool:
    """Returns whether a request completed within both SLOs."""
    return outcome.is_complete and has_prompt_start(outcome, slo) and outcome.tpot_s <= slo.itl_s
