"""Holds the fixtures of the admission tests: a policy for one small fleet, and requests to offer it."""

from __future__ import annotations

import random

from penstock.config.admission import AdmissionConfig, BulkLane, InteractiveLane, LaneConfig
from penstock.types import Lane
from router.admission.admission_policy import AdmissionPolicy
from router.admission.capacity import FleetState
from router.admission.interface import AdmissionRequest, Dispatched

FLEET = FleetState(num_decode=1, num_prefill=1, slots=4)
PATIENT = AdmissionConfig(
    interactive=InteractiveLane(max_queue=8, target_wait_s=8000.0),
    standard=LaneConfig(max_queue=8, target_wait_s=8000.0),
    bulk=BulkLane(max_queue=8, target_wait_s=8000.0),
)


def ask(key, lane=Lane.STANDARD, tenant="", *, prompt=100, max_tokens=50, at=0.0, timeout=1e6, n=1, open_ended=False):
    return AdmissionRequest(key, lane, tenant, prompt, max_tokens, at, at + timeout, n, open_ended=open_ended)


def admission(config=PATIENT, fleet=FLEET, limits_of=None, seed=1):
    made = AdmissionPolicy(config, random.Random(seed), limits_of=limits_of)
    made.on_fleet(fleet, 0.0)
    return made


def fill(made, now_s=0.0, first_key=10_000, **settings):
    """Offers requests until one is queued; returns the keys of the dispatched ones."""
    keys = []
    while isinstance(made.offer(ask(first_key + len(keys), at=now_s, **settings), now_s), Dispatched):
        keys.append(first_key + len(keys))
    made.end(first_key + len(keys), None, now_s)
    return keys
