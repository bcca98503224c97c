"""Describes a trace: the report that `penstock traffic` prints and that the planner sizes deployments by. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from penstock.bench.traces.record import Trace
from simulator.traffic.arrivals import ArrivalReport, describe_arrivals
from simulator.traffic.reuse import ReuseReport, measure_reuse
from simulator.traffic.sessions import SessionReport, describe_sessions
from simulator.traffic.statistics import Distribution, summarize_values, weighted_percentile

SHARES_OF_CEILING = (0.5, 0.8, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """The description of a trace. `reuse` is None if the trace does not describe shared prefixes."""

    name: str
    num_requests: int
    tick_s: float
    inputs: Distribution  # tokens of a prompt
    outputs: Distribution  # tokens of an answer
    contexts: Distribution  # both
    arrivals: ArrivalReport
    reuse: ReuseReport | None
    hit_age_s: tuple[float, float]  # p50 and p90, over hit tokens, of the time since they were last touched
    request_hit_share: float  # share of requests of which at least one block hits in an unlimited cache
    sessions: SessionReport | None

    @property
    def input_tokens_per_s(self) -> float:
        return self.arrivals.requests_per_s * self.inputs.mean

    @property
    def output_tokens_per_s(self) -> float:
        return self.arrivals.requests_per_s * self.outputs.mean


def describe_trace(trace: Trace) -> TrafficReport:
    """Describes the requests of a trace, which must not be empty."""
    records = trace.records
    reuse = measure_reuse(records) if trace.has_blocks else None
    runs = reuse.runs if reuse else ()
    ages = [(records[run.request].arrival_s - records[run.last_request].arrival_s, run.num_tokens) for run in runs]
    return TrafficReport(
        name=trace.name,
        num_requests=len(records),
        tick_s=trace.tick_s,
        inputs=summarize_values(record.num_input_tokens for record in records),
        outputs=summarize_values(record.num_output_tokens for record in records),
        contexts=summarize_values(record.num_tokens for record in records),
        arrivals=describe_arrivals([record.arrival_s for record in records]),
        reuse=reuse,
        hit_age_s=(weighted_percentile(ages, 0.5), weighted_percentile(ages, 0.9)),
        request_hit_share=len({run.request for run in runs}) / len(records),
        sessions=describe_sessions(trace, reuse or measure_reuse(())),
    )


def as_json(report: TrafficReport, token_bytes: int | None = None) -> dict[str, Any]:
    """Returns the report as plain data, with the curve of hit rates in place of every reuse."""
    reuse = report.reuse
    data: dict[str, Any] = {
        "trace": report.name,
        "num_requests": report.num_requests,
        "tick_s": report.tick_s,
        "input_tokens": asdict(report.inputs),
        "output_tokens": asdict(report.outputs),
        "context_tokens": asdict(report.contexts),
        "arrivals": asdict(report.arrivals),
        "input_tokens_per_s": report.input_tokens_per_s,
        "output_tokens_per_s": report.output_tokens_per_s,
        "sessions": asdict(report.sessions) if report.sessions else None,
        "reuse": None,
    }
    if reuse is not None:
        data["reuse"] = {
            "ceiling": reuse.ceiling,
            "distinct_tokens": reuse.num_distinct_tokens,
            "request_hit_share": report.request_hit_share,
            "hit_age_p50_s": report.hit_age_s[0],
            "hit_age_p90_s": report.hit_age_s[1],
            "cache_tokens_for_share_of_ceiling": {
                f"{share:g}": reuse.cache_tokens_for(share) for share in SHARES_OF_CEILING
            },
            "token_bytes": token_bytes,
            "curve": [{"cache_tokens": size, "hit_rate": rate} for size, rate in reuse.curve()],
        }
    return data
