"""Keeps the record that a successor goes on from: written anew where something in it has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cluster.canary import Judge
from cluster.pools import Pools
from cluster.record import Record
from penstock.types import WorkerId

Save = Callable[[Record], None]  # must not block


class RecordKeeper:
    def __init__(self, record: Record, save: Save, pools: Pools, judge: Judge | None) -> None:
        """`judge` knows the answers that workers are asked for."""
        self._record = record
        self._save = save
        self._pools = pools
        self._judge = judge
        self._is_closed = False

    def keep(
        self, model: str, upgrade: Mapping[str, Any], evacuated: Sequence[WorkerId] = (), *, was_ready: bool
    ) -> None:
        """`upgrade` is the one under way, and `model` the folder that a successor serves. `evacuated` workers serve
        beside their successors: a successor of ours drains them."""
        if self._is_closed:
            return
        slots = self._pools.slots
        replicas = {pool.name: pool.replicas for pool in self._pools}
        leaving: dict[str, bool] = {slot.worker_id: slot.is_replaced for slot in slots if slot.is_leaving}
        for worker_id in evacuated:
            leaving[worker_id] = False
            replicas[worker_id.rpartition("-")[0]] -= 1
        record = replace(
            self._record,
            was_ready=was_ready,
            model=model,
            upgrade=upgrade,
            replicas=replicas,
            last_numbers={one: number for pool in self._pools for one, number in pool.last_numbers.items()},
            num_restarts={slot.worker_id: slot.num_restarts for slot in slots},
            canary=self._judge.to_json() if self._judge else "",
            leaving=leaving,
        )
        if record != self._record:
            self._record = record
            self._save(record)

    def close(self) -> None:
        """The deployment is stopping; a successor would go on with that."""
        self._is_closed = True
        self._save(replace(self._record, stopping=True))
