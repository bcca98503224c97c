"""Replays a trace against a simulated deployment and prints the results: `python -m simulator.replay --help`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import InvalidInput
from penstock.sizing.model_shape import find_shape
from simulator.costs.accelerators import find_accelerator
from simulator.costs.cost_file import CostProfile, read_costs
from simulator.costs.roofline import roofline_costs
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.report import Slo, Summary, failures, offered_load, single_cache_hit_rate, summarize
from simulator.request import TraceRequest
from simulator.traces import SharedPrefixMix, drop_longer, load_trace, scale_arrivals

POLICIES = ("kv-aware", "least-loaded", "round-robin", "random", "consistent-hash")
GENERATED = "shared-prefix"  # names the generated mix instead of a file
UNLIMITED = 0


def read_requests(trace: str, seed: int, limit: int | None) -> list[TraceRequest]:
    """Reads a trace file, or generates the shared-prefix mix."""
    if trace == GENERATED:
        return SharedPrefixMix(num_requests=limit or 1000).make(seed)
    return load_trace(trace, seed, limit)


def fit(requests: Sequence[TraceRequest], spec: FleetSpec, load: float | None) -> tuple[list[TraceRequest], float]:
    """Drops requests that no pool can hold and scales arrivals to `load` times the workers' capacity without caches.

    Returns the requests and how many times faster than recorded they arrive.
    """
    kept = drop_longer(requests, min(spec.decode_pages, spec.prefill_pages) * spec.page_size)
    if load is None:
        return kept, 1.0
    factor = load / offered_load(kept, spec)
    return scale_arrivals(kept, factor), factor


def with_pages(spec: FleetSpec, cache_pages: int, requests: Sequence[TraceRequest]) -> FleetSpec:
    """Returns the spec with pools of `cache_pages`; UNLIMITED holds every page of every request."""
    if cache_pages == UNLIMITED:
        tokens = sum(request.num_input_tokens + request.num_output_tokens for request in requests)
        cache_pages = tokens // spec.page_size + 2 * len(requests)
    return replace(spec, prefill_pages=cache_pages, decode_pages=cache_pages)


def replay(requests: Sequence[TraceRequest], spec: FleetSpec, seed: int, slo: Slo) -> tuple[Summary, SimulatedFleet]:
    """Runs all requests to their end."""
    fleet = SimulatedFleet(spec, seed)
    for request in requests:
        fleet.submit(request)
    fleet.run()
    return summarize(fleet, slo), fleet


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m simulator.replay", description=__doc__)
    parser.add_argument("--trace", default=GENERATED, help=f"a file, or {GENERATED} for the generated mix")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="may be repeated; default: all")
    parser.add_argument(
        "--workers",
        type=int,
        default=8,
        help="number of prefill workers, and of decode workers too unless --decode-workers is given",
    )
    parser.add_argument(
        "--decode-workers", type=int, default=None, help="decode workers; default: as many as --workers"
    )
    parser.add_argument("--colocated", action="store_true", help="no prefill workers: decode workers compute prompts")
    parser.add_argument("--cache-pages", type=int, default=30_000, help="cache of each worker; 0: unlimited")
    parser.add_argument("--pull", action="store_true", help="prefill workers pull prefixes from other workers")
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page")
    parser.add_argument(
        "--load",
        type=float,
        default=None,
        help="scales arrivals to this multiple of what the workers could compute without caches; default: as recorded",
    )
    parser.add_argument("--costs", metavar="FILE", help="costs of a worker, as `penstock fit` writes them")
    parser.add_argument(
        "--accelerator", help="derive the costs of --model on one: A100, H100, ..., or cpu, this machine"
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="a known shape or a checkpoint folder")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--limit", type=int, default=None, help="replay only the first requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slo-ttft", type=float, default=Slo().ttft_s, help="seconds")
    parser.add_argument("--slo-tpot", type=float, default=Slo().tpot_s, help="seconds")
    return parser.parse_args(argv)


def _profile(args: argparse.Namespace) -> CostProfile:
    if args.costs:
        return read_costs(args.costs)
    return roofline_costs(find_shape(args.model), find_accelerator(args.accelerator), args.tensor_parallel)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    num_decode = args.workers if args.decode_workers is None else args.decode_workers
    spec = FleetSpec(0 if args.colocated else args.workers, num_decode, args.page_size, pull=args.pull)
    try:
        spec = spec.with_costs(_profile(args)) if args.costs or args.accelerator else spec
        requests = read_requests(args.trace, args.seed, args.limit)
    except InvalidInput as error:
        print(error)
        return 2
    spec = with_pages(spec, args.cache_pages, requests)
    fitted, factor = fit(requests, spec, args.load)
    num_caches = spec.num_prefill or spec.num_decode
    single = single_cache_hit_rate(fitted, spec.page_size, num_caches * spec.prefill_pages)
    print(
        f"{args.trace}: {len(fitted)} of {len(requests)} requests fit, {factor:.3g} times as fast as recorded, "
        f"offered load {offered_load(fitted, spec):.2f}; a single cache of all pages would hit {single:.1%}"
    )
    print(HEADER)
    for policy in args.policy or POLICIES:
        summary, fleet = replay(fitted, replace(spec, policy=policy), args.seed, Slo(args.slo_ttft, args.slo_tpot))
        print(line(policy, summary, single), flush=True)
        if summary.num_failed:
            print(f"  not complete: {failures(fleet.outcomes)}")
    return 0


HEADER = (
    f"{'policy':16} {'hits':>6} {'of one':>6} {'max/mean':>8} {'busy':>5} {'TTFT p50':>9} {'p90':>8} {'p99':>8} "
    f"{'TPOT p50':>8} {'p99 ms':>7} {'goodput':>7}"
)


def line(policy: str, summary: Summary, single: float) -> str:
    share = summary.hit_rate / single if single else 1.0
    return (
        f"{policy:16} {summary.hit_rate:6.1%} {share:6.1%} {summary.imbalance:8.2f} {summary.utilization:5.0%} "
        f"{summary.ttft_p50_s:8.3f}s {summary.ttft_p90_s:7.3f}s {summary.ttft_p99_s:7.3f}s "
        f"{summary.tpot_p50_s * 1e3:8.1f} {summary.tpot_p99_s * 1e3:7.1f} {summary.goodput:7.1%}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
