"""Settings of the engine: one model replica, its precision, its pages and its devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.config.base import FrozenConfig
from penstock.config.retention import RetentionConfig


class LoadedWeightsConfig(FrozenConfig):
    """The weights that a worker loads instead of the model's own: those of the last update."""

    version: int = Field(ge=1)
    """Number of the update."""
    path: str
    """Folder of the safetensors files."""
    digest: str
    """Digest of these files; a worker refuses others."""


class EngineConfig(FrozenConfig):
    """A model replica. All pools share these settings except those that a pool overrides."""

    model: str
    """Hugging Face checkpoint folder."""
    weights: LoadedWeightsConfig | None = None
    """Weights in place of the checkpoint's own; set by updates of the weights."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of activations and unquantized weights; `auto` takes the one in config.json."""
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    """Quantizes the weights of matrix products while a plain checkpoint loads; `none` keeps them as the checkpoint has
    them."""
    kv_dtype: Literal["auto", "fp8", "int8"] = "auto"
    """Type of KV pages; `auto` takes `dtype`. It may differ between pools."""
    device: str = "auto"
    """Torch device, such as cuda or cuda:1; `auto` takes cuda if there is one, else cpu."""
    page_size: int = Field(16, ge=1, le=1024)
    """Tokens per KV page."""
    num_pages: int | None = Field(None, ge=2)
    """Pages in the pool; by default as many as fit into `kv_memory_bytes`."""
    kv_memory_bytes: int | None = Field(None, ge=1)
    """Bytes of the page pool; by default 1 GiB on a CPU and 90 % of what a GPU has left after
    weights and graphs, less if a step needs more."""
    window_share: float = Field(1.0, gt=0, le=1)
    """Share of the pages that also have room for the KV of windowed layers, in models in which these alternate with
    layers that read the whole context. Below 1, that KV is freed behind the window, and more pages fit into the same
    memory."""
    attention_sinks: int = Field(0, ge=0)
    """First tokens of a text that every token attends to, besides the last `attention_window`; 0 attends to all. Pages
    between the two are freed. For models without windows."""
    attention_window: int | None = Field(None, ge=1)
    """Last tokens that a token attends to with `attention_sinks`, itself included; both are rounded up to pages."""
    max_context: int | None = Field(None, ge=2)
    """Longest prompt plus output, in tokens; by default the model's own limit."""
    attention: Literal["auto", "torch", "triton", "flashinfer", "varlen", "cudnn"] = "auto"
    """Attention kernels. `flashinfer`, and for prompts only `varlen` (torch's, with FlashAttention 3) and `cudnn`, need
    a GPU and their packages."""
    share_weights: bool = True
    """Keeps one copy of the weights in memory for all replicas of a host (CPUs only)."""
    prefix_caching: bool = True
    """Reuses the pages of prefixes that were computed before."""
    kv_events: bool = True
    """Publishes which pages are cached; otherwise routers estimate it from the prompts they sent."""
    host_memory_bytes: int = Field(0, ge=0)
    """Host memory of each rank for pages evicted from the device; 0 discards them."""
    disk_bytes: int = Field(0, ge=0)
    """Disk space of each rank for pages evicted from host memory; 0 discards them."""
    disk_path: str | None = None
    """Folder of the disk tier."""
    retention: RetentionConfig = RetentionConfig()
    """What KV hints may do to the pool."""
    zero_freed_pages: bool = False
    """Erases a page's contents as soon as it is free."""
    cuda_graphs: int = Field(256, ge=0)
    """Largest batch whose decode steps are replayed from CUDA graphs; 0 captures none."""
    run_ahead: bool | None = None
    """Schedules a step before the tokens of the previous one are known; by default on GPUs only."""
    cores: str | None = None
    """CPU cores reserved for this worker, such as "0-3,8"; by default the operating system places its threads."""
    num_threads: int | None = Field(None, ge=1)
    """Threads of each rank's math libraries; by default one for each core that it may use."""
    max_adapters: int = Field(0, ge=0, le=1024)
    """LoRA adapters that a worker holds at once, in slots of reserved memory; 0 refuses requests for adapters."""
    max_adapter_rank: int = Field(16, ge=1, le=512)
    """Largest rank of an adapter, which determines the memory of each slot."""
    tensor_parallel: int = Field(1, ge=1, le=64)
    """Ranks that split each layer, as processes of one machine."""
    expert_parallel: bool = False
    """Gives each rank its share of a model's experts whole, instead of a part of every expert's width."""
    rank_timeout_s: float = Field(10.0, gt=0)
    """Seconds of silence from a rank after which the worker exits."""

    deterministic: bool = False
    """Refuses to serve where a request's logits could depend on what is computed beside it; see docs/weights.md."""

    @property
    def weights_version(self) -> int:
        """The number of the update that the weights come from; 0 for the checkpoint's own."""
        return 0 if self.weights is None else self.weights.version

    @property
    def weights_folder(self) -> str:
        return self.model if self.weights is None else self.weights.path

    @model_validator(mode="after")
    def _check_sinks(self) -> EngineConfig:
        if bool(self.attention_sinks) != (self.attention_window is not None):
            raise ValueError(
                f"engine.attention_sinks = {self.attention_sinks} and engine.attention_window = "
                f"{self.attention_window}; set both or neither"
            )
        return self

    @model_validator(mode="after")
    def _check_tiers(self) -> EngineConfig:
        if self.host_memory_bytes and not self.prefix_caching:
            raise ValueError(
                f"engine.host_memory_bytes = {self.host_memory_bytes} keeps evicted pages of the prefix cache, but "
                "engine.prefix_caching = false turns it off; set one of them"
            )
        if self.disk_bytes and not self.host_memory_bytes:
            raise ValueError(
                f"engine.disk_bytes = {self.disk_bytes} is for pages that leave host memory, but "
                "engine.host_memory_bytes is 0; set it too"
            )
        if bool(self.disk_bytes) != (self.disk_path is not None):
            raise ValueError(
                f"engine.disk_bytes = {self.disk_bytes} and engine.disk_path = {self.disk_path!r}; set both or neither"
            )
        return self
