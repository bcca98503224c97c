"""`penstock trace`: show where one request's time went, and why its workers were chosen."""

from __future__ import annotations

import json
import shutil
import sys
import urllib.parse
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.cli.admin import CALL_TIMEOUT_S, admin_stub
from cluster.cli.commands.calling.generate import format_decision
from cluster.cli.options import add_admin_options
from cluster.cli.router_http import RouterHttp, router_urls
from penstock.charts.table import format_table, wrap
from penstock.errors import InvalidInput, PenstockError, Unavailable
from penstock.v1 import admin_pb2

_TIMEOUT_S = 5.0  # of each router
_HEADER = ("stage", "start ms", "ms", "at", "")
_WIDTH = 100  # of the output where there is not a terminal
_SHORTEST_BAR, _LONGEST_BAR = 10, 60


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("request", help="the `id` in the body of its answer, as the live page names it, or the answer's x-request-id")
    add(
        "--router",
        metavar="URL",
        help="ask this router, such as http://localhost:8000; default: every router of the deployment",
    )
    add("--metrics-token-file", metavar="FILE", help="token for the routers' /metrics, if they demand one")
    add("--json", action="store_true", help="print the router's answer as JSON")
    add_admin_options(parser)


def run(arguments: Namespace) -> int:
    """Prints the waterfall of a request that runs at a router or is among its last completions."""
    routers = RouterHttp(arguments, _TIMEOUT_S)
    urls = [_base_url(arguments.router)] if arguments.router else _router_urls(arguments)
    found = _find(urls, arguments.request, routers)
    if arguments.json:
        print(json.dumps(found))
        return 0
    print(format_waterfall(found, shutil.get_terminal_size((_WIDTH, 0)).columns, _bar_character()))
    return 0


def _base_url(text: str) -> str:
    """Returns the URL without a path. Raises InvalidInput unless it is a URL of HTTP."""
    wrong = InvalidInput("--router", f"is {text!r}; give http://HOST:PORT, such as http://localhost:8000")
    try:
        parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
    except ValueError as error:
        raise wrong from error
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise wrong
    return f"{parts.scheme}://{parts.netloc}"


def _router_urls(arguments: Namespace) -> list[str]:
    """Returns the base of each router's own URL. Raises Unavailable if Admin lists none."""
    with admin_stub(arguments) as (stub, metadata):
        status = stub.Status(admin_pb2.StatusRequest(), timeout=CALL_TIMEOUT_S, metadata=metadata)
    if not (urls := router_urls(status)):
        raise Unavailable("the deployment lists no router; name one with --router http://HOST:PORT")
    return urls


def _find(urls: Sequence[str], request_id: str, routers: RouterHttp) -> dict[str, Any]:
    """Returns the first router's answer that knows the request.

    Raises the error of a router that cannot be read, or InvalidInput if none of them knows the request.
    """
    failed: PenstockError | None = None
    for url in urls:
        try:
            body = routers.get(f"{url}/ui/requests/{urllib.parse.quote(request_id, safe='')}")
        except PenstockError as error:
            failed = error
            continue
        if body is not None and (answer := _read_answer(body)) is not None:
            return answer
    if failed is not None:
        raise failed
    raise InvalidInput(
        "request",
        f"{request_id!r} neither runs at {' or '.join(urls)} nor is among the last completions there; "
        "give the `id` in the body of its answer or its x-request-id; a router keeps 1,000 completions that have "
        "ended, and none that was refused or cancelled",
    )


def _read_answer(body: bytes) -> dict[str, Any] | None:
    """Returns a router's answer, or None for that of another kind of server."""
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "completions" in found else None


def _bar_character() -> str:
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#"
    return "█"


def format_waterfall(found: Mapping[str, Any], columns: int, mark: str = "█") -> str:
    """Formats a router's answer: for each completion its stages as bars on one scale, then the decision.

    Bars take what `columns` leave, and consist of `mark`.
    """
    longest_ms = max((completion["end_ms"] for completion in found["completions"]), default=0.0)
    parts = [f"trace {found['trace_id']}"] if found["trace_id"] else []
    for completion in found["completions"]:
        parts.append(f"{_headline(found, completion)}\n{_bars(completion, longest_ms, columns, mark)}")
        parts += _legs(completion["legs"])
        if completion["preempted_ms"]:
            parts.append("preempted at " + ", ".join(f"{at_ms:.1f} ms" for at_ms in completion["preempted_ms"]))
    return wrap("\n\n".join([*parts, format_decision(found["decision"], columns)]), columns)


def _headline(found: Mapping[str, Any], completion: Mapping[str, Any]) -> str:
    name = found["request_id"] + (f" [{completion['index']}]" if len(found["completions"]) > 1 else "")
    counts = (
        ("pages moved", completion["pages_moved"]),
        ("preemptions", completion["preemptions"]),
        ("migrations", completion["migrations"]),
        ("re-dispatches", completion["redispatches"]),
    )
    if found.get("running"):  # what only workers know is not known yet
        prompt, output = f"{completion['prompt_tokens']} prompt tokens", f"{completion['output_tokens']} tokens so far"
        took = f"still running after {completion['end_ms']:.1f} ms"
    else:
        prompt = f"{completion['prompt_tokens']} prompt tokens, {completion['cached_tokens']} cached"
        output = f"{completion['output_tokens']} tokens, {completion['finish_reason']}"
        took = f"{completion['end_ms']:.1f} ms"
    first_ms = completion["first_token_ms"]
    first = f"first token after {first_ms:.1f} ms" if first_ms else "no token yet"
    lane = f"{completion['lane']} lane"
    details = ", ".join([prompt, output, lane, *(f"{what}: {count}" for what, count in counts if count)])
    return f"{name}: {took}, {first}\n{details}"


def _bars(completion: Mapping[str, Any], longest_ms: float, columns: int, mark: str) -> str:
    rows = [
        [
            stage["name"],
            f"{stage['start_ms']:.1f}",
            f"{stage['end_ms'] - stage['start_ms']:.1f}",
            stage["worker"] or "router",
        ]
        for stage in completion["stages"]
    ]
    taken = max(len(line) for line in format_table(_HEADER[:-1], rows).splitlines()) + 2
    width = min(_LONGEST_BAR, max(_SHORTEST_BAR, columns - taken))
    scale = width / longest_ms if longest_ms else 0.0
    for row, stage in zip(rows, completion["stages"], strict=True):
        begin = min(round(stage["start_ms"] * scale), width - 1)
        row.append(" " * begin + mark * max(1, round(stage["end_ms"] * scale) - begin))
    return format_table(_HEADER, rows)


def _legs(legs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a paragraph on the decode workers that a completion went to, if there were several."""
    if len(legs) < 2:
        return []
    lines = []
    for leg in legs:
        lost = f", lost at {leg['lost_ms']:.1f} ms ({leg['error']})" if "lost_ms" in leg else ""
        lines.append(f"{leg['worker']}: {leg['cause']} at {leg['sent_ms']:.1f} ms{lost}")
    return ["\n".join(lines)]
