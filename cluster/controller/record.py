"""The record that a controller leaves for its successor. It is small, because the workers report the rest themselves.

`generation` counts the controllers of one deployment; every version that a controller publishes is higher than those of
all its predecessors. `RecordKeeper` writes the record when it changes; where it is stored is the caller's choice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from cluster.health.canary_policy import CanaryJudge
from cluster.health.readiness import Readiness
from cluster.lifecycle.upgrade.served_models import ServedModels
from cluster.pools.pool import Pools

_COUNTER_BITS = 32


@dataclass(frozen=True, slots=True)
class ControllerRecord:
    generation: int = 1
    was_ready: bool = False  # a real request has succeeded, so no later error means that it can never start
    replicas: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))  # desired, by pool name
    last_numbers: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))  # by worker id
    num_restarts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))  # by worker id
    leaving: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))  # drained: whether replaced
    stopping: bool = False
    model: str = ""  # the folder that workers load since an upgrade
    weights: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # of an update
    upgrade: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # see `upgrade_record`
    canary: str = ""  # the answers that every worker must give, as JSON

    @property
    def first_version(self) -> int:
        return self.generation << _COUNTER_BITS

    def to_json(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()}
        return json.dumps(plain).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ControllerRecord:
        """Reads the record of any version of this program: missing fields get defaults, unknown ones are ignored."""
        fields = json.loads(data)
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})


FIRST_RECORD = ControllerRecord()
SaveRecord = Callable[[ControllerRecord], None]  # must not block


class RecordKeeper:
    def __init__(
        self,
        record: ControllerRecord,
        save: SaveRecord,
        pools: Pools,
        served: ServedModels,
        readiness: Readiness,
        judge: CanaryJudge | None,
    ) -> None:
        self._record = record  # as it was saved last
        self._save = save
        self._pools = pools
        self._served = served
        self._readiness = readiness
        self._judge = judge
        self._is_closed = False

    def keep(self) -> None:
        """Saves the record if anything in it has changed."""
        if self._is_closed:
            return
        slots = self._pools.slots
        replicas = {pool.name: pool.replicas for pool in self._pools}
        leaving: dict[str, bool] = {slot.worker_id: slot.is_replaced for slot in slots if slot.is_leaving}
        for slot in slots:
            if (
                slot.is_node_leaving and not slot.is_leaving
            ):  # it serves beside its successor: a new controller drains it
                leaving[slot.worker_id] = False
                replicas[slot.incarnation.pool_name] -= 1
        record = replace(
            self._record,
            was_ready=self._readiness.was_ready,
            model=self._served.config.model,
            weights=self._served.weights_record(),
            upgrade=self._served.upgrade_record(),
            replicas=replicas,
            last_numbers={name: number for pool in self._pools for name, number in pool.last_numbers.items()},
            num_restarts={slot.worker_id: slot.num_restarts for slot in slots},
            canary=self._judge.to_json() if self._judge else "",
            leaving=leaving,
        )
        if record != self._record:
            self._record = record
            self._save(record)

    def close(self) -> None:
        """Saves that the deployment is stopping, so that a successor goes on stopping it; saves nothing after that."""
        self._is_closed = True
        self._save(replace(self._record, stopping=True))
