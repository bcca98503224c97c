"""`penstock top`: watch pools, workers, pages, tokens/s and latencies."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from cluster.cli.admin import CALL_TIMEOUT_S, admin_stub
from cluster.cli.options import add_admin_options, require_positive
from cluster.cli.rates import DeploymentRates, DeploymentSnapshot, RouterCounts, WorkerRates, compute_rates, read_counts
from cluster.cli.router_http import RouterHttp, router_urls
from penstock.charts.table import columns_of, format_table, printable, wrap
from penstock.errors import PenstockError
from penstock.v1 import admin_pb2

_SCRAPE_TIMEOUT_S = 3.0
_FIRST_INTERVAL_S = 0.5
_HEADER = ("worker", "state", "run", "wait", "pages", "in t/s", "out t/s", "step ms", "hits", "")
_BAR_CELLS, _HISTORY = 8, 20
_LEVELS = "▁▂▃▄▅▆▇█"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--interval", type=float, default=2.0, metavar="SECONDS", help="time between two views; default: %(default)s")
    add("-n", "--count", type=int, metavar="N", help="number of views; default: until Ctrl-C")
    add("--metrics-token-file", metavar="FILE", help="token for the routers' /metrics, the source of TTFT and ITL")
    add("--json", action="store_true", help="print a line of JSON for each view")
    add_admin_options(parser)


def run(arguments: Namespace) -> int:
    """Prints views until Ctrl-C or `--count`; each covers the time since the previous one."""
    require_positive("interval", arguments.interval)
    routers = RouterHttp(arguments, _SCRAPE_TIMEOUT_S)
    with admin_stub(arguments) as (stub, metadata):

        def take_snapshot() -> DeploymentSnapshot:
            status = stub.Status(admin_pb2.StatusRequest(), timeout=CALL_TIMEOUT_S, metadata=metadata)
            counts, unread = scrape(status, routers)
            return DeploymentSnapshot(time.monotonic(), status, counts, unread)

        views = itertools.islice(_views(take_snapshot, arguments.interval), arguments.count)
        if arguments.json:
            for status, view in views:
                print(json.dumps({"model": status.model, **asdict(view)}), flush=True)
        else:
            _show(views)
    return 0


def _views(
    take_snapshot: Callable[[], DeploymentSnapshot], interval_s: float
) -> Iterator[tuple[admin_pb2.StatusResponse, DeploymentRates]]:
    never = threading.Event()
    before = take_snapshot()
    for wait_s in itertools.chain([min(interval_s, _FIRST_INTERVAL_S)], itertools.repeat(interval_s)):
        never.wait(wait_s)  # Ctrl-C ends the wait
        now = take_snapshot()
        yield now.status, compute_rates(before, now)
        before = now


def scrape(status: admin_pb2.StatusResponse, routers: RouterHttp) -> tuple[dict[str, RouterCounts], dict[str, str]]:
    """Returns the counts of each router by the URL of its metrics, and what is wrong with those that cannot be read."""
    found, unread = {}, {}
    for endpoint in (f"{url}/metrics" for url in router_urls(status)):
        try:
            found[endpoint] = read_counts((routers.get(endpoint) or b"").decode())
        except PenstockError as error:
            unread[endpoint] = error.message
        except ValueError:
            unread[endpoint] = f"{endpoint} does not answer with metrics; another server may listen there"
    return found, unread


def _show(views: Iterator[tuple[admin_pb2.StatusResponse, DeploymentRates]]) -> None:
    if not sys.stdout.isatty():
        for status, view in views:
            print(format_rates(status.model, view), end="\n\n", flush=True)
        return
    from rich.live import Live
    from rich.text import Text

    live: Any = Live(Text("collecting ..."), screen=True, auto_refresh=False)
    has_bars = (sys.stdout.encoding or "").lower().startswith("utf")
    past: deque[float] = deque(maxlen=_HISTORY)  # tokens/s
    with live:
        for status, view in views:
            past.append(view.tokens_per_s or 0.0)
            text = format_rates(status.model, view, past if has_bars else None, columns_of(sys.stdout))
            live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


def format_rates(
    model: str, view: DeploymentRates, past: Sequence[float] | None = None, columns: int | None = None
) -> str:
    """Formats one view: two lines on the deployment, a line a pool, a table of workers.

    With `past`, the tokens/s of the last views, pages become bars and those a curve. No line is wider than `columns`.
    """
    curve = f" {sparkline(past)}" if past is not None else ""
    head = (
        f"{model}: {'ready' if view.ready else 'not ready'}   {_number(view.tokens_per_s)} tokens/s{curve}   "
        f"queued {_number(view.num_queued)}\n"
        f"TTFT {_pair_ms(view.ttft_s)} ms   ITL {_pair_ms(view.itl_s)} ms (p50/p99)   "
        f"prompts cached {_percent(view.hit_rate)}"
    )
    has_bars = past is not None
    pools = [
        _pool_line(role, [worker for worker in view.workers if worker.role == role]) for role in ("prefill", "decode")
    ]
    table = format_table(_HEADER, [_row(worker, has_bars) for worker in view.workers], columns)
    notes = [printable(f"no figures of a router: {reason}") for reason in view.unread.values()]
    return wrap("\n".join([head, *pools, "", table, *(["", *notes] if notes else [])]), columns)


def sparkline(values: Sequence[float]) -> str:
    """Returns a character for each value, as high as its share of the largest."""
    top = max(values, default=0.0) or 1.0
    return "".join(_LEVELS[round((len(_LEVELS) - 1) * max(0.0, value) / top)] for value in values)


def _bar(share: float | None) -> str:
    filled = round(_BAR_CELLS * (share or 0.0))
    return "█" * filled + "░" * (_BAR_CELLS - filled)


def _pool_line(role: str, workers: list[WorkerRates]) -> str:
    num_ready = sum(worker.state == "ready" for worker in workers)
    name = "prefill_tokens_per_s" if role == "prefill" else "decode_tokens_per_s"
    token_rates = [rate for worker in workers if (rate := getattr(worker, name)) is not None]
    used = [worker.pages_used for worker in workers if worker.pages_used is not None]
    pages = _percent(sum(used) / len(used) if used else None)
    num_running, num_waiting = sum(w.num_running for w in workers), sum(w.num_waiting for w in workers)
    return (
        f"{role}: {num_ready} of {len(workers)} ready, {num_running} running, {num_waiting} waiting, "
        f"pages {pages}, {_number(sum(token_rates) if token_rates else None)} tokens/s"
    )


def _row(worker: WorkerRates, has_bars: bool) -> list[str]:
    return [
        worker.worker_id,
        worker.state,
        str(worker.num_running),
        str(worker.num_waiting),
        f"{_bar(worker.pages_used)} {_percent(worker.pages_used):>4}" if has_bars else _percent(worker.pages_used),
        _number(worker.prefill_tokens_per_s),
        _number(worker.decode_tokens_per_s),
        "-" if worker.step_s is None else f"{worker.step_s * 1e3:.1f}",
        _percent(worker.hit_rate),
        worker.detail,
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _pair_ms(pair: tuple[float | None, float | None] | None) -> str:
    return "-" if pair is None else "/".join("beyond" if value is None else f"{value * 1e3:.3g}" for value in pair)
