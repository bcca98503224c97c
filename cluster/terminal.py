"""What the commands print: progress while a deployment starts, its status, where a request's time went.

Uses rich where it is installed and the output is a terminal, plain lines everywhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from penstock.completions import Timing
from penstock.start_progress import stage_of
from penstock.v1 import admin_pb2


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces, those of numbers to the right."""
    columns = []
    for title, *cells in zip(header, *rows, strict=True):
        width = max(len(cell) for cell in (title, *cells))
        numeric = all(cell == "-" or cell[:1].isdigit() for cell in cells)
        columns.append([cell.rjust(width) if numeric else cell.ljust(width) for cell in (title, *cells)])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


TIMING_HEADER = (
    "queue ms",
    "prefill ms",
    "transfer ms",
    "TTFT ms",
    "ms/token",
    "served by",
    "tokens cached",
    "pages moved",
)


def timing_row(timing: Timing, num_tokens: int) -> list[str]:
    """The cells below TIMING_HEADER. A single token has no time per token."""
    per_token = f"{timing.decode_ms / (num_tokens - 1):.1f}" if num_tokens > 1 else "-"
    return [
        f"{timing.queue_ms:.1f}",
        f"{timing.prefill_ms:.1f}",
        f"{timing.transfer_ms:.1f}",
        f"{timing.first_token_ms:.1f}",
        per_token,
        " > ".join(dict.fromkeys((timing.prefill_worker, timing.decode_worker))),  # one that did both: once
        str(timing.cached_tokens),
        str(timing.pages_moved),
    ]


_STAGES = ("queue", "prefill", "transfer", "admission", "decode", "harm", "bonus", "total")


def format_decision(decision: Mapping[str, Any]) -> str:
    """A decision record: for each completion the pairs considered, cheapest first, and what the chosen one took."""
    parts = [f"policy {decision['policy']}; milliseconds; * is the pair chosen"]
    for completion in decision["completions"]:
        rows = []
        for attempt in completion["attempts"]:
            chosen = attempt["predicted"]
            others = [one for one in attempt["considered"] if one != chosen]
            rows += [_decision_row(one, "*" if one is chosen else " ") for one in (chosen, *others)]
        if "actual" in completion:  # a lookaside stream's record was made before
            rows.append(_actual_row(completion["actual"]))
        parts.append(format_table(["", "pair", *_STAGES, "cached"], rows))
    return "\n".join(parts)


def _actual_row(actual: Mapping[str, Any]) -> list[str]:
    took = [f"{actual[f'{stage}_ms']:.1f}" if f"{stage}_ms" in actual else "-" for stage in _STAGES]
    cached = f"{actual['prefill_cached_tokens']}/{actual['decode_cached_tokens']}"
    return ["=", f"{actual['prefill_worker']} > {actual['decode_worker']}", *took, cached]


def _decision_row(score: Mapping[str, Any], mark: str) -> list[str]:
    stages = [f"{score[f'{stage}_ms']:.1f}" for stage in _STAGES]
    cached = f"{score['prefill_cached_tokens']}/{score['decode_cached_tokens']}"
    return [mark, f"{score['prefill']} > {score['decode']}", *stages, cached]


def format_status(status: admin_pb2.StatusResponse) -> str:
    """The answer of `penstock status`."""
    state = "ready" if status.ready else "not ready"
    head = f"{status.model}: {state}, up {status.uptime_s:.0f} s, at {', '.join(status.endpoints) or 'no address yet'}"
    rows = [
        [
            worker.member.worker_id,
            worker.state,
            str(worker.pid or "-"),
            str(worker.num_restarts),
            str(worker.load.num_running) if worker.HasField("load") else "-",
            str(worker.load.num_waiting) if worker.HasField("load") else "-",
            f"{worker.load.free_pages}/{worker.load.total_pages}" if worker.HasField("load") else "-",
            worker.member.address or "-",
            worker.detail or (f"{worker.num_ranks} ranks" if worker.num_ranks > 1 else ""),
        ]
        for worker in status.workers
    ]
    header = ("worker", "state", "pid", "restarts", "running", "waiting", "free pages", "address", "")
    spares = [[one.name, one.state, str(one.pid or "-"), *["-"] * 5, one.detail] for one in status.spares]
    balance = status.balance
    evened = f"\n\nevened out: {balance.moved} sequences in {balance.rounds} rounds; the last: {balance.last_reason}"
    return f"{head}\n\n{format_table(header, rows + spares)}{evened if balance.rounds else ''}"


def format_drain(progress: admin_pb2.DrainProgress) -> str:
    """One line of `penstock drain`."""
    name, moved = progress.worker_id, f"{progress.num_moved} moved"
    if progress.num_pages_handed:
        moved += f" and {progress.num_pages_handed} cached pages handed over"
    waits = f" ({progress.detail})" if progress.detail else ""
    match progress.stage:
        case "waiting":
            return f"{name} serves until another one can: {progress.detail}"
        case "draining":
            return f"{name} takes no new requests; {progress.num_left} left, {moved}{waits}"
        case "stopping" if progress.num_cut_short:
            return f"{name} is not empty in time, {moved}; it is ended now{waits}"
        case "stopping":
            return f"{name} is empty, {moved}; it is ended now"
    return f"{name} has ended after {progress.elapsed_s:.1f} s"


class StartProgress:
    """Shows each worker's way to ready. Used as a `with` block around `launch`, which calls `show`."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._live: Any = None

    def __enter__(self) -> StartProgress:
        if sys.stderr.isatty():
            self._live = _make_live()
        if self._live is not None:
            self._live.start()
        return self

    def show(self, status: admin_pb2.StatusResponse) -> None:
        if self._live is not None:
            self._live.update(_start_grid(status))
            return
        for line in changes(self._states, status):
            print(line, file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def changes(states: dict[str, str], status: admin_pb2.StatusResponse) -> list[str]:
    """One line for each worker whose state is not the one in `states`, which is brought up to date."""
    lines = []
    for worker in status.workers:
        name, state = worker.member.worker_id, worker.state
        if states.get(name) != state:
            states[name] = state
            reason = f": {worker.detail}" if state == "lost" and worker.detail else ""
            lines.append(f"{name} is {state}{reason}")
    return lines


def _make_live() -> Any:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return None
    return Live(console=Console(stderr=True), refresh_per_second=8, transient=True)


def _start_grid(status: admin_pb2.StatusResponse) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for worker in status.workers:
        mark: Any = "[green]ready[/]" if worker.state == "ready" else Spinner("dots", style="cyan")
        _, share = stage_of(worker.detail)
        bar: Any = ProgressBar(total=1.0, completed=share, width=24) if share is not None else ""
        grid.add_row(worker.member.worker_id, mark, worker.detail or worker.state, bar)
    return grid


def how_to_call(model: str, endpoints: Mapping[str, str], *, encrypted: bool = False, keyed: bool = False) -> str:
    """What a person can type next. `endpoints` holds host:port of http, grpc and admin.

    `keyed` callers have their API key in PENSTOCK_API_KEY, which the clients read by themselves.
    """
    url, tls = f"http{'s' * encrypted}://{endpoints['http']}", "--tls " * encrypted
    made = f'"{endpoints["grpc"]}"' + ", tls=ClientTls()" * encrypted
    imports = "from penstock import Client" + "; from penstock.client_auth import ClientTls" * encrypted
    header = ' -H "Authorization: Bearer $PENSTOCK_API_KEY"' * keyed
    body = f'{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 40}}'
    return f"""\
  HTTP   {url}/v1   (OpenAI's API)
  gRPC   {endpoints["grpc"]}   (penstock.v1.Inference, with reflection)
  admin  {endpoints["admin"]}

  penstock generate {tls}--server {endpoints["grpc"]} "Once upon a time"
  penstock status --admin {endpoints["admin"]}
  python -c '{imports}; print(Client({made}).complete("Once upon a time").text)'
  curl {url}/v1/completions{header} -H 'Content-Type: application/json' -d '{body}'"""
