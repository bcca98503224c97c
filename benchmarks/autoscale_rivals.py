"""Which setting of the queue-length policy ours is held against, and by what.

Whoever runs such a policy tunes its targets. Three tunings, each with hindsight of the whole trace, which is more than
an operator has:

* `cheapest in time`: fewest worker hours of those that serve the share of requests that ours is asked for; where none
  does, the one that misses least. What an operator with a service level would choose.
* `fewest missed`: whatever it costs.
* `equal hours`: fewest missed of those that cost no more than ours, by the aim; where none is so cheap, the cheapest.

Ours has one setting for all traces, and so has whoever cannot know what comes: `over_all` holds it against each of
theirs on all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.autoscaler_config import AutoscalerConfig
from simulator.reactive import QueueTargets

TARGETS = [QueueTargets(prefill, decode) for prefill in (0.5, 1.0, 1.5, 2.0) for decode in (8.0, 12.0, 32.0)]
EQUAL_HOURS = "equal hours"
AIMS = {"missed": 0.2, "worker_hours": 0.95, "changes": 0.25}
_ATTAINMENT: float = AutoscalerConfig().attainment


@dataclass(frozen=True, slots=True)
class Result:
    """Of one policy on one trace, once everybody knows the traffic; `warm_` is what came before."""

    policy: str
    num_requests: int
    num_missed: int
    worker_hours: float
    num_changes: int
    ttft_p99_s: float
    tpot_p99_s: float
    good_per_worker_hour: float
    warm_missed: int = 0
    warm_worker_hours: float = 0.0
    warm_changes: int = 0


def choose(rivals: Sequence[Result], ours: Result) -> dict[str, Result]:
    in_time = [one for one in rivals if one.num_missed <= (1 - _ATTAINMENT) * one.num_requests]
    fewest = min(rivals, key=_missed)
    as_cheap = [one for one in rivals if one.worker_hours <= ours.worker_hours / AIMS["worker_hours"]]
    return {
        "cheapest in time": min(in_time, key=lambda one: one.worker_hours, default=fewest),
        "fewest missed": fewest,
        EQUAL_HOURS: min(as_cheap or [min(rivals, key=lambda one: one.worker_hours)], key=_missed),
    }


def ratios(ours: Result, other: Result) -> dict[str, float]:
    """None missed over none is as good, 0; over one that missed none, each that we missed counts."""
    return {
        "missed": ours.num_missed / max(1, other.num_missed),
        "worker_hours": ours.worker_hours / other.worker_hours,
        "changes": ours.num_changes / max(1, other.num_changes),
    }


def judge(rule: str, found: dict[str, float]) -> dict[str, bool]:
    """Which aims are met. A rival that was chosen for its hours is not judged by them."""
    names = [name for name in found if (rule, name) != (EQUAL_HOURS, "worker_hours")]
    return {name: found[name] <= AIMS[name] for name in names}


def over_all(results: Sequence[Result], ours: str) -> dict[str, dict[str, float]]:
    """Ours over each other policy, both on everything that both ran on."""
    names = dict.fromkeys(one.policy for one in results)
    together = {name: _add_up([one for one in results if one.policy == name]) for name in names}
    mine = together.pop(ours)
    return {name: ratios(mine, other) for name, other in together.items()}


def _add_up(rows: Sequence[Result]) -> Result:
    num_requests, num_missed = sum(one.num_requests for one in rows), sum(one.num_missed for one in rows)
    hours = sum(one.worker_hours for one in rows)
    return Result(
        rows[0].policy,
        num_requests,
        num_missed,
        hours,
        sum(one.num_changes for one in rows),
        max(one.ttft_p99_s for one in rows),
        max(one.tpot_p99_s for one in rows),
        (num_requests - num_missed) / hours,
    )


def _missed(one: Result) -> tuple[int, float]:
    return one.num_missed, one.worker_hours
