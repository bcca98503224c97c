"""What a model and its KV pages take of a device's memory, without loading either. Torch-free.

The engine sizes its pool by these functions with what it measures (`engine.engine`); `plan_memory` calls them with
what `config.json` and the weight files' headers say, so that `penstock plan-memory` and a worker cannot disagree in
arithmetic, only where a measurement differs from an assumption. There are two of those: `_CUDA_CONTEXT_BYTES`, and
`step_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from engine.checkpoint import check_tensors
from engine.device_memory import DeviceMemory, DeviceType
from engine.kv_layout import DTYPE_BYTES, KVLayout
from engine.library_check import check_library
from engine.model_config import ModelConfig
from engine.models.cuts import check_groups, tensor_cuts
from engine.models.shapes import EMBEDDING, HEAD, optional_tensors, product_shapes, tensor_shapes
from engine.shard import WHOLE, Shard, shard_layout, shard_model
from engine.weight_forms import BITS
from engine.weight_scheme import int4_group
from penstock.config import EngineConfig
from penstock.errors import ConfigError

_CPU_KV_MEMORY_BYTES = 1 << 30
_GPU_KV_SHARE = 0.8  # of the memory that the weights leave free
_LIBRARY_BYTES = 128 << 20  # FlashInfer's workspace
_CUDA_CONTEXT_BYTES = 600 << 20  # the driver's context, libraries and compiled kernels; assumed
# us a token of a prompt of 2048 on one core, 135M shape, chunks of 64 / 128 / 256 / 512 / 1024: 416 / 297 / 264 / 258 /
# 240 (2026-11); longer ones delay whoever ends inside them.
# A GPU's: operations per byte of weights far above what any needs; not tuned.
_SATURATING_TOKENS: dict[DeviceType, int] = {"cpu": 256, "cuda": 2048}
_FLOAT32_BYTES = 4
_PAGE_ID_BYTES = 4
# Rows of attention that splits of a context leave for the join: 132 multiprocessors of 4 programs of 32 rows each, and
# a third more where a number of splits is rounded up.
_SPLIT_ROWS = 132 * 4 * 32 * 4 // 3
_CONTEXTS = (1024, 4096, 16384, 65536, 262144, 1048576)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    device: DeviceMemory
    model: ModelConfig
    layout: KVLayout
    weight_bytes: int  # tables of the rotary embedding included
    kv_bytes: int  # of the pool
    host_tier_bytes: int  # for evicted pages; in the same memory on a CPU, elsewhere on a GPU
    step_bytes: int  # about, of the largest step
    graph_bytes: int  # about, of captured decode steps
    num_pages: int
    max_context: int  # tokens that a request may have
    largest_batch: dict[int, int]  # context in tokens: sequences of it that the pool holds at once
    num_ranks: int = 1  # all figures are of one of them

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layout.page_bytes // self.layout.page_size


def saturating_tokens(device_type: DeviceType) -> int:
    """Tokens of a prompt chunk from which on a step costs as much per token as any longer one."""
    return _SATURATING_TOKENS[device_type]


def select_context(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_context is not None and config.max_context > model.context_length:
        raise ConfigError(
            f"engine.max_context = {config.max_context} is more than the {model.context_length} tokens of "
            f"{config.model}; give at most that"
        )
    return config.max_context or model.context_length


def serving_revision(config: EngineConfig, model: ModelConfig) -> str:
    """Of the model as it is served: what its weights are quantized to while they are loaded makes it another one, whose
    pages nobody may take for those of the first. Raises ConfigError where that is quantized already."""
    if config.quantization == "none":
        return model.revision
    if model.scheme is not None:
        raise ConfigError(
            f"engine.quantization = {config.quantization!r}: the weights of {config.model} are quantized already "
            f"({model.scheme.method}); give engine.quantization = none, or a plain checkpoint"
        )
    return f"{model.revision}+{config.quantization}"


def make_layout(config: EngineConfig, model: ModelConfig) -> KVLayout:
    return KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        page_size=config.page_size,
        head_dim=model.head_dim,
        dtype=model.dtype if config.dtype == "auto" else config.dtype,
        model_revision=serving_revision(config, model),
        quantization=config.quantization,
        kv_dtype=config.kv_dtype,
    )


def count_pages(config: EngineConfig, layout: KVLayout, device_type: DeviceType, free_bytes: int) -> int:
    """Of the pool, where `free_bytes` of the device are left beside the weights. Raises ConfigError below 2."""
    if config.num_pages is not None:
        return config.num_pages
    budget = config.kv_memory_bytes
    if budget is None:
        budget = int(max(free_bytes, 0) * _GPU_KV_SHARE) if device_type == "cuda" else _CPU_KV_MEMORY_BYTES
    num_pages = budget // layout.page_bytes
    if num_pages < 2:
        raise ConfigError(
            f"engine.kv_memory_bytes = {budget} holds {num_pages} pages of {layout.page_bytes} bytes; "
            f"give at least {2 * layout.page_bytes}, or a smaller engine.page_size"
        )
    return num_pages


def weight_bytes(
    model: ModelConfig, dtype: str, device_type: DeviceType, max_context: int, shard: Shard = WHOLE
) -> int:
    """Of the loaded model, or of one rank's part. On a CPU a tied head is a second, packed copy of the embedding."""
    cuts = tensor_cuts(model, shard)
    shapes = {name: cuts[name].shape(shape) if name in cuts else shape for name, shape in tensor_shapes(model).items()}
    num_values = sum(math.prod(shape) for shape in shapes.values())
    if model.tie_embeddings and device_type == "cpu":
        num_values += math.prod(shapes[EMBEDDING])
    float32_bytes = max_context * model.rope_dim * _FLOAT32_BYTES
    experts = model.experts
    if experts is not None and experts.float32_router:
        routers = len(experts.layers) * experts.num_experts * (model.hidden_size + experts.sigmoid)  # with its bias
        num_values, float32_bytes = num_values - routers, float32_bytes + routers * _FLOAT32_BYTES
    return num_values * DTYPE_BYTES[dtype] + float32_bytes


def saved_bytes(
    model: ModelConfig, quantization: str, stored: Collection[str], dtype: str, device_type: DeviceType
) -> int:
    """What products that are computed with quantized weights take less than plain ones: those `stored` so, or all,
    where they are quantized while they are loaded. On a CPU this takes it that it has tiles for them."""
    scheme = model.scheme
    kind = scheme.kind if scheme is not None else quantization
    if kind not in BITS or dtype not in (("bfloat16",) if device_type == "cpu" else ("bfloat16", "float16")):
        return 0
    saved = _saved_by_head(model, dtype, device_type) if scheme is None else 0
    products = product_shapes(model, with_experts=device_type == "cpu")
    if scheme is not None:
        products[HEAD] = (model.vocab_size, model.hidden_size)
    for name, (rows, columns) in products.items():
        if scheme is not None and name.removesuffix(".weight") not in stored:
            continue
        group = scheme.group_of(columns) if scheme is not None else int4_group(columns) if kind == "int4" else columns
        has_zeros = kind == "int4" or (kind == "int8" and device_type == "cpu")
        scales = rows * -(-columns // group) * _FLOAT32_BYTES * (1 + has_zeros)
        saved += rows * columns * DTYPE_BYTES[dtype] - rows * columns * BITS[kind] // 8 - scales
    return saved


def _saved_by_head(model: ModelConfig, dtype: str, device_type: DeviceType) -> int:
    """It is in int8 then; where it was the embedding itself, it is a second one."""
    is_copy = not model.tie_embeddings or device_type == "cpu"
    own = model.vocab_size * (model.hidden_size + 2 * _FLOAT32_BYTES)
    return is_copy * model.vocab_size * model.hidden_size * DTYPE_BYTES[dtype] - own


def step_bytes(model: ModelConfig, dtype: str, num_tokens: int, num_rows: int) -> int:
    """About: the tensors that stand beside each other where a step of so many tokens is widest, and the logits of so
    many rows in float32, twice, for the sampler."""
    attention = (model.num_heads + 2 * model.num_kv_heads + model.num_heads) * model.head_dim
    if model.latent is not None:  # queries and outputs of latents, for every head
        attention = model.num_heads * (2 * model.latent.query_dim + 2 * model.latent.rank + model.latent.v_dim)
    inner = 3 * model.intermediate_size
    if model.experts is not None:
        chosen = model.experts.num_chosen
        inner = max(inner, chosen * (3 * model.experts.intermediate_size + 4 * model.hidden_size))
    widest = 3 * model.hidden_size + max(attention, inner)
    return num_tokens * widest * DTYPE_BYTES[dtype] + 2 * num_rows * model.vocab_size * _FLOAT32_BYTES


def graph_bytes(config: EngineConfig, model: ModelConfig, device_type: DeviceType, shard: Shard = WHOLE) -> int:
    """About: what captured decode steps keep, which is the tensors of the largest of them, what splits of small ones
    leave, and the inputs of all."""
    if not captures_graphs(config, model, device_type):
        return 0
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    num_pages = -(-select_context(config, model) // config.page_size)
    table_bytes = config.cuda_graphs * num_pages * _PAGE_ID_BYTES
    row_values = model.head_dim if model.latent is None else model.latent.rank
    split_bytes = _SPLIT_ROWS * row_values * _FLOAT32_BYTES
    own = shard_model(model, shard)  # but for the logits, which the first rank has of the whole vocabulary
    return step_bytes(own, dtype, config.cuda_graphs, config.cuda_graphs) + split_bytes + table_bytes


def captures_graphs(config: EngineConfig, model: ModelConfig, device_type: DeviceType) -> bool:
    """Only Triton's kernels, and torch's for chunks beside them, are neither planned on the host nor wait there."""
    return device_type == "cuda" and config.cuda_graphs > 0 and config.attention in ("auto", "triton", "varlen")


def plan_memory(
    config: EngineConfig,
    device: DeviceMemory,
    *,
    context: int | None = None,
    step_tokens: int | None = None,
    max_sequences: int = 64,
) -> MemoryPlan:
    """Reads headers alone. Raises CheckpointError where the files do not fit together, and ConfigError where the
    model cannot be served so on the device, with what would mend it; with `context`, also where one request of so
    many tokens cannot."""
    model = ModelConfig.from_folder(config.model)
    shapes = tensor_shapes(model)
    _, forms = check_tensors(Path(config.model), shapes, optional_tensors(model), model.scheme)
    max_context = select_context(config, model)
    if context is not None and not 1 <= context <= max_context:
        raise ConfigError(f"a context of {context} tokens: {config.model} takes 1 to {max_context}; give one of those")
    shard = Shard(0, config.tensor_parallel)  # no other rank needs more
    if device.type == "cpu":  # all ranks share it
        device = replace(device, total_bytes=device.total_bytes // shard.num_ranks)
    layout = shard_layout(make_layout(config, model), shard)
    if layout.dtype != "float32":
        check_groups(tensor_cuts(model, shard), shapes, model.scheme, forms, config.quantization)
    check_library(config.attention, model, layout)
    weights = weight_bytes(model, layout.dtype, device.type, max_context, shard)
    saved = saved_bytes(model, config.quantization, set(forms), layout.dtype, device.type)
    weights -= saved // shard.num_ranks
    reserved = _CUDA_CONTEXT_BYTES if device.type == "cuda" else 0
    reserved += _LIBRARY_BYTES if config.attention == "flashinfer" else 0
    graphs = graph_bytes(config, model, device.type, shard)
    free = device.total_bytes - reserved - weights - graphs
    step = step_bytes(
        shard_model(model, shard), layout.dtype, step_tokens or saturating_tokens(device.type), max_sequences
    )
    _check_weights(config, device, layout, weights, free - step)
    num_pages = count_pages(config, layout, device.type, free)
    kv_bytes = num_pages * layout.page_bytes
    host_tier = config.host_memory_bytes // layout.page_bytes * layout.page_bytes
    left = free - step - (host_tier if device.type == "cpu" else 0)
    _check_pool(config, device, layout, kv_bytes, left)
    if context is not None:
        _check_context(config, context, num_pages, layout, device, left)
    contexts = sorted(
        {context for context in _CONTEXTS if context < max_context} | {max_context, context or max_context}
    )
    largest = {tokens: num_pages // -(-tokens // layout.page_size) for tokens in contexts}
    return MemoryPlan(
        device,
        model,
        layout,
        weights,
        kv_bytes,
        host_tier,
        step,
        graphs,
        num_pages,
        max_context,
        largest,
        shard.num_ranks,
    )


def _check_weights(config: EngineConfig, device: DeviceMemory, layout: KVLayout, weights: int, left: int) -> None:
    if left >= 2 * layout.page_bytes:
        return
    narrower = layout.dtype == "float32"
    needed = device.total_bytes - left + 2 * layout.page_bytes
    raise ConfigError(
        f"the weights of {config.model} take {in_units(weights)} in {layout.dtype}, and {device.name} has "
        f"{in_units(device.total_bytes)}: no room for two KV pages and a step; give a device with at least "
        f"{in_units(needed)}{', or engine.dtype = bfloat16, which halves them' if narrower else ''}"
    )


def _check_pool(config: EngineConfig, device: DeviceMemory, layout: KVLayout, kv_bytes: int, left: int) -> None:
    if kv_bytes <= left:
        return
    if left < 2 * layout.page_bytes:  # without the host tier there was room
        raise ConfigError(
            f"engine.host_memory_bytes = {config.host_memory_bytes} leaves no room for two KV pages on {device.name}, "
            f"which has {in_units(device.total_bytes)}; give less"
        )
    name, most = ("num_pages", left // layout.page_bytes) if config.num_pages else ("kv_memory_bytes", left)
    raise ConfigError(
        f"the KV pages take {in_units(kv_bytes)}, and beside the weights and a step {device.name} has {in_units(left)} "
        f"left; give engine.{name} = {most} at most, or a larger device"
    )


def _check_context(
    config: EngineConfig, context: int, num_pages: int, layout: KVLayout, device: DeviceMemory, left: int
) -> None:
    needed = -(-context // layout.page_size)
    if needed <= num_pages:
        return
    needed_bytes = needed * layout.page_bytes
    name, enough = ("num_pages", needed) if config.num_pages else ("kv_memory_bytes", needed_bytes)
    mend = f"give engine.{name} = {enough}, which it has room for," if needed_bytes <= left else "give a larger device"
    raise ConfigError(
        f"a context of {context} tokens takes {needed} pages ({in_units(needed_bytes)}), and the pool on {device.name} "
        f"has {num_pages}; {mend} or at most {num_pages * layout.page_size} tokens"
    )


def in_units(num_bytes: int) -> str:
    """For people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"
