"""`penstock plan-memory`: show how much of a device a model and its KV pages take, and how many requests fit."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.cli.options import local_folder
from engine.memory.device_memory import find_device
from engine.memory.plan import MemoryPlan, in_units, plan_memory
from engine.weights.checkpoint import CONFIG_FILE
from penstock.charts.table import columns_of, format_table, name_rows, wrap
from penstock.config import ServeConfig, parse, read
from penstock.types import Role


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model", metavar="MODEL", help="a Hugging Face checkpoint folder or an id of the Hub; config.json alone will do"
    )
    add("--device", default="cpu", metavar="D", help="cpu, cuda, H200, 24GiB, cpu:64GiB ...; default: %(default)s")
    add("--context", type=int, metavar="N", help="tokens of a request that must fit")
    add("--tp", type=int, metavar="N", help="ranks that share a replica, each on a device; engine.tensor_parallel")
    add("--config", metavar="FILE", help="the deployment's settings, as for `penstock serve`")
    add("--role", choices=[role.value for role in Role], default=Role.DECODE.value, help="default: %(default)s")
    add("--json", action="store_true", help="print JSON")


def run(arguments: Namespace) -> int:
    """Prints the plan. Raises what `engine.memory.plan.plan_memory` raises: why a plan cannot work."""
    given = Path(arguments.model)
    is_file = given.name == CONFIG_FILE and given.is_file()
    model = str(given.parent) if is_file else local_folder(arguments.model, config_only=True)
    data: dict[str, Any] = dict(read(arguments.config) if arguments.config else {}) | {"model": model}
    if arguments.tp is not None:
        data["engine"] = dict(data.get("engine", {})) | {"tensor_parallel": arguments.tp}
    config = parse(ServeConfig, data, source=arguments.config or "penstock plan-memory")
    role = Role(arguments.role)
    device = find_device(arguments.device)
    decode = config.decode.on_gpu() if device.type == "cuda" else config.decode
    worker = config.prefill if role is Role.PREFILL else decode
    plan = plan_memory(
        config.engine_config(role),
        device,
        context=arguments.context,
        step_tokens=worker.max_batch_tokens,
        max_sequences=worker.max_batch_sequences,
        draft_model=config.decode.draft_model if role is Role.DECODE else None,
        has_prompt_stream=config.decode.prompt_sm_share > 0,
    )
    if arguments.json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        print(describe(plan, worker.max_batch_sequences, columns_of(sys.stdout)))
    return 0


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    """Returns the plan as plain data."""
    model, layout = plan.model, plan.layout
    return {
        "device": asdict(plan.device),
        "num_ranks": plan.num_ranks,
        "model": model.family.architecture,
        "has_weights": plan.has_weights,
        "dtype": layout.dtype,
        "kv_dtype": layout.kv_dtype if layout.is_quantized else layout.dtype,
        "weight_bytes": plan.weight_bytes,
        "step_bytes": plan.step_bytes,
        "graph_bytes": plan.graph_bytes,
        "adapter_bytes": plan.adapter_bytes,
        "draft_bytes": plan.draft_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "page_size": layout.page_size,
        "page_bytes": layout.page_bytes,
        "num_pages": plan.num_pages,
        "num_slots": plan.num_slots,
        "kv_bytes": plan.kv_bytes,
        "host_tier_bytes": plan.host_tier_bytes,
        "max_context": plan.max_context,
        "largest_batch": {str(context): batch for context, batch in plan.largest_batch.items()},
    }


def describe(plan: MemoryPlan, max_sequences: int, columns: int | None = None) -> str:
    """Returns the plan as a table of sizes, and of the largest batch by context length, no wider than `columns`."""
    model, layout = plan.model, plan.layout
    tokens = plan.num_pages * layout.page_size
    experts = model.experts
    active = f", {experts.num_chosen} of {experts.num_experts} experts a token" if experts else ""
    ranks = f" for each of {plan.num_ranks} ranks; the figures below are for one rank" if plan.num_ranks > 1 else ""
    rows = [
        ("model", f"{model.family.architecture}, {model.num_layers} layers{active}, {layout.dtype}"),
        ("device", f"{plan.device.name}, {in_units(plan.device.total_bytes)}{ranks}"),
        ("weights", f"{in_units(plan.weight_bytes)} ({plan.weight_bytes:,} bytes)"),
        ("one step", f"about {in_units(plan.step_bytes)}"),
        *([("captured decode steps", f"about {in_units(plan.graph_bytes)}")] if plan.graph_bytes else []),
        *([("adapter slots", in_units(plan.adapter_bytes))] if plan.adapter_bytes else []),
        *([("draft model", f"{in_units(plan.draft_bytes)} with its pages")] if plan.draft_bytes else []),
        (
            "KV",
            f"{plan.kv_bytes_per_token:,} bytes a token, {in_units(layout.page_bytes)} a page of {layout.page_size}"
            f"{f', in {layout.kv_dtype}' if layout.is_quantized else ''}",
        ),
        ("pages", f"{plan.num_pages:,} in {in_units(plan.kv_bytes)}: {tokens:,} tokens"),
    ]
    if plan.num_slots:
        rows.append(("windowed layers", f"room in {plan.num_slots:,} of the pages"))
    if plan.host_tier_bytes:
        rows.append(
            ("host tier", f"{plan.host_tier_bytes // layout.page_bytes:,} pages in {in_units(plan.host_tier_bytes)}")
        )
    table = format_table(
        ("context", "largest batch"), [(str(context), str(batch)) for context, batch in plan.largest_batch.items()]
    )
    notes = (
        []
        if plan.has_weights
        else ["There is no weight file, so the size of the weights is computed from config.json."]
    )
    if max(plan.largest_batch.values()) > max_sequences:
        notes.append(f"A step takes at most {max_sequences} sequences, unless max_batch_sequences is raised.")
    if plan.longest_fitting < plan.max_context:
        notes.append(
            f"No request of more than {tokens:,} tokens fits; set engine.max_context = {tokens} to refuse longer ones."
        )
    paragraphs = [name_rows(rows, columns), table]
    if notes:
        paragraphs.append("\n".join(wrap(note, columns) for note in notes))
    return "\n\n".join(paragraphs)
