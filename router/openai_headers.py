"""What a call to the OpenAI-compatible front says beside its sampling: lane and time-out. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.errors import InvalidInput
from penstock.types import Lane
from penstock.v1 import common_pb2
from penstock.wire import lane_from_name, lane_to_wire

LANE = "x-penstock-lane"
TIMEOUT = "x-request-timeout"  # seconds, of the whole call
GRANTED_TOKENS = "x-penstock-max-tokens"  # of an answer: what overload has shortened max_tokens to

# OpenAI's names; "auto" leaves it to the caller's own lane.
_TIERS: Mapping[str, Lane | None] = {
    "auto": None,
    "priority": Lane.INTERACTIVE,
    "default": Lane.STANDARD,
    "flex": Lane.BULK,
}


def read_lane(headers: Mapping[str, str], service_tier: str | None) -> common_pb2.Lane:
    """The header's lane, else the tier's. Raises InvalidInput, also where the two differ."""
    tier = None
    if service_tier is not None:
        if service_tier not in _TIERS:
            raise InvalidInput("service_tier", f"is {service_tier[:100]!r}; give one of {', '.join(_TIERS)}")
        tier = _TIERS[service_tier]
    name = headers.get(LANE)
    lane = tier if name is None else lane_from_name(name, LANE)
    if tier is not None and lane is not tier:
        raise InvalidInput(LANE, f"is {name!r}, but service_tier is {service_tier!r}; give one of them")
    return common_pb2.LANE_UNSPECIFIED if lane is None else lane_to_wire(lane)


def read_timeout_s(headers: Mapping[str, str]) -> float | None:
    """Raises InvalidInput."""
    given = headers.get(TIMEOUT)
    if given is None:
        return None
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        raise InvalidInput(TIMEOUT, f"is {given[:100]!r}; give a number of seconds above 0")
    return timeout_s
