"""Offers several times the traffic that a deployment can serve, and reports how many requests meet their targets and
how the others are refused.

`python -m simulator.overload`: Poisson arrivals in three lanes against the real admission, by default and with
`overload.shed`. A request counts as good if it completes and its first token comes within its lane's target plus 3 s.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from penstock.config import DecodeConfig
from penstock.config.admission import AdmissionConfig, OverloadConfig
from penstock.errors import DeadlineExceeded, Overloaded, Unavailable
from penstock.types import Lane
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.report import percentile
from simulator.request import Outcome, TraceRequest

_SERVICE_S = 3.0
_SHARES = (0.3, 0.5, 0.2)
_PROMPT_TOKENS = 3000
_OUTPUT_TOKENS = 150
SPEC = FleetSpec(
    num_prefill=2,
    num_decode=2,
    decode=DecodeConfig(max_batch_sequences=48, max_batch_tokens=2048),
    admission=AdmissionConfig(overload=OverloadConfig(shed=True)),
    timeout_s=120.0,
)


@dataclass(frozen=True, slots=True)
class OverloadResult:
    """The result of one rate."""

    offered_per_s: float
    good_per_s: float
    interactive_p99_s: float  # TTFT of served requests
    most_waiting: int
    num_complete: int
    num_refused: int
    num_without_hint: int


def run(offered_per_s: float, duration_s: float = 60.0, seed: int = 0, spec: FleetSpec = SPEC) -> OverloadResult:
    """Simulates one rate for `duration_s`."""
    rng = random.Random(f"{seed}/overload")
    fleet, at_s, number = SimulatedFleet(spec, seed), 1.0, 0
    while (at_s := at_s + rng.expovariate(offered_per_s)) < 1.0 + duration_s:
        num_input = 1 + int(rng.gammavariate(2.0, _PROMPT_TOKENS / 2))
        num_output = 1 + int(rng.expovariate(1 / _OUTPUT_TOKENS))
        lane = rng.choices(list(Lane), _SHARES)[0]
        fleet.submit(TraceRequest(number, at_s, num_input, num_output, (number,), num_input, lane))
        number += 1
    fleet.run()
    good = [outcome for outcome in fleet.outcomes if is_good(outcome)]
    interactive = [outcome for outcome in fleet.outcomes if outcome.request.lane is Lane.INTERACTIVE]
    refused = [outcome for outcome in fleet.outcomes if outcome.error is not None]
    gate = fleet.router.gate
    return OverloadResult(
        offered_per_s,
        # Counts only requests that ended while traffic arrived: those still queued afterwards show no capacity.
        sum((outcome.end_s or 0.0) <= 1.0 + duration_s for outcome in good) / duration_s,
        percentile([outcome.ttft_s for outcome in interactive if outcome.ttft_s is not None], 0.99),
        gate.most_waiting if gate is not None else 0,
        sum(outcome.is_complete for outcome in fleet.outcomes),
        len(refused),
        sum(not has_hint(outcome) for outcome in refused),
    )


def is_good(outcome: Outcome) -> bool:
    """Returns whether the request completed with its first token in time."""
    longest_s = AdmissionConfig().lane(outcome.request.lane).target_wait_s + _SERVICE_S
    return outcome.is_complete and outcome.ttft_s is not None and outcome.ttft_s <= longest_s


def has_hint(outcome: Outcome) -> bool:
    """Returns whether a refusal says when to retry."""
    error = outcome.error
    return isinstance(error, Overloaded | Unavailable | DeadlineExceeded) and bool(error.retry_after_s)


def main() -> int:
    for name, spec in (("default", replace(SPEC, admission=AdmissionConfig())), ("overload.shed", SPEC)):
        print(
            f"{name}\n{'offered/s':>9} {'good/s':>7} {'interactive TTFT p99':>21} {'waiting':>8} {'complete':>8} "
            f"{'refused':>8} {'no hint':>8}"
        )
        for offered_per_s in (2.0, 4.0, 6.0, 8.0, 10.0, 15.0, 25.0, 50.0):
            result = run(offered_per_s, spec=spec)
            print(
                f"{result.offered_per_s:9.1f} {result.good_per_s:7.2f} {result.interactive_p99_s:20.2f}s "
                f"{result.most_waiting:8} {result.num_complete:8} {result.num_refused:8} {result.num_without_hint:8}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
