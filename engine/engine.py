"""One model replica behind one object: weights, KV pages, prefix cache, and the step.

A worker's step loop is the only caller. The engine owns the model and the page tensor; which sequence holds which
page is the caller's business (through `pool` and `prefix_cache`), and a step changes neither.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.batch import build_batch
from engine.cache_tiers import CacheTiers
from engine.disk_tier import DiskTier
from engine.host_tier import HostTier
from engine.kernels import select_backend, select_ops
from engine.kernels.kv_codes import layers_of
from engine.kv_layout import KVLayout
from engine.memory_plan import count_pages, make_layout, saturating_tokens, select_context
from engine.model_config import ModelConfig
from engine.models.registry import load_model
from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.runner import ModelRunner
from engine.sampler import sample
from engine.sequence import SampledToken, ScheduledSequence, StepOutput
from engine.sequence import Sequence as Generation
from engine.shared_pool import allocate_pool
from engine.zeroing import zero_pages
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.kv_events import KvEventLog
from penstock.types import RequestId, SamplingParams

log = logging.getLogger(__name__)


class Engine:
    """Made by `load`."""

    def __init__(
        self,
        model: ModelConfig,
        layout: KVLayout,
        kv_pages: torch.Tensor,
        cache: PrefixCache,
        pool: PagePool,
        runner: ModelRunner,
    ) -> None:
        self.model = model
        self.layout = layout
        self.kv_pages = kv_pages  # `layout.shape`, contiguous
        self.pool = pool
        self.prefix_cache = cache
        self.runner = runner

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        on_progress: Callable[[float], None] = lambda _: None,
        on_event: KvEventLog | None = None,
    ) -> Engine:
        """Reads the checkpoint and makes the page pool; blocks. `on_progress` hears the share of weights read.

        Raises CheckpointError for a folder that cannot be served, ConfigError for settings that cannot work.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        device = _select_device(config.device)
        attention = select_backend(config.attention, device)
        model_config = ModelConfig.from_folder(config.model)
        max_context = select_context(config, model_config)
        layout = make_layout(config, model_config)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        model = load_model(
            Path(config.model),
            model_config,
            dtype=dtype,
            device=device,
            max_context=max_context,
            on_progress=on_progress,
        )
        num_pages = _count_pages(config, layout, device)
        kv_pages = allocate_pool(layout.shape(num_pages), getattr(torch, layout.storage_dtype), device)
        erase = functools.partial(zero_pages, kv_pages) if config.zero_freed_pages else None
        pool = PagePool(num_pages, erase)
        tiers = _make_tiers(config, kv_pages, layout.page_bytes)
        told = on_event if config.kv_events else None
        cache = PrefixCache(pool, config.page_size, told, config.prefix_caching, tiers)
        runner = ModelRunner(model, layers_of(kv_pages, layout), attention, select_ops(attention))
        log.info(
            "loaded %s: %d pages, %s, KV in %s, %s attention on %s",
            config.model,
            num_pages,
            dtype,
            layout.kv_dtype if layout.is_quantized else dtype,
            attention.name,
            device,
        )
        return cls(model_config, layout, kv_pages, cache, pool, runner)

    @property
    def saturating_tokens(self) -> int:
        """Tokens of a prompt chunk from which on a step costs as much per token as any longer one.

        Longer steps gain nothing and delay the first token of every prompt that ends inside them.
        """
        return saturating_tokens("cuda" if self.kv_pages.is_cuda else "cpu")

    def step(self, work: Sequence[ScheduledSequence], on_layer: Callable[[int], None] | None = None) -> StepOutput:
        """One forward over a mixed batch of chunks and decodes, and a draw for each that reached its end. Blocks.

        `on_layer(n)` is called when the batch's KV of the first n layers is in the pages, or, on a GPU, will be once
        what the current stream has been given so far is done."""
        if not work:
            return StepOutput(())
        batch = build_batch(work, self.layout.page_size, self.kv_pages.device)
        logits_RV = self.runner.forward(batch, on_layer)
        tokens: list[SampledToken | None] = [None] * len(work)
        if batch.drawing:
            rows = [work[index] for index in batch.drawing]
            drawn = sample(logits_RV, rows, self.model.eos_token_ids)
            for index, token in zip(batch.drawing, drawn, strict=True):
                tokens[index] = token
        return StepOutput(tuple(tokens))

    def warm_up(self) -> None:
        """One prefill and one decode on scratch pages, so that the first request pays for no compilation. Blocks."""
        page_size = self.layout.page_size
        num_pages = min(2, self.pool.num_available)
        num_prompt_tokens = min(max(num_pages * page_size - 1, 1), self.model.context_length - 1)
        pages = self.pool.allocate(num_pages)
        try:
            scratch = Generation(
                RequestId("warm-up"),
                [0] * num_prompt_tokens,
                num_prompt_tokens,
                SamplingParams(max_tokens=2),
                b"",
                pages,
            )
            self.step([ScheduledSequence(scratch, num_prompt_tokens)])
            scratch.num_computed_tokens = num_prompt_tokens
            scratch.token_ids.append(0)
            if num_pages * page_size > num_prompt_tokens:
                self.step([ScheduledSequence(scratch, 1)])
        finally:
            self.pool.release(pages)


def _select_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device = {name!r} is no device; give auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"engine.device = {name!r} is not available here; give auto or cpu")
    return device


def _count_pages(config: EngineConfig, layout: KVLayout, device: torch.device) -> int:
    """By what is free once the weights are there."""
    if device.type == "cuda":
        return count_pages(config, layout, "cuda", int(torch.cuda.mem_get_info(device)[0]))
    return count_pages(config, layout, "cpu", 0)


def _make_tiers(config: EngineConfig, kv_pages: torch.Tensor, page_bytes: int) -> CacheTiers | None:
    if not config.host_memory_bytes:
        return None
    for name in ("host_memory_bytes", "disk_bytes"):
        if 0 < getattr(config, name) < page_bytes:
            raise ConfigError(f"engine.{name} = {getattr(config, name)} holds no page of {page_bytes} bytes; give more")
    try:
        host = HostTier(kv_pages, config.host_memory_bytes // page_bytes)
    except RuntimeError as error:  # torch's way to say that there is no memory
        raise ConfigError(
            f"engine.host_memory_bytes = {config.host_memory_bytes} cannot be allocated; give less"
        ) from error
    if config.disk_path is None:
        return CacheTiers(host)
    return CacheTiers(host, DiskTier(config.disk_path, config.disk_bytes // page_bytes, page_bytes))
