"""Runs the rebalancing of decode workers (`cluster.lifecycle.migrate.rebalance_policy`) in virtual time."""

from __future__ import annotations

from benchmarks.autoscale.coarse_fleet import CoarseFleet
from cluster.lifecycle.migrate.migration_policy import TargetRoom
from cluster.lifecycle.migrate.rebalance_policy import RebalancePolicy, choose_sequences, fill_of
from penstock.config.autoscaler import BalanceConfig
from penstock.types import Epoch, Member, Role, WorkerId
from simulator.fleet import FleetSpec


class BalancedFleet(CoarseFleet):
    """Simulates a coarse deployment that rebalances with the controller's policy."""

    def __init__(self, spec: FleetSpec, config: BalanceConfig) -> None:
        super().__init__(spec)
        self.num_migrated = 0
        self._config = config
        self._balance = RebalancePolicy(config)
        self._max_batch = spec.decode.max_batch_sequences
        self._page_size = spec.page_size
        self.sim.after(config.interval_s, self._rebalance)

    def _rebalance(self) -> None:
        workers = self.decode_workers()
        members = {
            name: Member(WorkerId(name), Epoch(place), Role.DECODE, "") for place, name in enumerate(sorted(workers))
        }
        fills = []
        for name, member in members.items():
            load = workers[name].load()
            used = load.total_pages - load.free_pages
            fills.append(fill_of(member, used, load.total_pages, workers[name].num_open, self._max_batch))
        shift = self._balance.decide(fills, self.sim.now_s)
        if shift is not None:
            source, target = workers[shift.source.worker_id], workers[shift.target.worker_id]
            load = target.load()
            room = TargetRoom(
                shift.target.worker_id,
                shift.target.epoch,
                "",
                load.free_pages * self._page_size,
                self._max_batch - target.num_open,
            )
            jobs = {each.request_id: job for job, each in source.movable()}
            sequences = [each for _, each in source.movable()]
            capacity = source.load().total_pages * self._page_size
            for move in choose_sequences(
                shift, sequences, room, capacity, self._max_batch, self._config.max_migrations
            ):
                for request_id in move.request_ids:
                    source.migrate(jobs[request_id], target)
                    self.num_migrated += 1
        self.sim.after(self._config.interval_s, self._rebalance)
