"""Derives the costs of steps from published peaks by the roofline model (Williams et al., CACM 2009).

A step reads its weights once and the KV of every context, and multiplies each token with the active parameters; the
slower of the two, weights or products, determines the time. Under tensor parallelism each device does its share and
takes part in two all-reduces a layer.
"""

from __future__ import annotations

from penstock.sizing.accelerators import Accelerator
from penstock.sizing.model_shape import ModelShape
from simulator.costs.cost_file import CostProfile
from simulator.costs.step_costs import DecodeCosts, LinkCosts, PrefillCosts

_ACTIVATION_BYTES = 2
_LINK_LATENCY_S = 2e-4
_USABLE_MEMORY = 0.92  # share of a device's memory; the rest is for contexts, activations and captured graphs


def roofline_costs(shape: ModelShape, device: Accelerator, tensor_parallel: int = 1) -> CostProfile:
    """Returns the costs of a worker of `tensor_parallel` devices; none of its figures is measured."""
    tp, efficiency = tensor_parallel, device.efficiency
    shape = held_shape(shape, device)
    memory = device.memory_bytes_per_s * efficiency.memory * tp
    peak = device.flops_8bit if shape.weight_bytes_per_value <= 1 else device.flops
    compute, attention = peak * efficiency.compute * tp, device.flops * efficiency.compute * tp
    reading_s = shape.always_read_parameters * shape.weight_bytes_per_value / memory
    all_experts_s = shape.expert_bytes / memory
    token_s = shape.token_flops / compute
    collective_s, collective_token_s = _collectives(shape, device, tp)
    fixed_s = efficiency.step_overhead_s + collective_s
    prompt_flops = shape.layer_attention_flops(of_prompts=True)
    decode_flops = shape.num_full_layers * shape.layer_attention_flops(of_prompts=False)
    window = shape.window * shape.num_window_layers
    prefill = PrefillCosts(
        step_s=fixed_s + reading_s + all_experts_s,
        token_s=token_s + collective_token_s + window * prompt_flops / attention,
        context_s=shape.num_full_layers * prompt_flops / attention,
        hidden_s=reading_s + all_experts_s,
    )
    kv_bytes = shape.layer_kv_bytes * _replicated(shape, tp)
    decode = DecodeCosts(
        step_s=fixed_s + reading_s,
        sequence_s=efficiency.sequence_overhead_s + collective_token_s + window * kv_bytes / memory,
        kv_token_s=max(shape.num_full_layers * kv_bytes / memory, decode_flops / attention),
        chunk=prefill,
        token_s=token_s,
        hidden_s=reading_s,
        expert_s=all_experts_s,
        expert_share=shape.num_chosen / shape.num_experts if shape.num_experts else 0.0,
    )
    link = LinkCosts(
        bytes_per_s=device.link_bytes_per_s * efficiency.link * tp,
        latency_s=_LINK_LATENCY_S,
        jitter_s=_LINK_LATENCY_S / 2,
        token_bytes=int(shape.kv_token_bytes * _replicated(shape, tp)),
    )
    source = f"roofline of published peaks, not measured: {device.source}"
    return CostProfile(f"{shape.name} on {tp} x {device.name}", source, prefill, decode, link, tensor_parallel=tp)


def held_shape(shape: ModelShape, device: Accelerator) -> ModelShape:
    """Returns the shape with its weights in the form that the device multiplies with."""
    return shape if device.reads_e4m3 else shape.with_decoded_experts()


def ridge_batch(shape: ModelShape, device: Accelerator, tensor_parallel: int = 1) -> float:
    """Returns the decode batch at which multiplying takes as long as reading the weights; infinite if it never does."""
    decode = roofline_costs(shape, device, tensor_parallel).decode
    low, high = 1.0, 1e6
    if decode.token_s * high < decode.hidden_s + decode.expert_s:
        return float("inf")
    while high - low > 0.5:
        middle = (low + high) / 2
        experts_s = decode.expert_s * (1.0 - (1.0 - decode.expert_share) ** middle)
        is_below = middle * decode.token_s < decode.hidden_s + experts_s
        low, high = (middle, high) if is_below else (low, middle)
    return high


def num_kv_tokens(shape: ModelShape, device: Accelerator, tensor_parallel: int = 1) -> int:
    """Returns how many tokens of KV fit in addition to the weights; 0 if the weights do not fit."""
    left = device.memory_bytes * _USABLE_MEMORY * tensor_parallel - held_shape(shape, device).weight_bytes
    return max(0, int(left / (shape.kv_token_bytes * _replicated(shape, tensor_parallel))))


def _replicated(shape: ModelShape, tensor_parallel: int) -> float:
    """Returns how many times KV is held: once, unless there are fewer KV heads than devices."""
    return max(1.0, tensor_parallel / (1 if shape.latent_rank else shape.num_kv_heads))


def _collectives(shape: ModelShape, device: Accelerator, tensor_parallel: int) -> tuple[float, float]:
    """Returns the time of a step's all-reduces, and what each token adds. A ring sends 2 (n - 1) / n of the data."""
    if tensor_parallel == 1:
        return 0.0, 0.0
    num = 2 * shape.num_layers
    sent = 2 * (tensor_parallel - 1) / tensor_parallel * shape.hidden_size * _ACTIVATION_BYTES
    token_s = num * sent / (device.peer_bytes_per_s * device.efficiency.link)
    return num * device.efficiency.collective_s, token_s
