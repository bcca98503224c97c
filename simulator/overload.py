"""Several times the traffic that a deployment can serve: what still gets through, and how the rest is told.

`python -m simulator.overload`; Poisson arrivals of three lanes against the real admission. Good is what completes, its
first token within the longest wait that its lane allows and 3 s.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from penstock.admission_config import AdmissionConfig
from penstock.config import DecodeConfig
from penstock.errors import DeadlineExceeded, Overloaded, Unavailable
from penstock.types import Lane
from simulator.fleet import Fleet, FleetSpec
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
    admission=AdmissionConfig(),
    decode_stride=4,
    timeout_s=120.0,
)


@dataclass(frozen=True, slots=True)
class Result:
    offered_per_s: float
    good_per_s: float
    interactive_p99_s: float  # to the first token, of those served
    most_waiting: int
    num_refused: int
    num_without_hint: int


def run(offered_per_s: float, duration_s: float = 60.0, seed: int = 0, spec: FleetSpec = SPEC) -> Result:
    rng = random.Random(f"{seed}/overload")
    fleet, at_s, number = Fleet(spec, seed), 1.0, 0
    while (at_s := at_s + rng.expovariate(offered_per_s)) < 1.0 + duration_s:
        num_input = 1 + int(rng.gammavariate(2.0, _PROMPT_TOKENS / 2))
        num_output = 1 + int(rng.expovariate(1 / _OUTPUT_TOKENS))
        lane = rng.choices(list(Lane), _SHARES)[0]
        fleet.submit(TraceRequest(number, at_s, num_input, num_output, (number,), num_input, lane))
        number += 1
    fleet.run()
    good = [one for one in fleet.outcomes if is_good(one)]
    served = [one for one in fleet.outcomes if one.ttft_s is not None and one.request.lane is Lane.INTERACTIVE]
    refused = [one for one in fleet.outcomes if one.error is not None]
    gate = fleet.router.gate
    return Result(
        offered_per_s,
        # What was good while traffic came; what the queues held beyond that is not capacity.
        sum((one.end_s or 0.0) <= 1.0 + duration_s for one in good) / duration_s,
        percentile([one.ttft_s or 0.0 for one in served], 0.99),
        gate.most_waiting if gate is not None else 0,
        len(refused),
        sum(not has_hint(one) for one in refused),
    )


def is_good(outcome: Outcome) -> bool:
    longest_s = AdmissionConfig().lane(outcome.request.lane).max_wait_s + _SERVICE_S
    return outcome.is_complete and outcome.ttft_s is not None and outcome.ttft_s <= longest_s


def has_hint(outcome: Outcome) -> bool:
    error = outcome.error
    return isinstance(error, Overloaded | Unavailable | DeadlineExceeded) and bool(error.retry_after_s)


def main() -> int:
    print(f"{'offered/s':>9} {'good/s':>7} {'interactive TTFT p99':>21} {'waiting':>8} {'refused':>8} {'no hint':>8}")
    for offered_per_s in (2.0, 4.0, 6.0, 8.0, 10.0, 15.0, 25.0, 50.0):
        one = run(offered_per_s)
        print(
            f"{one.offered_per_s:9.1f} {one.good_per_s:7.2f} {one.interactive_p99_s:20.2f}s {one.most_waiting:8} "
            f"{one.num_refused:8} {one.num_without_hint:8}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
