"""`penstock bench`: send traffic to any OpenAI-compatible server, measure latencies and goodput, compare results."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.cli.options import add_tls_options, check_address, client_tls
from penstock.charts.table import columns_of, format_table, wrap
from penstock.errors import InvalidInput
from penstock.rpc.failed_http import without_user

if TYPE_CHECKING:
    from penstock.bench.driver.endpoint import Endpoint
    from penstock.bench.measure import SweepSpec
    from penstock.bench.results.result_file import BenchResult
    from penstock.bench.workloads.plan import Source
    from penstock.bench.workloads.schedule import Arrivals, Extras

_INTERRUPTED = 130
_DEFAULT_REQUESTS, _DEFAULT_CONCURRENCY = 200, 8
NumberT = TypeVar("NumberT", int, float)


def add_arguments(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    run_parser = actions.add_parser("run", help="send a workload and measure what its users would see")
    run_parser.set_defaults(action=_run)
    _add_run_arguments(run_parser)
    compare_parser = actions.add_parser("compare", help="say which figures of two results differ, and by how much")
    compare_parser.set_defaults(action=_compare)
    for name in ("a", "b"):
        compare_parser.add_argument(name, metavar=name.upper(), help="the folder of a run, or its result.json")
    compare_parser.add_argument(
        "--seed", type=int, default=0, help="random seed of the resampling; default: %(default)s"
    )
    compare_parser.add_argument("--json", action="store_true", help="print JSON")
    report_parser = actions.add_parser("report", help="print a result again, and write its page again")
    report_parser.set_defaults(action=_report)
    report_parser.add_argument("result", metavar="RESULT", help="the folder of a run, or its result.json")
    report_parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(arguments: Namespace) -> int:
    return int(arguments.action(arguments))


def _add_run_arguments(parser: ArgumentParser) -> None:
    _add_server_arguments(parser)
    _add_workload_arguments(parser)
    _add_load_arguments(parser)
    _add_report_arguments(parser)


def _add_server_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("the server").add_argument
    add("--url", default="http://localhost:8000/v1", help="an OpenAI-compatible server; default: %(default)s")
    add("--grpc", metavar="HOST:PORT", help="a Penstock deployment's gRPC address instead")
    add("--api", choices=("completions", "chat"), default="completions", help="default: %(default)s")
    add("--model", default="", help="model to request; default: the first that the server lists")
    add("--api-key", metavar="KEY", help="default: $PENSTOCK_API_KEY, hidden from other users of the machine")
    add("--lookaside", action="store_true", help="with --grpc: stream from the decode workers themselves")
    add(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="deadline of each request; default: %(default)g"
    )
    add_tls_options(parser)


def _add_workload_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("what is sent").add_argument
    add("--trace", metavar="FILE", help="a recorded trace: Mooncake's or agents' JSONL, Azure's CSV ...")
    add("--dataset", metavar="FILE", help="prompts as JSON lines, or in ShareGPT's form")
    add("--mix", metavar="NAME[=SHARE],...", help="synthetic: random, shared-prefix, chat, rag, agents, bulk")
    add(
        "--requests",
        type=int,
        metavar="N",
        help=f"how many to send; default: all of a file, {_DEFAULT_REQUESTS} of a mix",
    )
    add("--duration", type=float, metavar="SECONDS", help="with --rate: as many requests as arrive in this time")
    add("--input-tokens", type=int, default=512, metavar="N", help="mean prompt length of a mix; default: %(default)s")
    add(
        "--output-tokens",
        type=int,
        default=128,
        metavar="N",
        help="mean answer length of a mix or dataset; default: %(default)s",
    )
    add(
        "--think",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="mean pause in a mix's conversations; default: %(default)g",
    )
    add("--scale", type=float, default=1.0, metavar="F", help="multiply the lengths of a trace's prompts by F")
    add(
        "--scale-outputs",
        type=float,
        metavar="F",
        help="multiply the lengths of a trace's answers by F; default: --scale",
    )
    add("--max-context", type=int, metavar="N", help="leave out requests that need more tokens")
    add("--text", action="store_true", help="send text instead of token ids; chat always does")
    add(
        "--token-ids",
        default="1000:2000",
        metavar="FROM:TO",
        help="range of the token ids in prompts; default: %(default)s",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy; default: %(default)g")
    add("--no-ignore-eos", action="store_true", help="let answers end early, for servers that do not know ignore_eos")
    add("--body", type=_json_object, default={}, metavar="JSON", help="further fields for each HTTP request")


def _add_load_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("when it is sent (lists are sweeps)").add_argument
    add("--rate", metavar="R,...", help="open loop: requests/s at random times")
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="CV",
        help="coefficient of variation of --rate's gaps: 1 is Poisson, more is bursty; default: 1",
    )
    add("--speed", metavar="F,...", help="open loop: a trace's own arrival times, F times as fast (default for traces)")
    add(
        "--concurrency",
        metavar="N,...",
        help=f"closed loop: clients that wait for answers; default: {_DEFAULT_CONCURRENCY}",
    )
    add("--warm-up", type=int, default=3, metavar="N", help="requests before each point; default: %(default)s")
    add("--lanes", metavar="LANE=SHARE,...", help="lanes for requests that name none")
    add(
        "--cancel",
        default="0",
        metavar="SHARE[:TOKENS]",
        help="share of the requests to cancel, and after how many tokens",
    )
    add("--seed", type=int, default=0, help="random seed; default: %(default)s")


def _add_report_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("what is reported").add_argument
    add(
        "--slo",
        action="append",
        default=[],
        metavar="ttft=S,tpot=S,...",
        help="limits in seconds on ttft, tpot, itl or e2e; may be repeated",
    )
    add("--out", metavar="FOLDER", help="where result.json, requests.csv and report.html go; default: a new one here")
    add("--label", default="", help="title of the report")
    add("--json", action="store_true", help="print the figures as JSON; result.json also has every request")
    add("--quiet", action="store_true", help="show no progress")


def _run(arguments: Namespace) -> int:
    """Runs a sweep, writes its files and prints the report; after Ctrl-C, of what was measured until then.

    Returns 1 if no request was answered.
    """
    result = asyncio.run(_measure(arguments))
    folder = Path(arguments.out or f"penstock-bench-{datetime.now():%Y%m%d-%H%M%S}")
    write_files(result, folder)
    print(_format(result, arguments.json))
    print(f"\nwritten: {folder}/result.json, requests.csv, report.html", file=sys.stderr)
    if any(point.run.is_interrupted for point in result.points):
        return _INTERRUPTED
    return 0 if any(point.figures.endings.get("complete") for point in result.points) else 1


def _format(result: BenchResult, as_json: bool) -> str:
    from penstock.bench.reports.text import describe_result
    from penstock.bench.results.result_file import summary_json

    return json.dumps(summary_json(result), indent=2) if as_json else describe_result(result, columns_of(sys.stdout))


def write_files(result: BenchResult, folder: Path) -> None:
    """Writes the three files of a result."""
    from penstock.bench.reports.html import html_report
    from penstock.bench.results.result_file import to_csv, to_json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(to_json(result)) + "\n")
    (folder / "requests.csv").write_text(to_csv(result))
    (folder / "report.html").write_text(html_report(result))


async def _measure(arguments: Namespace) -> BenchResult:
    from penstock.bench.measure import make_result, measure, words_per_token

    spec = sweep_spec(arguments)
    endpoint, target = await _open_endpoint(arguments)
    try:
        if arguments.text or arguments.api == "chat":
            spec = replace(spec, words_per_token=await words_per_token(endpoint, spec.seed))
        points = await measure(spec, endpoint)
    finally:
        await endpoint.close()
    hidden = ("run", "action", "api_key", "out", "label", "json", "quiet")
    settings = {
        name: value for name, value in vars(arguments).items() if name not in hidden and value not in (None, [], {}, "")
    }
    settings["url"] = without_user(arguments.url)
    return make_result(spec, points, target=target, label=arguments.label, settings=settings)


def sweep_spec(arguments: Namespace) -> SweepSpec:
    """Returns what the flags describe. Raises InvalidInput."""
    from penstock.bench.measure import SweepSpec
    from penstock.bench.results.slo import parse_slo

    source = _source(arguments)
    points = _points(arguments)
    if any(point.speed is not None for point in points) and not arguments.trace:
        raise InvalidInput("--speed", "needs --trace, whose recorded times it follows; give --rate or --concurrency")
    low, _, high = arguments.token_ids.partition(":")
    try:
        token_ids = range(int(low), int(high))
    except ValueError:
        raise InvalidInput("--token-ids", f"is {arguments.token_ids!r}; give FROM:TO, such as 1000:2000") from None
    return SweepSpec(
        source=source,
        points=points,
        slos=[parse_slo(text) for text in arguments.slo],
        extras=_extras(arguments),
        seed=arguments.seed,
        warm_up=arguments.warm_up,
        token_ids=token_ids,
        max_requests_s=arguments.duration,
        is_quiet=arguments.quiet,
    )


def _source(arguments: Namespace) -> Source:
    from penstock.bench.workloads.datasets import dataset_source
    from penstock.bench.workloads.mixes import MixSizes, mix_source, parse_mix
    from penstock.bench.workloads.recorded import trace_source

    given = [name for name in ("trace", "dataset", "mix") if getattr(arguments, name)]
    if len(given) > 1:
        raise InvalidInput("workload", f"--{' and --'.join(given)} are given; give one")
    count = arguments.requests
    if count is not None and count < 1:
        raise InvalidInput("--requests", f"is {count}; give at least 1")
    if arguments.duration is not None and (not arguments.rate or not arguments.duration > 0):
        raise InvalidInput("--duration", f"is {arguments.duration:g}; give seconds above 0, and --rate with it")
    if arguments.trace:
        return trace_source(
            arguments.trace,
            seed=arguments.seed,
            limit=count,
            input_factor=arguments.scale,
            output_factor=arguments.scale_outputs,
            max_context=arguments.max_context,
        )
    if count is None and arguments.duration is not None:
        count = round(max(_numbers("--rate", arguments.rate, float)) * arguments.duration) or 1
    if arguments.dataset:
        return dataset_source(arguments.dataset, arguments.output_tokens, count)
    sizes = MixSizes(arguments.input_tokens, arguments.output_tokens, arguments.think)
    shares = parse_mix(arguments.mix or "random")
    return mix_source(shares, sizes, count or _DEFAULT_REQUESTS, arguments.seed, arguments.max_context)


def _points(arguments: Namespace) -> list[Arrivals]:
    from penstock.bench.workloads.schedule import Arrivals

    given = [name for name in ("rate", "speed", "concurrency") if getattr(arguments, name)]
    if len(given) > 1:
        raise InvalidInput("load", f"--{' and --'.join(given)} are given; give one")
    if arguments.rate:
        return [Arrivals(rate=rate, cv=arguments.burstiness) for rate in _numbers("--rate", arguments.rate, float)]
    if arguments.concurrency:
        return [Arrivals(concurrency=count) for count in _numbers("--concurrency", arguments.concurrency, int)]
    if arguments.speed or arguments.trace:
        return [Arrivals(speed=speed) for speed in _numbers("--speed", arguments.speed or "1", float)]
    return [Arrivals(concurrency=_DEFAULT_CONCURRENCY)]


def _numbers(name: str, text: str, kind: Callable[[str], NumberT]) -> list[NumberT]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInput(name, f"is {text!r}; give numbers, separated by commas") from None


def _extras(arguments: Namespace) -> Extras:
    from penstock.bench.workloads.schedule import Extras
    from penstock.types import Lane

    share, _, tokens = arguments.cancel.partition(":")
    try:
        cancel_share, cancel_after = float(share), int(tokens or 4)
    except ValueError:
        cancel_share, cancel_after = -1.0, 1
    if not 0 <= cancel_share <= 1 or cancel_after < 1:
        raise InvalidInput("--cancel", f"is {arguments.cancel!r}; give a share from 0 to 1, as 0.1 or 0.1:20")
    lanes: dict[Lane, float] = {}
    for part in filter(None, (arguments.lanes or "").split(",")):
        name, _, text = part.partition("=")
        try:
            lanes[Lane(name.strip())] = float(text or 1)
        except ValueError:
            known = ", ".join(lane.value for lane in Lane)
            raise InvalidInput("--lanes", f"has {part!r}; give LANE=SHARE of {known}") from None
    return Extras(lanes or None, cancel_share, cancel_after)


async def _open_endpoint(arguments: Namespace) -> tuple[Endpoint, str]:
    """Returns the endpoint and its description."""
    ignore_eos, as_text = not arguments.no_ignore_eos, arguments.text
    if arguments.grpc:
        check_address("--grpc", arguments.grpc, "localhost:50051")
        from penstock.bench.driver.deployment_grpc import GrpcEndpoint

        grpc_endpoint = GrpcEndpoint(
            arguments.grpc,
            model=arguments.model,
            as_text=as_text,
            temperature=arguments.temperature,
            ignore_eos=ignore_eos,
            api_key=arguments.api_key,
            tls=client_tls(arguments),
            lookaside=arguments.lookaside,
            timeout_s=arguments.timeout,
        )
        return grpc_endpoint, f"gRPC {arguments.grpc}"
    from penstock.bench.driver.openai_http import OpenAiEndpoint, RequestForm, base_url, find_model

    api_key = arguments.api_key or os.environ.get("PENSTOCK_API_KEY")
    tls = client_tls(arguments)
    model = arguments.model or await find_model(arguments.url, api_key, tls)
    form = RequestForm(model, arguments.api, as_text, arguments.temperature, ignore_eos, arguments.body)
    endpoint = OpenAiEndpoint(arguments.url, form, api_key=api_key, tls=tls, timeout_s=arguments.timeout)
    return endpoint, f"{without_user(base_url(arguments.url))}, {arguments.api}, model {model}"


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidInput("--body", f'is not valid JSON: {error}; give an object such as {{"top_k": 20}}') from error
    if not isinstance(found, dict):
        raise InvalidInput("--body", f"is {text!r}; give a JSON object")
    return found


def _compare(arguments: Namespace) -> int:
    """Prints the comparison of two results."""
    from penstock.bench.reports.text import comparison_table
    from penstock.bench.results.compare import compare
    from penstock.bench.results.result_file import read_result

    a, b = read_result(arguments.a), read_result(arguments.b)
    found = compare(a, b, arguments.seed)
    if not found:
        names = [", ".join(point.name for point in result.points) for result in (a, b)]
        raise InvalidInput("results", f"have no point in common: {names[0]} against {names[1]}; measure the same load")
    if arguments.json:
        print(json.dumps([_as_json(asdict(each), each.ratios) for each in found], indent=2))
        return 0
    columns = columns_of(sys.stdout)
    for name, result, file in (("A", a, arguments.a), ("B", b, arguments.b)):
        print(wrap(f"{name}: {result.label or file}, {result.workload}, {result.target}", columns))
    for each in found:
        how = "the same requests in both" if each.is_paired else "different requests"
        counts = f"{each.num_requests[0]} and {each.num_requests[1]} requests"
        print(wrap(f"\n== {each.name}: {counts}, {how} ==", columns))
        print(format_table(*comparison_table(each), columns))
    return 0


def _as_json(data: dict[str, Any], ratios: Any) -> dict[str, Any]:
    """Adds the verdicts, which are not fields."""
    data["ratios"] = [asdict(each) | {"verdict": each.verdict} for each in ratios]
    return data


def _report(arguments: Namespace) -> int:
    """Prints a result, and writes its page next to it."""
    from penstock.bench.reports.html import html_report
    from penstock.bench.results.result_file import read_result

    result = read_result(arguments.result)
    path = Path(arguments.result)
    page = (path if path.is_dir() else path.parent) / "report.html"
    page.write_text(html_report(result))
    print(_format(result, arguments.json))
    print(f"\nwritten: {page}", file=sys.stderr)
    return 0
