"""Writes a plan as the settings of `penstock serve`. Pure."""

from __future__ import annotations

import json
from typing import Any

from simulator.planning.deployment import MAX_BATCH, Deployment, PlannedPool
from simulator.planning.search import Goal

# Accelerators as Ray names them, for `accelerator_type`; others are left to the operator.
_RAY_NAMES = {"A100": "A100", "H100": "H100", "H200": "H200", "B200": "B200", "L40S": "L40S"}
_RAY_NAMES |= {"MI300X": "AMD-Instinct-MI300X-OAM"}


def serve_settings(
    deployment: Deployment,
    goal: Goal,
    model: str,
    page_size: int,
    *,
    kv_dtype: str = "auto",
    quantization: str = "none",
) -> dict[str, Any]:
    """Returns the settings as plain data that `penstock.config` parses."""
    slo = goal.slo
    prefill, decode = deployment.prefill, deployment.decode
    batch_tokens = decode.kind.chunk_tokens if prefill is None else MAX_BATCH
    settings: dict[str, Any] = {
        "model": model,
        "prefill_pool": _pool(prefill) if prefill else {"replicas": 0},
        "decode_pool": _pool(decode),
        "engine": {"page_size": page_size, "kv_dtype": kv_dtype, "quantization": quantization},
    }
    if prefill is not None:
        settings["prefill"] = {"max_batch_tokens": prefill.kind.chunk_tokens}
    settings["decode"] = {
        "max_batch_sequences": MAX_BATCH,
        "max_batch_tokens": max(MAX_BATCH, batch_tokens),
        "placement": "auto" if prefill else "local",
    }
    settings["autoscaler"] = {
        "attainment": goal.attainment,
        "slo": {"ttft_s": slo.ttft_s, "ttft_token_s": slo.ttft_token_s, "itl_s": slo.itl_s},
    }
    return settings


def format_toml(settings: dict[str, Any], comments: list[str]) -> str:
    """Returns the settings as TOML below the comments: plain values, then a table for each dictionary."""
    lines = [f"# {comment}" for comment in comments]
    _write_table(lines, (), settings)
    return "\n".join(lines) + "\n"


def _pool(pool: PlannedPool) -> dict[str, Any]:
    settings: dict[str, Any] = {"replicas": pool.num_workers, "num_gpus": 1}
    if name := _RAY_NAMES.get(pool.kind.offer.device.name):
        settings["accelerator_type"] = name
    settings["engine"] = {"tensor_parallel": pool.kind.tensor_parallel}
    return settings


def _write_table(lines: list[str], path: tuple[str, ...], table: dict[str, Any]) -> None:
    if path:
        lines += ["", f"[{'.'.join(path)}]"]
    for name, value in table.items():
        if not isinstance(value, dict):
            lines.append(f"{name} = {json.dumps(value)}")
    for name, value in table.items():
        if isinstance(value, dict):
            _write_table(lines, (*path, name), value)
