"""Builds the part of a replica that each rank holds: its part of the weights, the pages of its heads, and the runner
over both.

Rank 0's part is inside its `engine.engine.Engine`, another rank's inside its `engine.parallel.worker_rank.WorkerRank`.
A replica of one rank has one part, which is the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.adapters.slot_store import AdapterStore
from engine.cache.kv_layout import KVLayout
from engine.cache.pool_memory import allocate_pool
from engine.cpu.cores import bind_to_cores
from engine.graphs.cuda_graphs import SPARE_PAGES, GraphRunner, buckets_up_to
from engine.kernels.attention_interface import AttentionBackend
from engine.kernels.backends import select_backend, select_ops
from engine.kernels.kv_quantization import layers_of_parts, reads_e4m3
from engine.kernels.libraries.attention import LibraryAttention
from engine.kernels.libraries.capabilities import captures_decodes
from engine.memory.device_memory import DeviceType
from engine.memory.estimates import (
    SCORED_TOKENS,
    captures_graphs,
    check_attention,
    count_pages,
    graph_bytes,
    make_layout,
    saturating_tokens,
    select_context,
    step_bytes,
    workspace_bytes,
)
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loader import check_share, load_model
from engine.parallel.collectives import SINGLE_RANK, ParallelGroup
from engine.parallel.determinism import check_deterministic
from engine.parallel.shard import WHOLE, Shard, check_expert_parallel, shard_layout, shard_model
from engine.step.job_thread import use_device
from engine.step.model_runner import ModelRunner
from engine.weights.quantized_weight import Kind
from penstock.config import EngineConfig
from penstock.errors import ConfigError

log = logging.getLogger(__name__)

JoinGroup = Callable[[torch.device], ParallelGroup]


@dataclass(frozen=True, slots=True)
class ModelPart:
    config: EngineConfig
    model: ModelConfig  # of the whole model
    layout: KVLayout  # of this rank's pages
    device: torch.device
    decoder: Decoder
    attention: AttentionBackend
    group: ParallelGroup
    adapters: AdapterStore | None = None  # None: adapters are off

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        shard: Shard = WHOLE,
        join: JoinGroup = lambda device: SINGLE_RANK,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> ModelPart:
        """Reads this rank's share of the checkpoint. Blocks, also for the other ranks (`join`).

        Raises CheckpointError for a folder that cannot be served, ConfigError for settings that cannot work.
        """
        num_cores = bind_to_cores(config.cores) if config.cores is not None else None
        if num_threads := config.num_threads or num_cores:
            torch.set_num_threads(num_threads)
        device = select_device(config.device, shard)
        check_e4m3(config, device)
        model = ModelConfig.from_folder(config.model)
        select_context(config, model)  # raises before anything is loaded
        check_expert_parallel(config, model)
        layout = shard_layout(make_layout(config, model), shard)
        check_attention(config, model, layout)
        attention = select_backend(config.attention, device)
        if shard.num_ranks > 1:
            check_share(Path(config.weights_folder), model, shard, layout.dtype, quantization_of(config))
        group = join(device)
        decoder = load_decoder(config, model, layout, device, group, on_progress)
        check_deterministic(config, decoder, layout.dtype, device, shard)
        adapters = make_adapters(config, model, getattr(torch, layout.dtype), device, shard)
        return cls(config, model, layout, device, decoder, attention, group, adapters)

    def count_pages(self, *, has_prompt_stream: bool = False) -> int:
        """Returns the number of pages that fit into the memory that the loaded weights leave free, and a prompt stream
        if there is to be one.
        """
        if self.device.type == "cuda":
            later = graph_bytes(self.config, self.model, "cuda", self.group.shard)
            later += workspace_bytes(self.config, self.model, "cuda", has_prompt_stream=has_prompt_stream)
            free = int(torch.cuda.mem_get_info(self.device)[0]) - later
            return count_pages(self.config, self.layout, "cuda", free, self._largest_step_bytes())
        return count_pages(self.config, self.layout, "cpu", 0)

    def _largest_step_bytes(self) -> int:
        """Estimates a step of any worker with default settings; the engine does not know the worker's own."""
        rows = self.config.cuda_graphs + SCORED_TOKENS
        own = shard_model(self.model, self.group.shard)
        return step_bytes(own, self.layout.dtype, saturating_tokens("cuda"), rows)

    def make_pool(self, num_pages: int) -> torch.Tensor:
        """Allocates the page tensor, with `SPARE_PAGES` more if graphs are to be captured. If pages have two parts, it
        has those that every page has."""
        num_pages += SPARE_PAGES if self.captures_graphs else 0
        return self._allocate(self.layout.full_part, num_pages)

    def make_window_pool(self, num_slots: int) -> torch.Tensor:
        """Allocates the tensor of the windowed layers' parts."""
        return self._allocate(self.layout.windowed_part, num_slots)

    def _allocate(self, layout: KVLayout, num_rows: int) -> torch.Tensor:
        return allocate_pool(layout.shape(num_rows), getattr(torch, layout.storage_dtype), self.device)

    def make_graphs(self, runner: ModelRunner, num_pages: int) -> GraphRunner | None:
        """Returns graphs to be captured over a pool of `num_pages`, or None if decode steps are not captured."""
        if not self.captures_graphs:
            return None
        buckets, max_context = buckets_up_to(self.config.cuda_graphs), select_context(self.config, self.model)
        has_adapters = self.adapters is not None
        page_size = self.layout.page_size
        planner = self.attention.planner if isinstance(self.attention, LibraryAttention) else None
        return GraphRunner(runner.run, buckets, max_context, page_size, num_pages, self.device, has_adapters, planner)

    @property
    def captures_graphs(self) -> bool:
        device_type: DeviceType = "cuda" if self.device.type == "cuda" else "cpu"
        return captures_graphs(self.config, self.model, device_type) and captures_decodes(self.attention.name)

    def make_runner(self, kv_pages: torch.Tensor, window_kv: torch.Tensor | None = None) -> ModelRunner:
        return self._runner_with(self.attention, kv_pages, window_kv)

    def make_second_runner(self, kv_pages: torch.Tensor, window_kv: torch.Tensor | None = None) -> ModelRunner:
        """Returns a runner that may compute at the same time as the first one, because it shares no state of attention
        with it."""
        return self._runner_with(select_backend(self.config.attention, self.device), kv_pages, window_kv)

    def _runner_with(
        self, attention: AttentionBackend, kv_pages: torch.Tensor, window_kv: torch.Tensor | None
    ) -> ModelRunner:
        layers, ops = layers_of_parts(kv_pages, window_kv, self.layout), select_ops(attention)
        return ModelRunner(self.decoder, layers, attention, ops, self.adapters, is_whole=window_kv is None)


def quantization_of(config: EngineConfig) -> Kind | None:
    """Returns what plain weights are quantized to while they are loaded."""
    return None if config.quantization == "none" else config.quantization


def load_decoder(
    config: EngineConfig,
    model: ModelConfig,
    layout: KVLayout,
    device: torch.device,
    group: ParallelGroup,
    on_progress: Callable[[float], None] = lambda _: None,
    staged: Path | None = None,
) -> Decoder:
    """Reads a rank's weights, from the folder `staged` if they are there too. Blocks. Raises CheckpointError."""
    return load_model(
        Path(config.model),
        model,
        weights=config.weights,
        dtype=getattr(torch, layout.dtype),
        device=device,
        max_context=select_context(config, model),
        on_progress=on_progress,
        group=group,
        share=config.share_weights,
        quantization=quantization_of(config),
        staged=staged,
    )


def make_adapters(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard
) -> AdapterStore | None:
    """Allocates the adapter slots of a rank, and one more that stays empty. Returns None if adapters are off."""
    if not config.max_adapters:
        return None
    return AdapterStore(model, config.max_adapters + 1, config.max_adapter_rank, dtype, device, shard)


def check_e4m3(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError if fp8 is asked for on a device whose kernels cannot read it.

    This happens before weights are loaded rather than when the first kernel is compiled. Weights that a checkpoint
    stores in fp8 are dequantized on such a device.
    """
    if reads_e4m3(device):
        return
    for name, instead in (("kv_dtype", "int8 or auto"), ("quantization", "int8")):
        if getattr(config, name) == "fp8":
            major, minor = torch.cuda.get_device_capability(device)
            raise ConfigError(
                f"engine.{name} = 'fp8': {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, "
                f"and its kernels read fp8 from 8.9 on (Ada, Hopper); give engine.{name} = {instead}"
            )


def select_device(name: str, shard: Shard = WHOLE) -> torch.device:
    """Returns the device of one rank: the GPU with its number, or the only GPU that its process sees.

    Raises ConfigError. A GPU also becomes the current device of this thread; the engine also selects it in every thread
    that launches steps.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device = {name!r} is not a device; give auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"engine.device = {name!r} is not available here; give auto or cpu")
    if device.type == "cpu":
        return device
    num_devices = torch.cuda.device_count()
    if device.index is not None and device.index >= num_devices:
        raise ConfigError(
            f"engine.device = {name!r}: this process sees {num_devices} GPUs; give cuda:0 to cuda:{num_devices - 1}"
        )
    if shard.num_ranks == 1:
        use_device(device)
        return device
    if device.index is not None:
        raise ConfigError(
            f"engine.device = {name!r}: each of the {shard.num_ranks} ranks has its own GPU; give cuda, and "
            "choose GPUs by CUDA_VISIBLE_DEVICES"
        )
    if num_devices not in (1, *range(shard.num_ranks, num_devices + 1)):
        raise ConfigError(
            f"engine.tensor_parallel = {shard.num_ranks} needs a GPU for each rank, and this process sees {num_devices}"
        )
    device = torch.device("cuda", shard.rank if num_devices > 1 else 0)
    use_device(device)
    return device
