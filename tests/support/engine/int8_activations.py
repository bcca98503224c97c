"""Makes checkpoints with quantized weights and inputs (compressed-tensors W8A8, W4A8), and layers to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

TOKEN_WISE = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
GROUP = 32
SCHEMES = ("w8a8", "w4a8")


def config_of(scheme: str, inputs: dict[str, Any] | None = TOKEN_WISE) -> dict[str, Any]:
    """Returns the quantization_config of a checkpoint."""
    weights: dict[str, Any] = {"num_bits": 8 if scheme == "w8a8" else 4, "type": "int", "symmetric": True}
    weights |= {"strategy": "channel"} if scheme == "w8a8" else {"strategy": "group", "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }


def quantize_checkpoint(folder: Path, to: Path, scheme: str) -> tuple[Path, Path]:
    """Writes the projections of a checkpoint quantized and, into a second folder, their plain values; returns both
    folders."""
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = values[name] = tensor
            continue
        weight, size = tensor.float(), tensor.shape[1] if scheme == "w8a8" else GROUP
        groups = weight.unflatten(1, (-1, size))
        most = 127 if scheme == "w8a8" else 7
        scales = groups.abs().amax(dim=2, keepdim=True) / most
        codes = (groups / scales).round()
        stored[name] = codes.flatten(1).to(torch.int8)
        stored[f"{name}_scale"] = scales.squeeze(2)
        values[name] = (codes * scales).flatten(1)
    config = json.loads((folder / "config.json").read_text())
    for path, tensors, more in (
        (to / "quantized", stored, {"quantization_config": config_of(scheme)}),
        (to / "values", values, {}),
    ):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps({**config, **more}))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return to / "quantized", to / "values"


class RoundedInputs(torch.nn.Module):
    """Computes a linear layer that rounds each input row to the nearest of 255 values, as the format defines."""

    def __init__(self, linear: torch.nn.Linear, steps: float) -> None:
        """Wraps a layer; `steps` of a row's scale reach its largest magnitude: 127, or 127.5 as compressed-tensors
        divides."""
        super().__init__()
        self.linear, self.steps = linear, steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / self.steps
        rounded = (x / scale).round().clamp(-128, 127) * scale
        return F.linear(rounded, self.linear.weight, self.linear.bias)


def round_inputs(model: torch.nn.Module, steps: float) -> None:
    """Replaces every projection of a `transformers` model."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and name.endswith("_proj"):
                setattr(module, name, RoundedInputs(child, steps))
