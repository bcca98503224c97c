"""Writes small random LoRA adapters in PEFT's own format, without PEFT."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.adapters.products import adapted_products
from engine.models.config import ModelConfig
from penstock.kv.adapter_files import CONFIG_FILE, WEIGHTS_FILE, AdapterRef, read_adapter_ref

ALL_MODULES = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj",
)  # fmt: skip


def make_adapter(
    model: str | Path,
    folder: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    size: float = 0.3,
    modules: Collection[str] = ALL_MODULES,
    config: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> AdapterRef:
    """Writes an adapter of the modules that the model has; its values are normally distributed, times `size`."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for product in adapted_products(ModelConfig.from_folder(str(model))):
        for part in product.parts:
            if part.module.split(".")[-1] in modules:
                outputs, inputs = part.whole
                stem = f"base_model.model.{part.module}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn((rank, inputs), generator=generator) * size
                tensors[f"{stem}.lora_B.weight"] = torch.randn((outputs, rank), generator=generator) * size
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": sorted(modules)}
    (folder / CONFIG_FILE).write_text(json.dumps(plain | dict(config or {})))
    save_file(tensors, folder / WEIGHTS_FILE)
    return read_adapter_ref(name or folder.name, str(folder))
