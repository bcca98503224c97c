"""Defines service level objectives and which requests met them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from penstock.bench.results.quantiles import quantile
from penstock.bench.results.record import Ending, RequestRecord
from penstock.errors import InvalidInput
from penstock.types import Lane

_ITL_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class SloLimits:
    """Upper limits for one request in seconds; None means no limit."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None  # the 99th percentile of the request's own gaps
    e2e: float | None = None


@dataclass(frozen=True, slots=True)
class SloSet:
    """The limits of every lane; the limits under "" apply to lanes without their own."""

    text: str  # the text that it was parsed from
    limits: Mapping[str, SloLimits]

    def is_met(self, request: RequestRecord) -> bool:
        """Returns whether the request is complete and within its lane's limits. Every failure is a miss."""
        limits = self.limits.get(request.lane) or self.limits.get("") or SloLimits()
        if request.ending is not Ending.COMPLETE:
            return False
        itl_s = quantile(sorted(request.gaps_s), _ITL_SHARE) if limits.itl is not None and request.gaps_s else None
        found = (
            (request.ttft_s, limits.ttft),
            (request.tpot_s, limits.tpot),
            (itl_s, limits.itl),
            (request.e2e_s, limits.e2e),
        )
        return all(value is None or limit is None or value <= limit for value, limit in found)


def parse_slo(text: str) -> SloSet:
    """Reads `ttft=1,tpot=0.1` or, by lane, `interactive:ttft=0.5;bulk:e2e=60`, in seconds. Raises InvalidInput."""
    by_lane: dict[str, SloLimits] = {}
    names = [item.name for item in fields(SloLimits)]
    for part in filter(None, text.split(";")):
        lane, _, limits_text = part.rpartition(":")
        lane = lane.strip()
        if lane and lane not in {known.value for known in Lane}:
            raise InvalidInput(
                "slo", f"{text!r} names the lane {lane!r}; use {', '.join(known.value for known in Lane)}"
            )
        limits: dict[str, float] = {}
        for limit in limits_text.split(","):
            name, _, value = limit.strip().partition("=")
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = 0.0
            if name not in names or not limits[name] > 0:
                raise InvalidInput("slo", f"{text!r} has {limit.strip()!r}; give {', '.join(names)} = seconds above 0")
        by_lane[lane] = SloLimits(**limits)
    if not by_lane:
        raise InvalidInput("slo", "is empty; give for example ttft=1,tpot=0.1")
    return SloSet(text, by_lane)
