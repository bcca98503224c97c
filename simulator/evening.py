"""The balancing of running sequences (`cluster.balance`) over a deployment in virtual time."""

from __future__ import annotations

from cluster.balance import Balance, choose, fullness
from cluster.moves import Room
from penstock.autoscaler_config import BalanceConfig
from penstock.types import Epoch, Member, Role, WorkerId
from simulator.coarse import CoarseFleet
from simulator.fleet import FleetSpec


class EvenedFleet(CoarseFleet):
    """A coarse deployment whose controller balances as the real one does."""

    def __init__(self, spec: FleetSpec, config: BalanceConfig) -> None:
        super().__init__(spec)
        self.num_moved = 0
        self._config = config
        self._balance = Balance(config)
        self._max_batch = spec.decode.max_batch_sequences
        self._page_size = spec.page_size
        self.sim.after(config.interval_s, self._even)

    def _even(self) -> None:
        workers = self.decode_workers()
        members = {
            name: Member(WorkerId(name), Epoch(place), Role.DECODE, "") for place, name in enumerate(sorted(workers))
        }
        looks = []
        for name, member in members.items():
            load = workers[name].load()
            used = load.total_pages - load.free_pages
            looks.append(fullness(member, used, load.total_pages, workers[name].num_open, self._max_batch))
        shift = self._balance.decide(looks, self.sim.now_s)
        if shift is not None:
            source, target = workers[shift.source.worker_id], workers[shift.target.worker_id]
            load = target.load()
            room = Room(
                shift.target.worker_id,
                shift.target.epoch,
                "",
                load.free_pages * self._page_size,
                self._max_batch - target.num_open,
            )
            jobs = {one.request_id: job for job, one in source.movable()}
            sequences = [one for _, one in source.movable()]
            capacity = source.load().total_pages * self._page_size
            for move in choose(shift, sequences, room, capacity, self._max_batch, self._config.max_moves):
                for request_id in move.request_ids:
                    source.give(jobs[request_id], target)
                    self.num_moved += 1
        self.sim.after(self._config.interval_s, self._even)
