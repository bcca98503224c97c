"""Plans the memory of a replica without loading it: weights, KV pages, steps, and what fits. Torch-free.

`penstock plan-memory` calls it. It reads `config.json` and the headers of weight files, and takes all sizes from
`engine.memory.estimates`, as the engine does. Without weight files, `config.json` alone must suffice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from engine.adapters.products import adapter_bytes
from engine.cache.kv_layout import KVLayout
from engine.cache.windows.page_window import PageWindow
from engine.kernels.libraries.flashinfer_memory import WORKSPACE_BYTES
from engine.memory import estimates
from engine.memory.device_memory import DeviceMemory
from engine.memory.draft_memory import draft_bytes
from engine.models.config import ModelConfig
from engine.models.shapes import optional_tensors, tensor_shapes
from engine.models.sharding import tensor_slices
from engine.parallel.shard import Shard, check_expert_parallel, shard_layout, shard_model
from engine.weights.checkpoint import check_tensors, has_weight_files
from engine.weights.tensor_slices import check_slice_groups
from penstock.config import EngineConfig
from penstock.errors import ConfigError

_CONTEXTS = (1024, 4096, 16384, 65536, 262144, 1048576)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one rank, and what fits into it."""

    device: DeviceMemory
    model: ModelConfig
    layout: KVLayout
    weight_bytes: int  # tables of the rotary embedding included
    kv_bytes: int  # of the pool
    host_tier_bytes: int  # for evicted pages; in the same memory on a CPU, in the host's on a GPU
    step_bytes: int  # estimate for the largest step
    graph_bytes: int  # estimate for captured decode steps
    adapter_bytes: int  # of all adapter slots
    draft_bytes: int  # of `decode.draft_model`, with its pages
    num_pages: int
    max_context: int  # tokens that a request may have
    largest_batch: dict[int, int]  # by context in tokens: how many such sequences the pool holds at once
    num_slots: int = 0  # pages that have room for windowed layers, if these are kept apart
    num_ranks: int = 1
    has_weights: bool = True  # False: there was no weight file to check against config.json

    @property
    def longest_fitting(self) -> int:
        """The most tokens that the pages hold for one request, at most `max_context`."""
        if _held_pages(self.model, self.layout, self.max_context) <= self.num_pages:
            return self.max_context
        return self.num_pages * self.layout.page_size

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layout.page_bytes // self.layout.page_size


def plan_memory(
    config: EngineConfig,
    device: DeviceMemory,
    *,
    context: int | None = None,
    step_tokens: int | None = None,
    max_sequences: int = 64,
    draft_model: str | None = None,
    has_prompt_stream: bool = False,
) -> MemoryPlan:
    """Plans a replica, and what drafts for it, from the headers of its files, without loading it. `has_prompt_stream`
    says that `decode.prompt_sm_share` is set.

    Raises CheckpointError if the files do not fit together. Raises ConfigError, with the fix, if the device cannot
    serve the model with this configuration or, given `context`, not even one request of that many tokens.
    """
    has_weights = has_weight_files(Path(config.model))
    model = ModelConfig.from_folder(config.model, has_weights=has_weights)
    max_context = _select_context(config, model, context)
    check_expert_parallel(config, model)
    shard = Shard.of(config, 0)  # no other rank needs more
    if device.type == "cpu":  # all ranks share it
        device = replace(device, total_bytes=device.total_bytes // shard.num_ranks)
    layout = shard_layout(estimates.make_layout(config, model), shard)
    _check_e4m3(config, device)
    needs = _estimate_needs(config, model, device, layout, shard, step_tokens, max_sequences, has_prompt_stream)
    free = device.total_bytes - needs.reserved - needs.weights - needs.graphs - needs.adapters
    _check_weights(config, model, device, layout, needs.weights, free - needs.step)
    num_pages = estimates.count_pages(config, layout, device.type, free, needs.step)
    kv_bytes = estimates.pool_bytes(config, layout, num_pages)
    host_tier = config.host_memory_bytes // layout.page_bytes * layout.page_bytes
    left = free - needs.step - (host_tier if device.type == "cpu" else 0)
    _check_pool(config, device, layout, kv_bytes, left)
    drafts = 0
    if draft_model is not None:
        drafts = draft_bytes(draft_model, config, model, layout, device, num_pages)
        _check_draft(draft_model, drafts, device, left - kv_bytes)
    if context is not None:
        _check_context(config, context, num_pages, _held_pages(model, layout, context), layout, device, left)
    num_slots = estimates.count_slots(config, num_pages) if layout.window_layers else 0
    contexts = sorted({*(size for size in _CONTEXTS if size < max_context), max_context, context or max_context})
    return MemoryPlan(
        device,
        model,
        layout,
        weight_bytes=needs.weights,
        kv_bytes=kv_bytes,
        host_tier_bytes=host_tier,
        step_bytes=needs.step,
        graph_bytes=needs.graphs,
        adapter_bytes=needs.adapters,
        draft_bytes=drafts,
        num_pages=num_pages,
        max_context=max_context,
        largest_batch={tokens: _largest_batch(model, layout, num_pages, num_slots, tokens) for tokens in contexts},
        num_slots=num_slots,
        num_ranks=shard.num_ranks,
        has_weights=has_weights,
    )


class _Needs(NamedTuple):
    """The bytes that one rank takes besides its pages."""

    reserved: int  # by the device's runtime and the libraries
    weights: int
    graphs: int
    adapters: int
    step: int


def _estimate_needs(
    config: EngineConfig,
    model: ModelConfig,
    device: DeviceMemory,
    layout: KVLayout,
    shard: Shard,
    step_tokens: int | None,
    max_sequences: int,
    has_prompt_stream: bool,
) -> _Needs:
    num_tokens = step_tokens or estimates.saturating_tokens(device.type)
    num_sampled = max_sequences + estimates.SCORED_TOKENS
    return _Needs(
        reserved=_reserved_bytes(config, model, device, has_prompt_stream),
        weights=_loaded_bytes(config, model, device, layout, shard),
        graphs=estimates.graph_bytes(config, model, device.type, shard),
        adapters=adapter_bytes(config, model, layout.dtype, device.type, shard),
        step=estimates.step_bytes(shard_model(model, shard), layout.dtype, num_tokens, num_sampled),
    )


def _select_context(config: EngineConfig, model: ModelConfig, asked: int | None) -> int:
    """Returns the most tokens that a request may have. Raises ConfigError if `asked` is more."""
    most = estimates.select_context(config, model)
    if asked is not None and not 1 <= asked <= most:
        raise ConfigError(f"a context of {asked} tokens: {config.model} takes 1 to {most}; give a number in that range")
    return most


def _reserved_bytes(config: EngineConfig, model: ModelConfig, device: DeviceMemory, has_prompt_stream: bool) -> int:
    """Returns what the device's runtime and the libraries take, regardless of the model."""
    reserved = estimates.CUDA_CONTEXT_BYTES if device.type == "cuda" else 0
    reserved += estimates.workspace_bytes(config, model, device.type, has_prompt_stream=has_prompt_stream)
    return reserved + (WORKSPACE_BYTES if config.attention == "flashinfer" else 0)


def _loaded_bytes(
    config: EngineConfig, model: ModelConfig, device: DeviceMemory, layout: KVLayout, shard: Shard
) -> int:
    """Returns the weights' size on one rank, after the checks that loading makes."""
    shapes = tensor_shapes(model)
    forms: Mapping[str, object] = {}
    if has_weight_files(Path(config.model)):
        _, forms = check_tensors(Path(config.model), shapes, optional_tensors(model), model.scheme)
    elif model.scheme is not None:
        raise ConfigError(
            f"{config.model} holds no weights, and config.json alone does not say which of them are stored quantized; "
            "fetch the weight files too, or give the config.json of the model that is not quantized, with "
            "engine.quantization"
        )
    check_slice_groups(tensor_slices(model, shard), shapes, model.scheme, forms, config.quantization, layout.dtype)
    estimates.check_attention(config, model, layout)
    plain = estimates.weight_bytes(model, layout.dtype, device.type, estimates.select_context(config, model), shard)
    return (
        plain - estimates.saved_bytes(model, config.quantization, set(forms), layout.dtype, device) // shard.num_ranks
    )


def _check_weights(
    config: EngineConfig, model: ModelConfig, device: DeviceMemory, layout: KVLayout, weights: int, left: int
) -> None:
    if left >= 2 * layout.page_bytes:
        return
    narrower = layout.dtype == "float32"
    ways = ["engine.dtype = bfloat16, which halves them"] if narrower else []
    if not narrower and config.quantization == "none" and model.scheme is None:
        ways.append("engine.quantization = int8, which halves them")
    if device.type == "cuda":  # on a CPU all ranks share the memory
        ways.append(f"engine.tensor_parallel = {2 * config.tensor_parallel}, on as many devices")
    needed = device.total_bytes - left + 2 * layout.page_bytes
    raise ConfigError(
        f"the weights of {config.model} take {in_units(weights)} in {layout.dtype}, and {device.name} has "
        f"{in_units(device.total_bytes)}: no room for two KV pages and a step; give a device with at least "
        f"{', or '.join([in_units(needed), *ways])}"
    )


def _check_e4m3(config: EngineConfig, device: DeviceMemory) -> None:
    for name, instead in (("kv_dtype", "int8 or auto"), ("quantization", "int8")):
        if getattr(config, name) == "fp8" and not device.reads_e4m3:
            raise ConfigError(
                f"engine.{name} = 'fp8': kernels of {device.name} do not read fp8; give engine.{name} = {instead}, "
                "or a GPU of compute capability 8.9 or above (Ada, Hopper)"
            )


def _check_pool(config: EngineConfig, device: DeviceMemory, layout: KVLayout, kv_bytes: int, left: int) -> None:
    if kv_bytes <= left:
        return
    if left < 2 * layout.page_bytes:  # `_check_weights` found room without the host tier
        raise ConfigError(
            f"engine.host_memory_bytes = {config.host_memory_bytes} leaves no room for two KV pages on {device.name}, "
            f"which has {in_units(device.total_bytes)}; give less"
        )
    name, most = ("num_pages", left // layout.page_bytes) if config.num_pages else ("kv_memory_bytes", left)
    raise ConfigError(
        f"the KV pages take {in_units(kv_bytes)}, and after the weights and a step {device.name} has {in_units(left)} "
        f"left; give engine.{name} = {most} at most, or a larger device"
    )


def _check_draft(draft_model: str, drafts: int, device: DeviceMemory, left: int) -> None:
    if drafts > left:
        raise ConfigError(
            f"decode.draft_model = {draft_model!r} takes {in_units(drafts)} with its pages, and {device.name} has "
            f"{in_units(max(left, 0))} left beside the model and its pages; give engine.kv_memory_bytes, or less of it"
        )


def _held_pages(model: ModelConfig, layout: KVLayout, num_tokens: int) -> int:
    """Returns the most pages that a running sequence of that many tokens holds at once. Chunks of its prompt briefly
    take more.
    """
    return PageWindow(model.page_window, layout.page_size).max_pages(num_tokens, layout.page_size)


def _largest_batch(model: ModelConfig, layout: KVLayout, num_pages: int, num_slots: int, num_tokens: int) -> int:
    """Returns how many running sequences of that many tokens the pool holds at once."""
    largest = num_pages // _held_pages(model, layout, num_tokens)
    if not layout.window_layers:
        return largest
    window = PageWindow(model.widest_window, layout.page_size)
    return min(largest, num_slots // window.max_pages(num_tokens, layout.page_size))


def _check_context(
    config: EngineConfig,
    context: int,
    num_pages: int,
    needed: int,
    layout: KVLayout,
    device: DeviceMemory,
    left: int,
) -> None:
    if needed <= num_pages:
        return
    needed_bytes = estimates.pool_bytes(config, layout, needed)
    name, enough = ("num_pages", needed) if config.num_pages else ("kv_memory_bytes", needed_bytes)
    mend = f"give engine.{name} = {enough}, which it has room for," if needed_bytes <= left else "give a larger device"
    raise ConfigError(
        f"a context of {context} tokens takes {needed} pages ({in_units(needed_bytes)}), and the pool on {device.name} "
        f"has {num_pages}; {mend} or at most {num_pages * layout.page_size} tokens"
    )


def in_units(num_bytes: int) -> str:
    """Returns a size for people to read, such as `1.50 GiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"
