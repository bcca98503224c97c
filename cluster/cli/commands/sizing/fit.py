"""`penstock fit`: write what steps cost on a running deployment, for the simulator and for planning."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace

from cluster.cli.admin import CALL_TIMEOUT_S, admin_stub
from cluster.cli.options import add_admin_options, local_folder, require_positive
from cluster.cli.progress import Progress
from penstock import wire
from penstock.charts.table import columns_of, format_table, wrap
from penstock.sizing.model_shape import find_shape
from penstock.types import Role
from penstock.v1 import admin_pb2
from simulator.costs.cost_file import CostProfile, write_costs
from simulator.costs.fit import fit_steps
from simulator.costs.records import StepRecord, StepRecorder
from simulator.costs.step_costs import LinkCosts

_POLL_S = 0.25


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("output", metavar="FILE", help="the cost file to write")
    add("--seconds", type=float, default=60.0, help="how long to watch, while traffic is served; default: %(default)s")
    add("--link-gbit", type=float, default=100.0, help="speed of the link between workers; default: %(default)s")
    add(
        "--shape",
        metavar="MODEL",
        help="a folder, config.json, id of the Hub or known shape, for KV bytes; default: the model",
    )
    add("--json", action="store_true", help="print the costs as JSON, as they are written")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="ranks of a worker; default: 1")
    add_admin_options(parser)


def run(arguments: Namespace) -> int:
    """Watches load reports and fits the costs. Raises InvalidInput if there was too little traffic to learn from."""
    require_positive("--seconds", arguments.seconds)
    require_positive("--link-gbit", arguments.link_gbit)
    model, records = watch(arguments)
    fitted = fit_steps(records)
    shape = find_shape(local_folder(arguments.shape or model, config_only=True))
    link = LinkCosts(bytes_per_s=arguments.link_gbit * 1e9 / 8, token_bytes=int(shape.kv_token_bytes))
    source = f"fitted to {len(records)} reports of steps within {arguments.seconds:g} s"
    profile = CostProfile(
        model,
        source,
        fitted.prefill,
        fitted.decode,
        link,
        tensor_parallel=arguments.tensor_parallel,
        errors=fitted.errors,
        spread=fitted.spread,
    )
    write_costs(profile, arguments.output)
    print(
        json.dumps(asdict(profile), indent=2) if arguments.json else describe(profile, records, columns_of(sys.stdout))
    )
    print(f"wrote {arguments.output}", file=sys.stderr)
    return 0


def watch(arguments: Namespace) -> tuple[str, list[StepRecord]]:
    """Polls the deployment's load reports. Returns the model and what was recorded."""
    recorder, end_s = StepRecorder(), time.monotonic() + arguments.seconds
    with admin_stub(arguments) as (stub, metadata), Progress("watching the deployment") as progress:
        while True:
            status = stub.Status(admin_pb2.StatusRequest(), timeout=CALL_TIMEOUT_S, metadata=metadata)
            observe(recorder, status)
            left_s = end_s - time.monotonic()
            progress.show(f"{len(recorder.records)} reports of steps", 1 - max(0.0, left_s) / arguments.seconds)
            if left_s <= 0:
                return status.model, recorder.records
            time.sleep(min(_POLL_S, left_s))


def observe(recorder: StepRecorder, status: admin_pb2.StatusResponse) -> None:
    """Records the load of each worker that computes."""
    for worker in status.workers:
        if worker.member.role in {role.value for role in Role} and worker.HasField("load"):
            name = f"{worker.member.worker_id} {worker.member.epoch}"
            recorder.observe(name, Role(worker.member.role), wire.load_from_wire(worker.load))


def describe(profile: CostProfile, records: list[StepRecord], columns: int | None = None) -> str:
    """Returns the costs as a table, in the units that people compare, no wider than `columns`."""
    prefill, decode = profile.prefill, profile.decode
    rows = [
        ("prefill", f"{prefill.step_s * 1e3:.3g} ms", f"{prefill.token_s * 1e6:.3g} us", _ns(prefill.context_s)),
        ("decode", f"{decode.step_s * 1e3:.3g} ms", f"{decode.sequence_s * 1e6:.3g} us", _ns(decode.kv_token_s)),
    ]
    if decode.chunk != replace(prefill):
        chunk = decode.chunk
        rows.append(
            ("prompts during decoding", f"{chunk.step_s * 1e3:.3g} ms", f"{chunk.token_s * 1e6:.3g} us",
             _ns(chunk.context_s))
        )  # fmt: skip
    errors = ", ".join(f"{name} {value:.0%}" for name, value in profile.errors.items())
    table = format_table(("steps", "fixed", "each token", "each token and context token"), rows, columns)
    return f"{table}\n\n{wrap(f'{len(records)} reports; relative errors: {errors}', columns)}"


def _ns(seconds: float) -> str:
    return f"{seconds * 1e9:.3g} ns"
