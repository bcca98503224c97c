"""Estimates the memory that a model, its KV pages and its steps take, and makes the choices that follow. Torch-free.

The engine sizes its pool with these functions and its own measurements (`engine.parallel.model_part`);
`engine.memory.plan` calls them with the headers of files alone. So `penstock plan-memory` and a worker cannot disagree
in arithmetic, but only if a measurement differs from an assumption. There are two assumptions: `CUDA_CONTEXT_BYTES`,
and `step_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from engine.cache.kv_layout import DTYPE_BYTES, KVLayout
from engine.cache.windows.sink_window import SinkWindow
from engine.kernels.libraries import flashinfer_memory
from engine.kernels.libraries.capabilities import captures_decodes, check_library
from engine.memory.device_memory import DeviceMemory, DeviceType
from engine.models.config import ModelConfig
from engine.models.expert_config import MXFP4_GROUP
from engine.models.shapes import EMBEDDING, HEAD, product_shapes, tensor_shapes
from engine.models.sharding import tensor_slices
from engine.parallel.shard import WHOLE, Shard, shard_model
from engine.weights.checkpoint import CODE_SUFFIXES
from engine.weights.quantization_config import int4_group
from engine.weights.quantized_layouts import BITS
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.kv.weights_version import updated_revision

CUDA_CONTEXT_BYTES = 600 << 20  # the driver's context, libraries and compiled kernels; assumed
# cuBLAS allocates this for each thread and stream that multiplies matrices, as torch sizes it for a Hopper. There are
# three: the stream that loads and warms up, that of the device's thread, and that of captures. A prompt stream has one
# more.
_WORKSPACE_BYTES = 32 << 20
# K and V of a segment and a square of a context of 32/8 heads of 128 (50 MiB), and a chunk of 2048 tokens in float32
# three times while two parts are joined (96 MiB); see `engine.kernels.libraries.cudnn`. Its own workspace is assumed.
_CUDNN_BYTES = 256 << 20
_CPU_KV_MEMORY_BYTES = 1 << 30
_GPU_KV_SHARE = 0.9  # of the memory that weights, graphs and workspaces leave free
# CPU: us per token of a prompt of 2048 on one core, 135M shape, in chunks of 64 / 128 / 256 / 512 / 1024 tokens: 416 /
# 297 / 264 / 258 / 240 (2026-11); longer chunks delay requests that end inside them.
# GPU: far more operations per byte of weights than any GPU needs to be busy; not tuned.
_SATURATING_TOKENS: dict[DeviceType, int] = {"cpu": 256, "cuda": 2048}
# Prompt tokens of one step, over all sequences, whose log-probabilities are found: each takes a row of logits. 128 rows
# of a vocabulary of 128 K are 64 MiB of float32, and chunks of 128 tokens cost a CPU 15 % more than longer ones.
SCORED_TOKENS = 128
# Kinds of attention that may read another page table in windowed layers, or one with a gap.
_TWO_TABLES = ("auto", "torch", "triton")
_FLOAT32_BYTES = 4
_PAGE_ID_BYTES = 4
# The rows of partial attention results that split contexts of latents leave to be joined: 132 multiprocessors with 4
# programs of 32 rows each, and a third more because the number of splits is rounded up.
_LATENT_SPLIT_ROWS = 132 * 4 * 32 * 4 // 3
# All other decodes have this many work items beyond one per sequence; an item has a row for each query head
# (`engine.kernels.triton.attention.decode_plan.NUM_SPARE_ITEMS`).
SPARE_DECODE_ITEMS = 1024


def saturating_tokens(device_type: DeviceType) -> int:
    """Returns the length of a prompt chunk, in tokens, beyond which a step gets no cheaper per token."""
    return _SATURATING_TOKENS[device_type]


def select_context(config: EngineConfig, model: ModelConfig) -> int:
    """Returns the number of tokens that a sequence may have. Raises ConfigError."""
    if config.max_context is not None and config.max_context > model.context_length:
        raise ConfigError(
            f"engine.max_context = {config.max_context} is more than the {model.context_length} tokens of "
            f"{config.model}; give at most that"
        )
    return config.max_context or model.context_length


def serving_revision(config: EngineConfig, model: ModelConfig) -> str:
    """Returns the revision of the model as it is served.

    Quantizing weights while loading them makes a different model, and so do attention sinks and an update of the
    weights: pages must not be mistaken for the original's.
    Raises ConfigError if the checkpoint is quantized already.
    """
    weights, revision = config.weights, _quantized_revision(config, model)
    if config.attention_sinks:  # what a token sees depends on the pages' boundaries too
        revision += f"+sinks{config.attention_sinks}-{config.attention_window}-{config.page_size}"
    return revision if weights is None else updated_revision(revision, weights.version, weights.digest)


def _quantized_revision(config: EngineConfig, model: ModelConfig) -> str:
    if config.quantization == "none":
        return model.revision
    if model.scheme is not None:
        raise ConfigError(
            f"engine.quantization = {config.quantization!r}: the weights of {config.model} are quantized already "
            f"({model.scheme.method}); give engine.quantization = none, or a plain checkpoint"
        )
    return f"{model.revision}+{config.quantization}"


def make_layout(config: EngineConfig, model: ModelConfig) -> KVLayout:
    """Returns the page layout of the whole model. Raises ConfigError."""
    sink_window(config, model)
    chunk_tokens = model.irope.chunk_tokens if model.irope is not None else None
    if chunk_tokens is not None and chunk_tokens % config.page_size:
        raise ConfigError(
            f"engine.page_size = {config.page_size} does not divide the {chunk_tokens} tokens of the model's attention "
            "chunks; give a size that does"
        )
    return KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        page_size=config.page_size,
        head_dim=model.head_dim,
        dtype=model.dtype if config.dtype == "auto" else config.dtype,
        model_revision=serving_revision(config, model),
        quantization=config.quantization,
        kv_dtype=config.kv_dtype,
        window_layers=_window_layers(config, model),
    )


def check_attention(config: EngineConfig, model: ModelConfig, layout: KVLayout) -> None:
    """Raises ConfigError if `engine.attention` names a library that does not support the model or its pages."""
    check_library(
        config.attention,
        layout,
        has_latents=model.latent is not None,
        has_softcap=model.attention_softcap is not None,
        has_sinks=model.family.sinks,
        has_chunks=model.irope is not None and model.irope.chunk_tokens is not None,
    )


def _window_layers(config: EngineConfig, model: ModelConfig) -> tuple[int, ...]:
    """Returns the layers whose part of a page is kept apart. Raises ConfigError where that is not supported."""
    if config.window_share == 1.0:
        return ()
    problems = (
        (not model.window_layers, f"the layers of {config.model} do not alternate between windowed and full attention"),
        (config.tensor_parallel > 1, f"engine.tensor_parallel = {config.tensor_parallel} splits pages"),
        (config.host_memory_bytes > 0, "engine.host_memory_bytes keeps whole pages"),
        (config.attention not in _TWO_TABLES, f"engine.attention = {config.attention!r} reads one page table"),
    )
    for is_present, problem in problems:
        if is_present:
            raise ConfigError(
                f"engine.window_share = {config.window_share:g} keeps the KV of windowed layers apart, but {problem}; "
                "set it to 1"
            )
    return model.window_layers


def sink_window(config: EngineConfig, model: ModelConfig) -> SinkWindow | None:
    """Returns what tokens see if attention sinks are configured. Raises ConfigError where these are not supported."""
    if not config.attention_sinks or config.attention_window is None:
        return None
    has_windows = any(window is not None for window in model.windows)
    is_chunked = model.irope is not None and model.irope.chunk_tokens is not None
    problems = (
        (has_windows or is_chunked, f"layers of {config.model} see only a part of the text themselves"),
        (config.tensor_parallel > 1, f"engine.tensor_parallel = {config.tensor_parallel} is not supported with it"),
        (config.host_memory_bytes > 0, "engine.host_memory_bytes is not supported with it"),
        (config.attention not in _TWO_TABLES, f"engine.attention = {config.attention!r} is not supported with it"),
    )
    for is_present, problem in problems:
        if is_present:
            raise ConfigError(
                f"engine.attention_sinks = {config.attention_sinks} limits what tokens see, but {problem}; set it to 0"
            )
    return SinkWindow(config.attention_sinks, config.attention_window, config.page_size)


def count_slots(config: EngineConfig, num_pages: int) -> int:
    """Returns how many pages at once have the windowed layers' part."""
    return max(1, math.ceil(config.window_share * num_pages))


def pool_bytes(config: EngineConfig, layout: KVLayout, num_pages: int) -> int:
    """Returns the size of a pool of that many pages."""
    if not layout.window_layers:
        return num_pages * layout.page_bytes
    num_slots = count_slots(config, num_pages)
    return num_pages * layout.full_part.page_bytes + num_slots * layout.windowed_part.page_bytes


def count_pages(
    config: EngineConfig, layout: KVLayout, device_type: DeviceType, free_bytes: int, largest_step_bytes: int = 0
) -> int:
    """Returns the size of the pool, given the `free_bytes` that weights, graphs and workspaces leave on the device.

    A GPU's pool also leaves room for the largest step. Raises ConfigError if that is fewer than 2 pages.
    """
    if config.num_pages is not None:
        return config.num_pages
    budget = config.kv_memory_bytes
    if budget is None:
        on_gpu = min(int(free_bytes * _GPU_KV_SHARE), free_bytes - largest_step_bytes)
        budget = max(on_gpu, 0) if device_type == "cuda" else _CPU_KV_MEMORY_BYTES
    num_pages = budget // layout.page_bytes
    if layout.window_layers:
        mean_bytes = layout.full_part.page_bytes + config.window_share * layout.windowed_part.page_bytes
        num_pages = int(budget / mean_bytes)
        while num_pages and pool_bytes(config, layout, num_pages) > budget:  # slots are rounded up
            num_pages -= 1
    if num_pages < 2:
        raise ConfigError(
            f"engine.kv_memory_bytes = {budget} holds {num_pages} pages of {layout.page_bytes} bytes; "
            f"give at least {2 * layout.page_bytes}, or a smaller engine.page_size"
        )
    return num_pages


def weight_bytes(
    model: ModelConfig, dtype: str, device_type: DeviceType, max_context: int, shard: Shard = WHOLE
) -> int:
    """Returns the size of the loaded model or of one rank's part, tables of the rotary embedding included.

    On a CPU a tied head is a second, packed copy of the embedding.
    """
    slices = tensor_slices(model, shard)
    shapes = {
        name: slices[name].shape(shape) if name in slices else shape for name, shape in tensor_shapes(model).items()
    }
    num_values = sum(math.prod(shape) * _values_of(name) for name, shape in shapes.items())
    if model.tie_embeddings and device_type == "cpu":
        num_values += math.prod(shapes[EMBEDDING])
    num_tables = 1 if model.local_rope is None else 2
    float32_bytes = num_tables * max_context * model.rope_dim * _FLOAT32_BYTES
    if model.family.norm_offset:
        norms = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith("norm.weight"))
        num_values, float32_bytes = num_values - norms, float32_bytes + norms * _FLOAT32_BYTES
    experts = model.experts
    if experts is not None and experts.float32_router:
        routers = len(experts.layers) * experts.num_experts * (model.hidden_size + experts.sigmoid)  # and biases
        num_values, float32_bytes = num_values - routers, float32_bytes + routers * _FLOAT32_BYTES
    return num_values * DTYPE_BYTES[dtype] + float32_bytes


def embedding_bytes(model: ModelConfig, dtype: str) -> int:
    """Returns the size of the whole embedding."""
    return model.vocab_size * model.hidden_size * DTYPE_BYTES[dtype]


def _values_of(name: str) -> int:
    """Returns how many values a stored element becomes: a byte of MXFP4 codes two, its scale none."""
    return 2 if name.endswith(CODE_SUFFIXES[0]) else 0 if name.endswith(CODE_SUFFIXES[1]) else 1


def saved_bytes(
    model: ModelConfig, quantization: str, stored: Collection[str], dtype: str, device: DeviceMemory
) -> int:
    """Returns the bytes that quantized weights save compared with plain ones.

    Counts the products in `stored`, which the checkpoint has quantized, or all of them if they are quantized while
    loading. Assumes that a CPU has tile instructions for them. fp8 and MXFP4 are decoded on a device that does not
    read e4m3.
    """
    device_type = device.type
    scheme = model.scheme
    kind = scheme.kind if scheme is not None else quantization
    is_integer = device_type == "cpu" and scheme is not None and scheme.activations is not None
    has_kernel = dtype in (("bfloat16",) if device_type == "cpu" else ("bfloat16", "float16"))
    if not has_kernel and not is_integer:
        return 0
    saved = _saved_by_mxfp4(model, dtype) if device.reads_e4m3 else 0
    if kind not in BITS or (kind == "fp8" and not device.reads_e4m3):
        return saved
    saved += _saved_by_head(model, dtype, device_type) if scheme is None else 0
    products = product_shapes(model, with_experts=device_type == "cpu" or kind == "fp8")
    if scheme is not None:
        products[HEAD] = (model.vocab_size, model.hidden_size)
    for name, (rows, columns) in products.items():
        if scheme is not None and name.removesuffix(".weight") not in stored:
            continue
        group = scheme.group_of(columns) if scheme is not None else int4_group(columns) if kind == "int4" else columns
        code_bits = 8 if is_integer and not has_kernel else BITS[kind]
        if is_integer:  # weights are symmetric, and the kernels know where their zeros are
            has_zeros = kind == "int4" and not has_kernel
        else:
            has_zeros = kind == "int4" or (kind == "int8" and device_type == "cpu")
        scales = rows * -(-columns // group) * _FLOAT32_BYTES * (1 + has_zeros)
        saved += rows * columns * DTYPE_BYTES[dtype] - rows * columns * code_bits // 8 - scales
    return saved


def _saved_by_mxfp4(model: ModelConfig, dtype: str) -> int:
    """Returns what experts that are stored in MXFP4 save, as fp8 with a scale for each group."""
    experts = model.experts
    if experts is None or not experts.mxfp4:
        return 0
    num_values = 3 * len(experts.layers) * experts.num_experts * experts.intermediate_size * model.hidden_size
    return num_values * (DTYPE_BYTES[dtype] - 1) - num_values // MXFP4_GROUP * _FLOAT32_BYTES


def _saved_by_head(model: ModelConfig, dtype: str, device_type: DeviceType) -> int:
    """Returns the saving by an int8 head, negative if the head would otherwise share the embedding's memory."""
    is_copy = not model.tie_embeddings or device_type == "cpu"
    own = model.vocab_size * (model.hidden_size + 2 * _FLOAT32_BYTES)
    return is_copy * model.vocab_size * model.hidden_size * DTYPE_BYTES[dtype] - own


def step_bytes(model: ModelConfig, dtype: str, num_tokens: int, num_rows: int) -> int:
    """Estimates the tensors alive at the widest point of a step, and float32 logits of `num_rows`, twice, to sample."""
    attention = (model.num_heads + 2 * model.num_kv_heads + model.num_heads) * model.head_dim
    if model.latent is not None:  # queries and outputs in the latent space, for every head
        attention = model.num_heads * (2 * model.latent.query_dim + 2 * model.latent.rank + model.latent.v_dim)
    inner = 3 * model.intermediate_size
    if model.experts is not None:
        chosen = model.experts.num_chosen
        inner = max(inner, chosen * (3 * model.experts.intermediate_size + 4 * model.hidden_size))
    widest = 3 * model.hidden_size + max(attention, inner)
    return num_tokens * widest * DTYPE_BYTES[dtype] + 2 * num_rows * model.vocab_size * _FLOAT32_BYTES


def graph_bytes(config: EngineConfig, model: ModelConfig, device_type: DeviceType, shard: Shard = WHOLE) -> int:
    """Estimates what captured decode steps keep: the largest step's tensors, partial results of splits, and inputs."""
    if not captures_graphs(config, model, device_type):
        return 0
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    num_pages = -(-select_context(config, model) // config.page_size)
    table_bytes = config.cuda_graphs * num_pages * _PAGE_ID_BYTES
    own = shard_model(model, shard)  # except the logits: the first rank has those of the whole vocabulary
    if own.latent is not None:
        split_values = _LATENT_SPLIT_ROWS * own.latent.rank
    else:
        split_values = (config.cuda_graphs + SPARE_DECODE_ITEMS) * own.num_heads * own.head_dim
    split_bytes, plan_bytes = split_values * _FLOAT32_BYTES, 0
    if config.attention == "flashinfer":
        plan_bytes = flashinfer_memory.captured_bytes(
            own.num_heads, own.num_kv_heads, own.head_dim, config.cuda_graphs, num_pages
        )
        split_bytes = 0
    num_forms = 2 if config.max_adapters else 1  # steps with adapters are captured besides those without
    steps = num_forms * (step_bytes(own, dtype, config.cuda_graphs, config.cuda_graphs) + split_bytes)
    return steps + plan_bytes + table_bytes


def workspace_bytes(
    config: EngineConfig, model: ModelConfig, device_type: DeviceType, *, has_prompt_stream: bool = False
) -> int:
    """Returns what libraries allocate after the pool: with the first steps, and for the prompt stream if there is one.
    See `_WORKSPACE_BYTES`.
    """
    if device_type == "cpu":
        return 0
    pieces = _CUDNN_BYTES if config.attention == "cudnn" else 0
    num_bytes = pieces + _WORKSPACE_BYTES * (3 if captures_graphs(config, model, device_type) else 2)
    if has_prompt_stream:  # with its own state of attention
        num_bytes += (
            pieces + _WORKSPACE_BYTES + (flashinfer_memory.WORKSPACE_BYTES if config.attention == "flashinfer" else 0)
        )
    return num_bytes


def captures_graphs(config: EngineConfig, model: ModelConfig, device_type: DeviceType) -> bool:
    """Returns whether decode steps are replayed from CUDA graphs.

    That takes attention that does not wait on the host, and plans nothing there, or only before a replay; and one page
    table for all layers.
    """
    return (
        device_type == "cuda"
        and config.window_share == 1.0
        and config.cuda_graphs > 0
        and captures_decodes(config.attention)
    )
