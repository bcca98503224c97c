"""Explains the arithmetic behind a plan in words and numbers: KV, roofline, transfer, chunk and page. Pure.

Every line states its operands, so that a reader can redo it. Efficiencies are the assumptions of
`simulator.costs.accelerators`.
"""

from __future__ import annotations

from dataclasses import replace

from engine.cache.kv_layout import SCALE_BYTES
from penstock.config import SloConfig
from penstock.sizing.model_shape import ModelShape
from simulator.costs.roofline import ridge_batch
from simulator.planning.deployment import Deployment, FlowResult, WorkerKind, cache_tokens, exposed_transfer_s
from simulator.planning.workload import Workload

_PAGE_SIZES = (16, 32, 64, 128, 256)
_LEAST_PAGE_BYTES = 64 << 10  # a rank's part: one-sided reads of 64 KiB run at a link's full rate, smaller ones do not


def quantize_kv(shape: ModelShape, kv_dtype: str) -> ModelShape:
    """Returns the shape with pages of a byte a value and a float32 scale for each token of each head, unless `auto`."""
    if kv_dtype == "auto":
        return shape
    head_dim = (shape.latent_rank + shape.rope_dim) // 2 if shape.latent_rank else shape.head_dim
    return replace(shape, kv_bytes_per_value=1 + SCALE_BYTES / head_dim)


def choose_page_size(shape: ModelShape, tensor_parallel: int) -> int:
    """Returns the shortest page that is transferred at a link's full rate: longer ones waste memory and hit less."""
    for size in _PAGE_SIZES:
        if page_bytes(shape, tensor_parallel, size) >= _LEAST_PAGE_BYTES:
            return size
    return _PAGE_SIZES[-1]


def page_bytes(shape: ModelShape, tensor_parallel: int, page_size: int) -> float:
    """Returns the bytes of one rank's part of a page."""
    heads = 1 if shape.latent_rank else min(tensor_parallel, shape.num_kv_heads)
    return shape.kv_token_bytes / heads * page_size


def explain_kv(shape: ModelShape, context: float) -> list[str]:
    """Describes how much KV a token takes, and how windows change it."""
    value, layers = shape.kv_bytes_per_value, shape.num_layers
    if shape.latent_rank:
        plain = layers * shape.num_heads * (shape.nope_dim + shape.rope_dim + shape.v_dim) * value
        lines = [
            f"Latent attention: {layers} layers x ({shape.latent_rank} + {shape.rope_dim}) values x {value:.4g} bytes "
            f"= {shape.kv_token_bytes:,.0f} bytes of KV a token; keys and values of all {shape.num_heads} heads would "
            f"take {plain:,.0f}, {plain / shape.kv_token_bytes:.0f} times as much. Every rank holds all of it."
        ]
    else:
        group = shape.num_heads // shape.num_kv_heads
        saved = f", 1/{group} of what a KV head for each query head would take" if group > 1 else ""
        lines = [
            f"{layers} layers x 2 x {shape.num_kv_heads} KV heads x {shape.head_dim} values x {value:.4g} bytes = "
            f"{shape.kv_token_bytes:,.0f} bytes of KV a token{saved}."
        ]
    if shape.num_window_layers:
        read = shape.num_full_layers * context + shape.num_window_layers * min(context, shape.window)
        lines.append(
            f"{shape.num_window_layers} of {layers} layers attend to {shape.window:,} tokens, so a step reads "
            f"{read / (layers * context):.0%} of a mean context of {context:,.0f} tokens; pages hold all of it."
        )
    return lines


def explain_decode(shape: ModelShape, kind: WorkerKind, batch: float, context: float, slo: SloConfig) -> list[str]:
    """Describes what limits a decode step, at this batch of sequences of this context."""
    device, tp, costs = kind.offer.device, kind.tensor_parallel, kind.costs.decode
    rounded = max(1, round(batch))
    step_s = costs.decode_s(rounded, int(rounded * context))
    kv_s = costs.kv_token_s * rounded * context
    rate = device.memory_bytes_per_s * device.efficiency.memory * tp
    reading_s = costs.hidden_s + costs.expert_s * (1 - (1 - costs.expert_share) ** rounded)
    read = (reading_s + kv_s) * rate / rounded
    ridge = ridge_batch(shape, device, tp)
    most = int((slo.itl_s - costs.step_s) / (costs.sequence_s + costs.kv_token_s * context))
    room = int(kind.kv_tokens / context)
    return [
        f"{kind.name} reads {rate / 1e12:.2f} TB/s ({device.efficiency.memory:.0%} of the peak): a step of {rounded} "
        f"sequences with {context:,.0f} tokens each takes {step_s * 1e3:.1f} ms, {kv_s / step_s:.0%} of it for KV, and "
        f"moves {read / 1e6:,.0f} MB a token.",
        f"From a batch of {ridge:,.0f} on (the ridge) multiplying would take longer than reading the weights; at "
        f"{rounded} the step is bound by memory."
        if rounded < ridge
        else f"At {rounded} sequences, beyond the ridge of {ridge:,.0f}, the step is bound by multiplying.",
        f"The ITL target of {slo.itl_s * 1e3:g} ms allows {max(0, most):,} such sequences, and pages have room for "
        f"{room:,} ({kind.kv_tokens:,} tokens): {'memory' if room < most else 'the target'} limits first.",
    ]


def explain_prefill(shape: ModelShape, kind: WorkerKind, prompt_tokens: float, *, moves: bool) -> list[str]:
    """Describes how fast prompts are computed and, if their KV moves to another worker, what hides the transfer."""
    device, costs, link = kind.offer.device, kind.costs.prefill, kind.costs.link
    tokens = int(prompt_tokens)
    is_8bit = shape.weight_bytes_per_value <= 1
    peak, dtype = (device.flops_8bit, "8 bits") if is_8bit else (device.flops, "bf16")
    time_s = costs.prompt_s(tokens, kind.chunk_tokens)
    needed = tokens * link.token_bytes / time_s
    has = "hides all but its last chunk" if link.bytes_per_s >= needed else "does NOT hide it"
    lines = [
        f"A prompt token costs {shape.token_flops / 1e9:,.1f} GFLOP, and {kind.name} computes "
        f"{peak * device.efficiency.compute * kind.tensor_parallel / 1e12:,.0f} TFLOP/s ({dtype}, "
        f"{device.efficiency.compute:.0%} of the peak): a prompt of {tokens:,} tokens takes {time_s:.3f} s, "
        f"{tokens / time_s:,.0f} tokens/s.",
        f"Chunks of {kind.chunk_tokens:,} tokens spend "
        f"{_fixed_share(kind):.1%} of a step on its fixed part; shorter ones would spend more, longer ones would delay "
        f"waiting prompts and {'expose more of the transfer' if moves else 'every token in between'}.",
    ]
    transfer = (
        f"These prompts make {needed / 1e9:.2f} GB of KV a second and worker. A link of that rate hides the transfer "
        f"behind computing; the assumed link of {link.bytes_per_s / 1e9:.1f} GB/s {has}."
    )
    return [*lines, transfer] if moves else lines


def explain_page(shape: ModelShape, tensor_parallel: int, page_size: int) -> str:
    """Explains the page size."""
    size = page_bytes(shape, tensor_parallel, page_size)
    return (
        f"Pages of {page_size} tokens have {size / 1024:,.0f} KiB a rank, enough for a link's full rate (64 KiB); a "
        f"sequence wastes half a page, {page_size // 2} tokens, on average."
    )


def explain_pools(deployment: Deployment, result: FlowResult, workload: Workload, slo: SloConfig) -> list[str]:
    """Describes how the pools relate and how busy they are."""
    prefill, decode = deployment.prefill, deployment.decode
    cache = cache_tokens(deployment, workload, slo)
    hits = f"{result.hit_rate:.1%} of the prompt tokens come from {cache:,.0f} tokens of cache"
    if prefill is None:
        return [
            f"{decode.num_workers} workers compute prompts in chunks of {decode.kind.chunk_tokens:,} in their "
            f"decode steps; mean batch {result.times.mean_batch:.1f}, at most {result.times.peak_batch}; {hits}."
        ]
    exposed = sorted(exposed_transfer_s(prefill.kind, request) for request in workload.requests)
    return [
        f"P:D is {prefill.num_workers}:{decode.num_workers} workers, {prefill.num_devices}:{decode.num_devices} "
        f"devices. Prefill workers are busy {result.times.utilization:.0%} of the time, decode batches hold "
        f"{result.times.mean_batch:.1f} sequences on average and {result.times.peak_batch} at most; {hits}.",
        f"Transfers add {exposed[len(exposed) // 2] * 1e3:.1f} ms to the median TTFT.",
    ]


def _fixed_share(kind: WorkerKind) -> float:
    costs, chunk = kind.costs.prefill, kind.chunk_tokens
    fixed_s = costs.step_s - min(costs.hidden_s, chunk * costs.token_s)
    return fixed_s / (fixed_s + chunk * costs.token_s)
