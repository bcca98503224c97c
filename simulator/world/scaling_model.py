"""Runs the real autoscaler over a fleet in virtual time: it starts, drains and flips workers while they serve.

Drained workers end once they are empty, or after `_PATIENCE_S` with what they still hold. A flipped worker is one that
drains and returns in the other role, under another name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.scaling.autoscaler_policy import AutoscalerPolicy
from cluster.scaling.signals import DemandSignal, Flip, PoolBounds, PoolSignal, Signals, WorkerSignal
from penstock.config.autoscaler import AutoscalerConfig, SloConfig
from penstock.types import Role
from simulator.fleet import SimulatedFleet
from simulator.request import Outcome
from simulator.routers.follower_model import Worker
from simulator.workers.prefill_model import PrefillModel

_CHECK_S = 0.1  # time between two checks of a draining worker
_PATIENCE_S = 5.0


class ScalingModel:
    """Decides every `config.interval_s` until `until_s`, and carries the decisions out."""

    def __init__(
        self, fleet: SimulatedFleet, config: AutoscalerConfig, bounds: Mapping[Role, PoolBounds], until_s: float
    ) -> None:
        self.num_flips = 0
        self.num_resizes = 0
        self._fleet = fleet
        self._slo = config.slo
        self._interval_s = config.interval_s
        self._until_s = until_s
        self._policy = AutoscalerPolicy(config, bounds, fleet.spec.decode.max_batch_sequences)
        self._desired = {Role.PREFILL: fleet.spec.num_prefill, Role.DECODE: fleet.spec.num_decode}
        self._number = 0
        fleet.sim.after(self._interval_s, self._decide)

    def _decide(self) -> None:
        now_s = self._fleet.sim.now_s
        for change in self._policy.decide(self._signals(), now_s).changes:
            if isinstance(change, Flip):
                self.num_flips += 1
                self._desired[change.from_role] -= 1
                self._desired[change.to_role] += 1
                self._drain(change.from_role, change.to_role)
            else:
                self.num_resizes += 1
                self._resize(change.role, change.replicas)
        if now_s + self._interval_s < self._until_s:
            self._fleet.sim.after(self._interval_s, self._decide)

    def _signals(self) -> Signals:
        pools = {
            role: PoolSignal(
                self._desired[role],
                tuple(WorkerSignal(each.worker_id, each.load(), 0.0, each.node.epoch) for each in self._serving(role)),
            )
            for role in Role
        }
        return Signals(pools, demand_of(self._fleet.outcomes, self._fleet.sim.now_s, self._slo))

    def _serving(self, role: Role) -> list[Worker]:
        found = [self._fleet.find(name) for name, of_role in self._fleet.members.items() if of_role is role]
        return [worker for worker in found if worker is not None]

    def _resize(self, role: Role, replicas: int) -> None:
        more = replicas - self._desired[role]
        self._desired[role] = replicas
        for _ in range(more):
            self._start(role)
        for _ in range(-more):
            self._drain(role, None)

    def _start(self, role: Role) -> None:
        self._number += 1
        self._fleet.add_worker(f"{role}-scaled-{self._number}", role)

    def _drain(self, role: Role, next_role: Role | None) -> None:
        """Drains the emptiest worker of a pool, but never the last one."""
        serving = sorted(self._serving(role), key=num_held)
        if len(serving) > 1:
            name = serving[0].node.name
            self._fleet.retire(name)
            self._fleet.migrate_away(name)
            end_s = self._fleet.sim.now_s + _PATIENCE_S
            self._fleet.sim.after(_CHECK_S, lambda: self._end_when_empty(name, next_role, end_s))

    def _end_when_empty(self, name: str, next_role: Role | None, end_s: float) -> None:
        fleet = self._fleet
        worker = fleet.find(name)
        if worker is not None and num_held(worker) and fleet.sim.now_s < end_s:
            fleet.sim.after(_CHECK_S, lambda: self._end_when_empty(name, next_role, end_s))
            return
        if name in fleet.workers:
            fleet.remove_worker(name)
        if next_role is not None:
            self._start(next_role)


def num_held(worker: Worker) -> int:
    """Returns how many requests or jobs a worker has."""
    return worker.num_open if isinstance(worker, PrefillModel) else worker.num_held + worker.transfers.num_open


def demand_of(outcomes: Sequence[Outcome], now_s: float, slo: SloConfig) -> DemandSignal:
    """Returns the totals that routers would report by now."""
    arrived = [outcome for outcome in outcomes if outcome.request.arrival_s <= now_s]
    lengths = [outcome.request.num_input_tokens for outcome in arrived]
    begun_s = [outcome.ttft_s for outcome in arrived if outcome.ttft_s is not None]
    complete = [outcome for outcome in arrived if outcome.is_complete]
    tpots_s = [outcome.tpot_s for outcome in complete if outcome.num_tokens > 1]
    return DemandSignal(
        requests=len(arrived),
        prompt_tokens=sum(lengths),
        squared_prompt_tokens=sum(length * length for length in lengths),
        cached_tokens=sum(outcome.cached_tokens for outcome in complete),
        ended_prompt_tokens=sum(outcome.request.num_input_tokens for outcome in complete),
        first_tokens=len(begun_s),
        first_tokens_in_time=sum(ttft_s <= slo.ttft_s for ttft_s in begun_s),
        ended=len(tpots_s),
        ended_in_time=sum(tpot_s <= slo.itl_s for tpot_s in tpots_s),
    )
