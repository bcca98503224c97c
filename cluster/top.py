"""`penstock top`: pools and workers as they are now, again and again. On a terminal a live view, else lines of text."""

from __future__ import annotations

import contextlib
import itertools
import json
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from cluster.commands import admin_stub
from cluster.rates import Rates, RouterCounts, Sample, WorkerRates, rates, read_counts
from cluster.terminal import format_table
from penstock.errors import InvalidInput
from penstock.secret import read_private
from penstock.v1 import admin_pb2

_CALL_TIMEOUT_S = 10.0
_SCRAPE_TIMEOUT_S = 3.0
_HEADER = ("worker", "state", "running", "waiting", "pages", "prefill t/s", "decode t/s", "step ms", "cache hits", "")


def top(arguments: Namespace) -> int:
    """Until Ctrl-C, or `--count` times; each view is what happened since the one before it."""
    if arguments.interval <= 0:
        raise InvalidInput("interval", f"is {arguments.interval:g}; give a number of seconds above 0")
    token = read_private(arguments.metrics_token_file, "--metrics-token-file") if arguments.metrics_token_file else ""
    with admin_stub(arguments) as (stub, metadata):

        def look() -> Sample:
            status = stub.Status(admin_pb2.StatusRequest(), timeout=_CALL_TIMEOUT_S, metadata=metadata)
            return Sample(time.monotonic(), status, scrape(status, token, arguments.ca))

        views = itertools.islice(_views(look, arguments.interval), arguments.count)
        if arguments.json:
            for status, view in views:
                print(json.dumps({"model": status.model, **asdict(view)}), flush=True)
        else:
            _show(views)
    return 0


def _views(look: Callable[[], Sample], interval_s: float) -> Iterator[tuple[admin_pb2.StatusResponse, Rates]]:
    never = threading.Event()
    before = look()
    while True:
        never.wait(interval_s)  # ended by Ctrl-C
        now = look()
        yield now.status, rates(before, now)
        before = now


def scrape(status: admin_pb2.StatusResponse, token: str, authority: str | None) -> dict[str, RouterCounts]:
    """What each router counts; without those that refuse, or are out of reach."""
    found = {}
    for endpoint in (one for one in status.endpoints if one.startswith("http")):
        request = urllib.request.Request(f"{endpoint}/metrics")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        context = ssl.create_default_context(cafile=authority) if endpoint.startswith("https") else None
        with contextlib.suppress(urllib.error.URLError, TimeoutError):
            with urllib.request.urlopen(request, timeout=_SCRAPE_TIMEOUT_S, context=context) as answer:
                found[endpoint] = read_counts(answer.read().decode())
    return found


def _show(views: Iterator[tuple[admin_pb2.StatusResponse, Rates]]) -> None:
    if not sys.stdout.isatty():
        for status, view in views:
            print(format_rates(status.model, view), end="\n\n", flush=True)
        return
    from rich.live import Live
    from rich.text import Text

    live: Any = Live(Text("looking ..."), screen=True, auto_refresh=False)
    with live:
        for status, view in views:
            live.update(Text(format_rates(status.model, view)), refresh=True)


def format_rates(model: str, view: Rates) -> str:
    head = (
        f"{model}: {'ready' if view.ready else 'not ready'}   {_number(view.tokens_per_s)} tokens/s   "
        f"TTFT {_pair_ms(view.ttft_s)} ms   ITL {_pair_ms(view.itl_s)} ms (p50/p99)   "
        f"prompts cached {_percent(view.hit_rate)}   queued {_number(view.num_queued)}"
    )
    pools = [_pool_line(role, [one for one in view.workers if one.role == role]) for role in ("prefill", "decode")]
    return "\n".join([head, *pools, "", format_table(_HEADER, [_row(one) for one in view.workers])])


def _pool_line(role: str, workers: list[WorkerRates]) -> str:
    num_ready = sum(one.state == "ready" for one in workers)
    rate = "prefill_tokens_per_s" if role == "prefill" else "decode_tokens_per_s"
    tokens = [value for one in workers if (value := getattr(one, rate)) is not None]
    used = [one.pages_used for one in workers if one.pages_used is not None]
    pages, rate_now = _percent(sum(used) / len(used) if used else None), _number(sum(tokens) if tokens else None)
    return (
        f"{role}: {num_ready} of {len(workers)} ready, {sum(one.num_running for one in workers)} running, "
        f"{sum(one.num_waiting for one in workers)} waiting, "
        f"pages {pages}, {rate_now} tokens/s"
    )


def _row(one: WorkerRates) -> list[str]:
    return [
        one.worker_id,
        one.state,
        str(one.num_running),
        str(one.num_waiting),
        _percent(one.pages_used),
        _number(one.prefill_tokens_per_s),
        _number(one.decode_tokens_per_s),
        "-" if one.step_s is None else f"{one.step_s * 1e3:.1f}",
        _percent(one.hit_rate),
        one.detail,
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _pair_ms(pair: tuple[float | None, float | None] | None) -> str:
    return "-" if pair is None else "/".join("beyond" if value is None else f"{value * 1e3:.3g}" for value in pair)
