"""`penstock plan`: size both pools for traffic, latency targets and priced accelerators, and say why."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cluster.cli.options import local_folder
from cluster.cli.progress import Progress
from penstock.bench.traces.read import read_trace
from penstock.charts.html import ReportTable, render_html
from penstock.charts.table import columns_of, format_table, wrap
from penstock.config import ServeConfig, SloConfig, parse
from penstock.errors import InvalidInput
from penstock.sizing.accelerators import ACCELERATORS
from penstock.sizing.model_shape import MODEL_SHAPES, ModelShape, find_shape
from simulator.costs.accelerators import find_accelerator
from simulator.costs.cost_file import CostProfile, read_costs
from simulator.planning.arithmetic import quantize_kv
from simulator.planning.deployment import PricedAccelerator
from simulator.planning.html_report import plan_report
from simulator.planning.report import PlanReport, as_json, explain, make_report
from simulator.planning.search import Goal
from simulator.planning.serve_file import format_toml, serve_settings
from simulator.planning.workload import TrafficStatistics, Workload, longest_fitting, workload_of
from simulator.traffic.statistics import summarize_values

_WEIGHT_BITS = {"int8": 8, "fp8": 8, "int4": 4}
_NOT_MEASURED = (
    "Costs of steps are derived from published peaks with assumed efficiencies (docs/planning.md); nothing was "
    "measured on {}."
)


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", nargs="?", metavar="TRACE", help="recorded traffic; without it, give its statistics")
    add(
        "--model",
        required=True,
        metavar="M",
        help=f"a folder, config.json or id of the Hub, or {', '.join(MODEL_SHAPES)}",
    )
    add(
        "--accelerator",
        action="append",
        required=True,
        metavar="NAME=PRICE",
        help=f"an accelerator to consider, with its price an hour; may be repeated. Known: {', '.join(ACCELERATORS)}",
    )
    add(
        "--costs",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="costs measured on that accelerator, as `penstock fit` writes them, instead of derived ones; may be "
        "repeated, for each tensor-parallel degree",
    )
    _add_target_arguments(parser)
    _add_traffic_arguments(parser)
    _add_worker_arguments(parser)
    output = parser.add_argument_group("output").add_argument
    output(
        "--verify",
        type=int,
        default=300,
        metavar="N",
        help="requests to simulate for each candidate; default: %(default)s; 0: none",
    )
    output("--json", action="store_true", help="print JSON")
    output("--html", metavar="FILE", help="write a page with tables, charts and reasons")
    output("--write", metavar="FILE", help="write settings for `penstock serve --config`")


def _add_target_arguments(parser: ArgumentParser) -> None:
    targets = parser.add_argument_group("targets").add_argument
    targets("--ttft", type=float, default=2.0, metavar="S", help="seconds to the first token; default: %(default)s")
    targets("--ttft-per-token", type=float, default=0.0, metavar="S", help="further seconds for each prompt token")
    targets(
        "--itl", type=float, default=0.05, metavar="S", help="mean seconds between two tokens; default: %(default)s"
    )
    targets(
        "--attainment",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="share of requests within both; default: %(default)s",
    )


def _add_traffic_arguments(parser: ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic").add_argument
    traffic("--rate", type=float, metavar="R", help="requests/s; scales the arrivals of a trace")
    traffic("--input-tokens", type=float, metavar="N", help="mean prompt, without a trace")
    traffic("--output-tokens", type=float, metavar="N", help="mean answer, without a trace")
    traffic(
        "--input-cv",
        type=float,
        default=1.0,
        metavar="CV",
        help="standard deviation of prompt lengths over their mean; default: %(default)s",
    )
    traffic("--output-cv", type=float, default=1.0, metavar="CV", help="the same for answers; default: %(default)s")
    traffic(
        "--gap-cv",
        type=float,
        default=1.0,
        metavar="CV",
        help="the same for times between arrivals; default: 1, as Poisson",
    )
    traffic(
        "--hit-rate",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of prompt tokens that are reusable; default: %(default)s",
    )
    traffic("--limit", type=int, metavar="N", help="read the first N requests only")
    traffic("--seed", type=int, default=0, help="default: %(default)s")


def _add_worker_arguments(parser: ArgumentParser) -> None:
    workers = parser.add_argument_group("workers").add_argument
    workers("--tensor-parallel", default="1,2,4,8", metavar="N,N", help="degrees to consider; default: %(default)s")
    workers(
        "--kv-dtype", choices=["auto", "fp8", "int8"], default="auto", help="type of KV pages; default: %(default)s"
    )
    workers(
        "--quantization", choices=["none", *_WEIGHT_BITS], default="none", help="type of weights; default: %(default)s"
    )
    workers("--max-devices", type=int, default=512, metavar="N", help="most devices of a plan; default: %(default)s")
    workers("--max-context", type=int, metavar="N", help="drop longer requests; default: the model's context")


def run(arguments: Namespace) -> int:
    """Prints the plan. Raises InvalidInput that says why there is none."""
    shape = _shape(arguments)
    workload, num_dropped = longest_fitting(_workload(arguments, shape), arguments.max_context or shape.context_length)
    goal = Goal(_slo(arguments), arguments.attainment, _degrees(arguments.tensor_parallel), arguments.max_devices)
    offers = _with_costs([_offer(text) for text in arguments.accelerator], arguments.costs, goal.degrees)
    with Progress("searching for deployments and simulating the candidates"):
        report = make_report(
            shape,
            offers,
            workload,
            goal,
            num_dropped=num_dropped,
            num_simulated=arguments.verify,
            seed=arguments.seed,
        )
    toml = _toml(report, arguments)
    if arguments.write:
        Path(arguments.write).write_text(toml)
    if arguments.html:
        tables = [(title, ReportTable(header, rows)) for title, header, rows in make_tables(report)]
        Path(arguments.html).write_text(render_html(plan_report(report, summarize(report), tables, toml)))
    print(json.dumps(as_json(report), indent=2) if arguments.json else describe(report, columns_of(sys.stdout)))
    return 0


def describe(report: PlanReport, columns: int | None = None) -> str:
    """Returns the plan as text no wider than `columns`: the choice, the candidates, what it depends on, and the
    reasons.
    """
    lines = [wrap(line, columns) for line in summarize(report)]
    for title, header, rows in make_tables(report):
        lines += ["", f"{title}:", format_table(header, rows, columns)]
    for subject, sentences in explain(report).items():
        lines += ["", f"Why, {subject}:", *(wrap(f"  {sentence}", columns) for sentence in sentences)]
    return "\n".join(lines)


def summarize(report: PlanReport) -> list[str]:
    """Returns the choice and what it delivers, in sentences."""
    workload, goal, economy = report.workload, report.goal, report.economy
    result = report.chosen.result
    ttft, tpot = summarize_values(result.times.ttft_s), summarize_values(result.times.tpot_s)
    slo = goal.slo
    per_token = f" + {slo.ttft_token_s * 1e3:g} ms a prompt token" if slo.ttft_token_s else ""
    dropped = f" {report.num_dropped} longer ones were dropped." if report.num_dropped else ""
    found = report.verification
    lines = [
        f"Traffic: {workload.name}, {len(workload.requests):,} requests at {workload.requests_per_s:.2f}/s, mean "
        f"prompt {workload.mean_input_tokens:,.0f} and answer {workload.mean_output_tokens:,.0f} tokens, "
        f"{workload.reusable_share:.0%} of the prompt tokens reusable.{dropped}",
        f"Goal: {goal.attainment:.1%} of the requests with TTFT <= {slo.ttft_s:g} s{per_token} and ITL <= "
        f"{slo.itl_s * 1e3:g} ms.",
        f"Choice: {report.chosen.deployment}; {report.chosen.deployment.num_devices} devices at "
        f"{economy.price_per_h:,.2f} an hour; pages of {report.page_size} tokens.",
        f"Expected: {result.attainment:.1%} within both targets, TTFT p50 {ttft.p50:.3f} s and p99 {ttft.p99:.3f} s, "
        f"time per token p50 {tpot.p50 * 1e3:.1f} ms and p99 {tpot.p99 * 1e3:.1f} ms, hits {result.hit_rate:.0%}.",
        f"Goodput {economy.goodput_per_s:.2f} requests/s, {economy.goodput_per_device_s:.3f} a device; "
        f"{economy.per_million_output_tokens:,.2f} for a million output tokens, {economy.per_million_tokens:,.3f} for "
        "a million tokens of prompts and answers.",
        f"Headroom: the targets hold up to {report.headroom:.2f} times this rate.",
    ]
    if found is None:
        lines.append("Not simulated: give --verify N to replay requests against the real decisions.")
    else:
        verdict = "agrees" if report.is_verified else "DOES NOT AGREE"
        lines.append(
            f"The simulator {verdict}: {found.attainment:.1%} of the first {found.num_requests} requests within both "
            f"targets, TTFT p99 {found.ttft_p99_s:.3f} s, time per token p99 {found.tpot_p99_s * 1e3:.1f} ms, hits "
            f"{found.hit_rate:.0%}."
        )
    return [*lines, *_sources(report)]


def _sources(report: PlanReport) -> list[str]:
    """Returns where the costs of the chosen workers come from."""
    deployment = report.chosen.deployment
    kinds = [pool.kind for pool in (deployment.prefill, deployment.decode) if pool is not None]
    measured = {kind.name: kind.costs for kind in kinds if kind.offer.measured}
    derived = sorted({kind.offer.device.name for kind in kinds if not kind.offer.measured})
    lines = [f"Costs of steps on {name}: {costs.source}, of {costs.name}." for name, costs in measured.items()]
    return [*lines, _NOT_MEASURED.format(" and ".join(derived))] if derived else lines


def make_tables(report: PlanReport) -> list[tuple[str, list[str], list[list[str]]]]:
    """Returns (title, header, rows) of the candidates and of the sensitivity."""
    candidates = []
    for index, plan in enumerate(report.plans):
        ttft, tpot = summarize_values(plan.result.times.ttft_s), summarize_values(plan.result.times.tpot_s)
        found = report.verifications.get(index)
        candidates.append(
            [
                f"{'* ' if plan is report.chosen else ''}{plan.deployment}",
                f"{plan.deployment.num_devices}",
                f"{plan.deployment.price_per_h:,.2f}",
                f"{plan.result.attainment:.1%}",
                f"{found.attainment:.1%}" if found else "-",
                f"{ttft.p99:.2f}",
                f"{tpot.p99 * 1e3:.1f}",
            ]
        )
    price = report.economy.price_per_h
    variations = [
        [
            each.name,
            f"{each.attainment:.1%}",
            str(each.sufficient) if each.sufficient else "no number of these workers",
            f"{each.price_per_h / price - 1:+.0%}" if each.price_per_h else "-",
        ]
        for each in report.variations
    ]
    header = ["deployment", "devices", "an hour", "within targets", "simulated", "TTFT p99 s", "TPOT p99 ms"]
    return [
        ("Candidates, within targets by the flow model and simulated", header, candidates),
        ("If an assumption is wrong", ["assumption", "within targets", "what would suffice", "cost"], variations),
    ]


def _shape(arguments: Namespace) -> ModelShape:
    folder = local_folder(arguments.model, config_only=True)
    shape = find_shape(folder)
    if folder != arguments.model:  # from the Hub, whose folders are named by commits
        shape = replace(shape, name=arguments.model)
    if bits := _WEIGHT_BITS.get(arguments.quantization):
        shape = shape.quantized(weight_bits=bits)
    return quantize_kv(shape, arguments.kv_dtype)


def _workload(arguments: Namespace, shape: ModelShape) -> Workload:
    if arguments.trace:
        workload = workload_of(read_trace(arguments.trace, arguments.seed, arguments.limit))
        if arguments.rate is None:
            return workload
        if not arguments.rate > 0:
            raise InvalidInput("--rate", f"is {arguments.rate:g}; give requests per second above 0")
        return workload.varied(rate=arguments.rate / workload.requests_per_s)
    for name in ("rate", "input_tokens", "output_tokens"):
        if getattr(arguments, name) is None:
            raise InvalidInput(f"--{name.replace('_', '-')}", "is missing; give it, or a TRACE")
    statistics = TrafficStatistics(
        arguments.rate,
        arguments.input_tokens,
        arguments.output_tokens,
        arguments.input_cv,
        arguments.output_cv,
        arguments.gap_cv,
        arguments.hit_rate,
    )
    return statistics.sample(arguments.seed, shape.context_length)


def _slo(arguments: Namespace) -> SloConfig:
    values = {"ttft_s": arguments.ttft, "ttft_token_s": arguments.ttft_per_token, "itl_s": arguments.itl}
    return parse(SloConfig, values, source="penstock plan")


def _degrees(text: str) -> list[int]:
    try:
        degrees = [int(part) for part in text.split(",")]
    except ValueError:
        degrees = []
    if not degrees or any(not 1 <= degree <= 64 for degree in degrees):
        raise InvalidInput("--tensor-parallel", f"is {text!r}; give numbers from 1 to 64, such as 1,2,4")
    return sorted(set(degrees))


def _offer(text: str) -> PricedAccelerator:
    name, _, price = text.partition("=")
    try:
        value = float(price)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InvalidInput(
            "--accelerator", f"is {text!r}; give NAME=PRICE with the price of one an hour, such as H100=3"
        )
    return PricedAccelerator(find_accelerator(name), value)


def _with_costs(
    offers: Sequence[PricedAccelerator], given: Sequence[str], degrees: Sequence[int]
) -> list[PricedAccelerator]:
    """Returns the offers with the costs that were measured on them."""
    measured: dict[str, dict[int, CostProfile]] = {}
    for text in given:
        name, _, file = text.partition("=")
        if name not in {offer.device.name for offer in offers} or not file:
            known = ", ".join(offer.device.name for offer in offers)
            raise InvalidInput("--costs", f"is {text!r}; give NAME=FILE with an accelerator that is offered: {known}")
        profile = read_costs(file)
        if profile.tensor_parallel not in degrees:
            raise InvalidInput(
                "--costs",
                f"{file} is of tensor-parallel degree {profile.tensor_parallel}; add it to --tensor-parallel",
            )
        if measured.setdefault(name, {}).setdefault(profile.tensor_parallel, profile) is not profile:
            raise InvalidInput(
                "--costs", f"names two files of {name} at degree {profile.tensor_parallel}; give one of them"
            )
    return [replace(offer, measured=tuple(measured.get(offer.device.name, {}).values())) for offer in offers]


def _model_to_serve(given: str) -> str:
    """Returns what `penstock serve` takes for the model that was given: a folder, or an id of the Hub."""
    from engine.weights.hub import HubModel

    path = Path(given)
    if path.is_dir() or HubModel.parse(given):
        return given
    return str(path.parent if path.is_file() else Path("/models") / given)


def _toml(report: PlanReport, arguments: Namespace) -> str:
    settings = serve_settings(
        report.chosen.deployment,
        report.goal,
        _model_to_serve(arguments.model),
        report.page_size,
        kv_dtype=arguments.kv_dtype,
        quantization=arguments.quantization,
    )
    parse(ServeConfig, settings, source="penstock plan")  # what is written is what `penstock serve` accepts
    return format_toml(settings, [f"Planned by `penstock plan` for {report.workload.name}.", *_sources(report)])
