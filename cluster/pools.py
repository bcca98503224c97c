"""All pools of a deployment, by name: what is asked of more than one of them. Pure, like the pools."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.pool import Action, Incarnation, Pool, Slot
from cluster.record import Record
from cluster.supervised import ROUTER
from penstock.config import ServeConfig
from penstock.errors import InvalidInput
from penstock.types import Member, Role, WorkerId


def member_of(slot: Slot) -> Member:
    """Of a worker's slot."""
    return Member(slot.worker_id, slot.epoch, Role(slot.incarnation.pool_name), slot.address)


class Pools:
    def __init__(self, config: ServeConfig, record: Record) -> None:
        """Of the sizes in `record`, or else in `config`."""
        sizes = {
            Role.PREFILL.value: config.prefill_pool.replicas,
            Role.DECODE.value: config.decode_pool.replicas,
            ROUTER: config.routers,
        }
        self._pools = {
            name: Pool(name, record.replicas.get(name, replicas), record.numbers_of(name))
            for name, replicas in sizes.items()
        }

    def __getitem__(self, name: str) -> Pool:
        return self._pools[name]

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def of(self, incarnation: Incarnation) -> Pool:
        return self._pools[incarnation.pool_name]

    @property
    def slots(self) -> list[Slot]:
        return [slot for pool in self for slot in pool.slots]

    def slot_of(self, incarnation: Incarnation) -> Slot | None:
        return next((slot for slot in self.of(incarnation).slots if slot.incarnation == incarnation), None)

    def slot_of_member(self, member: Member) -> Slot | None:
        return next((slot for slot in self[member.role.value].slots if slot.epoch == member.epoch), None)

    def find_worker(self, worker_id: str) -> Slot:
        """Raises InvalidInput."""
        workers = {slot.worker_id: slot for role in Role for slot in self[role.value].slots}
        if worker_id not in workers:
            raise InvalidInput("worker_id", f"is {worker_id!r}; the workers are {', '.join(sorted(workers))}")
        return workers[WorkerId(worker_id)]

    def members(self) -> list[Member]:
        """Workers that may be given requests."""
        return [member_of(slot) for role in Role for slot in self[role.value].ready()]

    @property
    def can_decode(self) -> bool:
        return any(self[Role.DECODE.value].ready())

    def reconcile(self, now_s: float) -> list[Action]:
        return [action for pool in self for action in pool.reconcile(now_s)]

    def next_retry_s(self) -> float | None:
        """When `reconcile` will have something to start; None: not before something else happens."""
        return min((due_s for pool in self if (due_s := pool.next_retry_s()) is not None), default=None)
