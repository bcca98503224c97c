"""An admission before one small worker, and requests that ask for it: what the tests of its parts begin with."""

from __future__ import annotations

import random

from penstock.admission_config import AdmissionConfig, BulkLane, InteractiveLane, LaneConfig, OverloadConfig
from penstock.types import Lane
from router.admission import Admission
from router.capacity import FleetState
from router.verdicts import Ask, Dispatched

FLEET = FleetState(num_decode=1, num_prefill=1, slots=4)
PATIENT = AdmissionConfig(
    interactive=InteractiveLane(max_queue=8, max_wait_s=8000.0, shed_from=0.99),
    standard=LaneConfig(max_queue=8, max_wait_s=8000.0, shed_from=0.99),
    bulk=BulkLane(max_queue=8, max_wait_s=8000.0, shed_from=0.99),
    overload=OverloadConfig(shorten_at=5.0, pause_bulk_at=5.0, refuse_at=5.0),
)


def ask(key, lane=Lane.STANDARD, tenant="", *, prompt=100, max_tokens=50, at=0.0, timeout=1e6, n=1):
    return Ask(key, lane, tenant, prompt, max_tokens, at, at + timeout, n)


def admission(config=PATIENT, fleet=FLEET, limits_of=None, seed=1):
    made = Admission(config, random.Random(seed), limits_of=limits_of)
    made.on_fleet(fleet, 0.0)
    return made


def fill(made, now_s=0.0, first_key=10_000, **settings):
    """Requests until one has to wait; their keys."""
    keys = []
    while isinstance(made.offer(ask(first_key + len(keys), at=now_s, **settings), now_s), Dispatched):
        keys.append(first_key + len(keys))
    made.end(first_key + len(keys), None, now_s)
    return keys
