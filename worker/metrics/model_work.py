"""Estimates the FLOPs and bytes of steps from the model's sizes, to show how busy the device is. Pure.

Estimates follow the roofline model: every step reads the weights once, and a decode step also reads the KV of every
context. They leave out activations, and KV that prompts read from on-chip caches.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import EngineConfig
from penstock.errors import InvalidInput
from penstock.sizing.model_shape import ModelShape, find_shape
from penstock.types import StepTotals

_BITS = {"int4": 4, "int8": 8, "fp8": 8, "bfloat16": 16, "float16": 16, "float32": 32}


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model on `num_devices` that share it evenly. All figures are per device."""

    shape: ModelShape
    num_devices: int = 1

    def flops(self, totals: StepTotals, *, of_prompts: bool) -> float:
        """Returns the floating-point operations of these steps."""
        shape = self.shape
        attended = shape.num_full_layers * totals.contexts
        attended += shape.num_window_layers * min(totals.contexts, float(shape.window * totals.tokens))
        attention = attended * shape.layer_attention_flops(of_prompts=of_prompts)
        return (shape.token_flops * totals.tokens + attention) / self.num_devices

    def read_bytes(self, totals: StepTotals, *, of_prompts: bool) -> float:
        """Returns the bytes that these steps read from the device's memory."""
        if not totals.steps:
            return 0.0
        shape = self.shape
        batch = totals.tokens / totals.steps
        chosen = shape.num_chosen / shape.num_experts if shape.num_experts else 0.0
        read = shape.always_read_parameters * shape.weight_bytes_per_value
        read += shape.expert_bytes * (1.0 - (1.0 - chosen) ** batch)
        kv = 0.0 if of_prompts else totals.contexts * shape.num_full_layers * shape.layer_kv_bytes
        if not of_prompts and shape.num_window_layers:
            seen = min(totals.contexts, float(shape.window * totals.tokens))
            kv += seen * shape.num_window_layers * shape.layer_kv_bytes
        return (read * totals.steps + kv) / self.num_devices


def find_work(config: EngineConfig, num_devices: int) -> ModelWork | None:
    """Returns the work of the configured model; None if its `config.json` lacks the sizes."""
    try:
        shape = find_shape(config.model)
    except InvalidInput:
        return None
    quantized = config.quantization if config.quantization != "none" else config.dtype
    weight_bits = None if shape.weight_bytes_per_value < 2 else _BITS.get(quantized)
    kv_bits = _BITS.get(config.kv_dtype if config.kv_dtype != "auto" else config.dtype)
    return ModelWork(shape.quantized(weight_bits, kv_bits), num_devices)
