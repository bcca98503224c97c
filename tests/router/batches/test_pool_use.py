"""Tests that the pacing of batches counts the requests of all routers, each once."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

from penstock.types import Role
from router.composition import _pool_use


def worker(role: Role, num_running: int, *, takes_work: bool = True) -> SimpleNamespace:
    load = SimpleNamespace(num_running=num_running, num_waiting=0)
    return SimpleNamespace(takes_work=takes_work, description=SimpleNamespace(role=role), load=load)


def test_a_line_on_both_of_its_workers_is_not_counted_as_anothers() -> None:
    gate = MagicMock()
    gate.admission.num_inside, gate.admission.num_waiting = 2, 0
    fleet = MagicMock(followers=[worker(Role.PREFILL, 2), worker(Role.DECODE, 2)])
    assert _pool_use(fleet, gate, 2).num_others == 0
    fleet.followers.append(worker(Role.DECODE, 1, takes_work=False))  # it drains with another router's request
    use = _pool_use(fleet, gate, 2)
    assert (use.num_others, use.num_decode_workers) == (1, 1)
