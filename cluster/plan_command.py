"""`penstock plan-memory`: what a model takes of a device, before anything is started. Loads no weights and no torch."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from cluster.terminal import format_table
from engine.device_memory import find_device
from engine.memory_plan import MemoryPlan, in_units, plan_memory
from penstock.config import ServeConfig, parse, read
from penstock.types import Role


def add_parser(subparsers: Any) -> None:
    parser: ArgumentParser = subparsers.add_parser(
        "plan-memory", help="what a model and its KV pages take of a device, and how many requests fit"
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a Hugging Face checkpoint folder")
    add("--device", default="cpu", metavar="D", help="cpu, cuda, H200, 24GiB, cpu:64GiB ...; default: %(default)s")
    add("--context", type=int, metavar="N", help="tokens of a request that must fit")
    add("--config", metavar="FILE", help="the deployment's settings, as for `penstock serve`")
    add("--role", choices=[role.value for role in Role], default=Role.DECODE.value, help="default: %(default)s")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=plan)


def plan(arguments: Namespace) -> int:
    """Raises what `engine.memory_plan.plan_memory` does: a plan that cannot work is an error that says why."""
    data = (read(arguments.config) if arguments.config else {}) | {"model": arguments.model}
    config = parse(ServeConfig, data, source=arguments.config or "penstock plan-memory")
    role = Role(arguments.role)
    step_tokens = config.prefill.max_batch_tokens if role is Role.PREFILL else config.decode.max_batch_tokens
    batch = config.prefill.max_batch_sequences if role is Role.PREFILL else config.decode.max_batch_sequences
    made = plan_memory(
        config.engine_config(role),
        find_device(arguments.device),
        context=arguments.context,
        step_tokens=step_tokens,
        max_sequences=batch,
    )
    print(json.dumps(as_json(made), indent=2) if arguments.json else describe(made, batch))
    return 0


def as_json(made: MemoryPlan) -> dict[str, Any]:
    model, layout = made.model, made.layout
    return {
        "device": asdict(made.device),
        "num_ranks": made.num_ranks,
        "model": model.family.architecture,
        "dtype": layout.dtype,
        "kv_dtype": layout.kv_dtype if layout.is_quantized else layout.dtype,
        "weight_bytes": made.weight_bytes,
        "step_bytes": made.step_bytes,
        "graph_bytes": made.graph_bytes,
        "kv_bytes_per_token": made.kv_bytes_per_token,
        "page_size": layout.page_size,
        "page_bytes": layout.page_bytes,
        "num_pages": made.num_pages,
        "kv_bytes": made.kv_bytes,
        "host_tier_bytes": made.host_tier_bytes,
        "max_context": made.max_context,
        "largest_batch": {str(context): batch for context, batch in made.largest_batch.items()},
    }


def describe(made: MemoryPlan, max_sequences: int) -> str:
    model, layout = made.model, made.layout
    tokens = made.num_pages * layout.page_size
    experts = model.experts
    kinds = f", {experts.num_chosen} of {experts.num_experts} experts a token" if experts else ""
    of_ranks = f" for each of {made.num_ranks} ranks; what follows is of one" if made.num_ranks > 1 else ""
    rows = [
        ("model", f"{model.family.architecture}, {model.num_layers} layers{kinds}, {layout.dtype}"),
        ("device", f"{made.device.name}, {in_units(made.device.total_bytes)}{of_ranks}"),
        ("weights", f"{in_units(made.weight_bytes)} ({made.weight_bytes:,} bytes)"),
        ("one step", f"about {in_units(made.step_bytes)}"),
        *([("captured decode steps", f"about {in_units(made.graph_bytes)}")] if made.graph_bytes else []),
        (
            "KV",
            f"{made.kv_bytes_per_token:,} bytes a token, {in_units(layout.page_bytes)} a page of {layout.page_size}"
            f"{f', in {layout.kv_dtype}' if layout.is_quantized else ''}",
        ),
        ("pages", f"{made.num_pages:,} in {in_units(made.kv_bytes)}: {tokens:,} tokens"),
    ]
    if made.host_tier_bytes:
        rows.append(
            ("host tier", f"{made.host_tier_bytes // layout.page_bytes:,} pages in {in_units(made.host_tier_bytes)}")
        )
    lines = [f"{name:<10}{text}" for name, text in rows]
    table = format_table(
        ("context", "largest batch"), [(str(context), str(batch)) for context, batch in made.largest_batch.items()]
    )
    notes = []
    if max(made.largest_batch.values()) > max_sequences:
        notes.append(f"A step takes at most {max_sequences} sequences, unless max_batch_sequences is raised.")
    if tokens < made.max_context:
        notes.append(
            f"No request of more than {tokens:,} tokens fits; engine.max_context = {tokens} would say so to all."
        )
    return "\n".join([*lines, "", table, *(["", *notes] if notes else [])])
