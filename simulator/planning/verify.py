"""Replays a planned deployment in the simulator, with the real routing, scheduling and transfer decisions and the same
costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import DecodeConfig, PrefillConfig, SloConfig
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.planning.deployment import MAX_BATCH, Deployment
from simulator.planning.workload import Workload
from simulator.report import percentile
from simulator.traces import to_trace_request


@dataclass(frozen=True, slots=True)
class Verification:
    """The simulator's results for a deployment. Latencies are of requests that completed."""

    num_requests: int
    num_failed: int
    attainment: float  # share of all requests within both targets
    num_late: int  # completed requests with TTFT above its target
    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float


def verify(deployment: Deployment, workload: Workload, slo: SloConfig, page_size: int, seed: int = 0) -> Verification:
    """Simulates all requests of a workload that has records. Blocks for minutes with thousands of them."""
    fleet = SimulatedFleet(_spec(deployment, page_size), seed)
    for number, record in enumerate(workload.records):
        fleet.submit(to_trace_request(number, record))
    fleet.run()
    complete = [outcome for outcome in fleet.outcomes if outcome.is_complete and outcome.ttft_s is not None]
    ttfts = [outcome.ttft_s or 0.0 for outcome in complete]
    tpots = [outcome.tpot_s for outcome in complete if outcome.num_tokens > 1]
    in_time = [
        outcome
        for outcome in complete
        if (outcome.ttft_s or 0.0) <= slo.first_token_s(outcome.request.num_input_tokens)
    ]
    num_met = sum(outcome.tpot_s <= slo.itl_s for outcome in in_time)
    prompts = sum(outcome.request.num_input_tokens for outcome in complete)
    return Verification(
        len(fleet.outcomes),
        len(fleet.outcomes) - len(complete),
        num_met / max(1, len(fleet.outcomes)),
        len(complete) - len(in_time),
        sum(outcome.cached_tokens for outcome in complete) / max(1, prompts),
        percentile(ttfts, 0.5),
        percentile(ttfts, 0.99),
        percentile(tpots, 0.5),
        percentile(tpots, 0.99),
    )


def _spec(deployment: Deployment, page_size: int) -> FleetSpec:
    prefill, decode = deployment.prefill, deployment.decode
    computing = (prefill or decode).kind
    steps = DecodeConfig(max_batch_sequences=MAX_BATCH, max_batch_tokens=max(MAX_BATCH, decode.kind.chunk_tokens))
    return FleetSpec(
        num_prefill=prefill.num_workers if prefill else 0,
        num_decode=decode.num_workers,
        page_size=page_size,
        prefill_pages=max(2, computing.kv_tokens // page_size),
        decode_pages=max(2, decode.kind.kv_tokens // page_size),
        prefill_costs=computing.costs.prefill,
        decode_costs=decode.kind.costs.decode,
        link_costs=computing.costs.link,
        prefill=PrefillConfig(max_batch_tokens=computing.chunk_tokens),
        decode=steps,
    )
