"""What each rank of a replica has of it: its part of the weights, the pages of its heads, and the runner over both.

Rank 0's stands inside its `engine.engine.Engine`, another rank's inside its `engine.rank_member.RankMember`. A replica
of one rank has one part, which is everything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.cores import bind_to_cores
from engine.cuda_graphs import SPARE_PAGES, GraphRunner, buckets_up_to
from engine.device_memory import DeviceType
from engine.kernels import AttentionBackend, select_backend, select_ops
from engine.kernels.kv_codes import layers_of, reads_e4m3
from engine.kv_layout import KVLayout
from engine.library_check import check_library
from engine.memory_plan import captures_graphs, count_pages, graph_bytes, make_layout, select_context
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.registry import load_model
from engine.parallel import ALONE, ParallelGroup
from engine.runner import ModelRunner
from engine.shard import WHOLE, Shard, shard_layout
from engine.shared_pool import allocate_pool
from penstock.config import EngineConfig
from penstock.errors import ConfigError

log = logging.getLogger(__name__)

JoinGroup = Callable[[torch.device], ParallelGroup]


@dataclass(frozen=True, slots=True)
class Part:
    config: EngineConfig
    model: ModelConfig  # the whole
    layout: KVLayout  # of this rank's pages
    device: torch.device
    decoder: Decoder
    attention: AttentionBackend
    group: ParallelGroup

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        shard: Shard = WHOLE,
        join: JoinGroup = lambda device: ALONE,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> Part:
        """Reads this rank's share of the checkpoint; blocks, also for the other ranks (`join`).

        Raises CheckpointError for a folder that cannot be served, ConfigError for settings that cannot work."""
        num_cores = bind_to_cores(config.cores) if config.cores is not None else None
        if num_threads := config.num_threads or num_cores:
            torch.set_num_threads(num_threads)
        device = select_device(config.device, shard)
        check_e4m3(config, device)
        model = ModelConfig.from_folder(config.model)
        max_context = select_context(config, model)
        layout = shard_layout(make_layout(config, model), shard)
        check_library(config.attention, model, layout)
        attention = select_backend(config.attention, device)
        group = join(device)
        decoder = load_model(
            Path(config.model),
            model,
            dtype=getattr(torch, layout.dtype),
            device=device,
            max_context=max_context,
            on_progress=on_progress,
            group=group,
            share=config.share_weights,
            quantization=None if config.quantization == "none" else config.quantization,
        )
        return cls(config, model, layout, device, decoder, attention, group)

    def count_pages(self) -> int:
        """That this rank has room for, by what is free once the weights are there."""
        if self.device.type == "cuda":
            graphs = graph_bytes(self.config, self.model, "cuda", self.group.shard)
            return count_pages(self.config, self.layout, "cuda", int(torch.cuda.mem_get_info(self.device)[0]) - graphs)
        return count_pages(self.config, self.layout, "cpu", 0)

    def make_pool(self, num_pages: int) -> torch.Tensor:
        """With `SPARE_PAGES` more where graphs are to be captured."""
        num_pages += SPARE_PAGES if self.captures_graphs else 0
        return allocate_pool(self.layout.shape(num_pages), getattr(torch, self.layout.storage_dtype), self.device)

    def make_graphs(self, runner: ModelRunner, num_pages: int) -> GraphRunner | None:
        """To be captured, over a pool of so many pages."""
        if not self.captures_graphs:
            return None
        buckets, max_context = buckets_up_to(self.config.cuda_graphs), select_context(self.config, self.model)
        return GraphRunner(runner.forward, buckets, max_context, self.layout.page_size, num_pages, self.device)

    @property
    def captures_graphs(self) -> bool:
        device_type: DeviceType = "cuda" if self.device.type == "cuda" else "cpu"
        return captures_graphs(self.config, self.model, device_type) and self.attention.name in ("triton", "varlen")

    def make_runner(self, kv_pages: torch.Tensor) -> ModelRunner:
        return ModelRunner(self.decoder, layers_of(kv_pages, self.layout), self.attention, select_ops(self.attention))


def check_e4m3(config: EngineConfig, device: torch.device) -> None:
    """Before weights are loaded, rather than when the first kernel is compiled. Weights that a checkpoint has in fp8
    are dequantized on such a device."""
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
    """Of one rank: each takes a GPU of its own, by number, or the only one that its process sees."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device = {name!r} is no device; give auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"engine.device = {name!r} is not available here; give auto or cpu")
    if device.type == "cpu" or shard.num_ranks == 1:
        return device
    num_devices = torch.cuda.device_count()
    if num_devices not in (1, *range(shard.num_ranks, num_devices + 1)):
        raise ConfigError(
            f"engine.tensor_parallel = {shard.num_ranks} needs a GPU for each rank, and this process sees {num_devices}"
        )
    device = torch.device("cuda", shard.rank if num_devices > 1 else 0)
    torch.cuda.set_device(device)  # of this thread, for what is launched without saying where
    return device
