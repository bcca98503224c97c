"""One model replica behind one object: weights, KV pages, prefix cache, and the step.

A worker's step loop is the only caller. The engine owns the model and the page tensor; which sequence holds which
page is the caller's business (through `pool` and `prefix_cache`), and a step changes neither.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.batch import Batch, HostBatch, lay_out, to_device
from engine.cache_tiers import CacheTiers
from engine.cuda_graphs import GraphRunner
from engine.disk_tier import DiskFile, DiskTier, SlotFile
from engine.drawing import Drawn, Known, LaidOutStep, compute, compute_in_vain, lay_out_step
from engine.host_tier import HostTier
from engine.kv_layout import KVLayout
from engine.memory_plan import saturating_tokens, select_context
from engine.model_config import ModelConfig
from engine.page_pool import PagePool
from engine.parallel import ALONE, ParallelGroup
from engine.part import Part
from engine.plain_batch import RankedStep
from engine.prefix_cache import PrefixCache
from engine.ranked_graphs import capture_everywhere
from engine.ranked_pages import RankedDiskFile, RankedHostTier, zero_everywhere
from engine.ranks import Launch, Ranks
from engine.runner import ModelRunner
from engine.sampler import sample, warm_up_draws
from engine.sequence import SampledToken, ScheduledSequence, StepOutput
from engine.shard import Shard
from engine.warm_up import warm_up_batches
from engine.zeroing import zero_pages
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.kv_events import KvEventLog
from penstock.types import PageId

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
        ranks: Ranks | None = None,
        runs_ahead: bool = False,
        graphs: GraphRunner | None = None,
        group: ParallelGroup = ALONE,
        max_context: int | None = None,
    ) -> None:
        """`runs_ahead`: decode steps are given to the device before those ahead of them are over."""
        self.model = model
        self.layout = layout
        self.kv_pages = kv_pages  # `layout.shape`, contiguous
        self.pool = pool
        self.prefix_cache = cache
        self.runner = runner
        self.ranks = ranks  # the other ones, where the model is split
        self.runs_ahead = runs_ahead
        self.max_context = max_context or model.context_length  # tokens that a sequence may have
        self._graphs = graphs
        self._group = group

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        on_progress: Callable[[float], None] = lambda _: None,
        on_event: KvEventLog | None = None,
        launch: Launch | None = None,
    ) -> Engine:
        """Reads the checkpoint and makes the page pool; blocks. `on_progress` hears the share of weights read. `launch`
        starts the processes of the other ranks, where `config` wants any.

        Raises CheckpointError for a folder that cannot be served, ConfigError for settings that cannot work.
        """
        ranks = None
        if config.tensor_parallel > 1:
            if launch is None:
                raise ConfigError(f"engine.tensor_parallel = {config.tensor_parallel} needs processes: give a launch")
            ranks = Ranks(config, launch)
        try:
            return cls._load(config, ranks, on_progress, on_event if config.kv_events else None)
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise

    @classmethod
    def _load(
        cls,
        config: EngineConfig,
        ranks: Ranks | None,
        on_progress: Callable[[float], None],
        on_event: KvEventLog | None,
    ) -> Engine:
        if ranks is None:
            part = Part.load(config, on_progress=on_progress)
            num_pages = part.count_pages()
        else:
            answers = ranks.begin_load()
            part = Part.load(config, Shard(0, ranks.num_ranks), ranks.join, on_progress)
            num_pages = min(part.count_pages(), *ranks.wait(answers))
            ranks.ask("pool", num_pages)
        kv_pages = part.make_pool(num_pages)
        pool = PagePool(num_pages, _make_eraser(kv_pages, ranks) if config.zero_freed_pages else None)
        tiers = _make_tiers(config, kv_pages, part.layout.page_bytes, ranks)
        cache = PrefixCache(pool, config.page_size, on_event, config.prefix_caching, tiers)
        runner = part.make_runner(kv_pages)
        log.info(
            "loaded %s: %d pages, %s, KV in %s, %s attention on %s%s",
            config.model,
            num_pages,
            part.layout.dtype,
            part.layout.kv_dtype if part.layout.is_quantized else part.layout.dtype,
            part.attention.name,
            part.device,
            f", {ranks.num_ranks} ranks" if ranks is not None else "",
        )
        runs_ahead = kv_pages.is_cuda if config.run_ahead is None else config.run_ahead
        return cls(
            part.model,
            part.layout,
            kv_pages,
            cache,
            pool,
            runner,
            ranks,
            runs_ahead,
            part.make_graphs(runner, num_pages),
            part.group,
            select_context(config, part.model),
        )

    @property
    def num_ranks(self) -> int:
        return 1 if self.ranks is None else self.ranks.num_ranks

    @property
    def model_layout(self) -> KVLayout:
        """Of the pages of all ranks together: what workers are told apart by. `layout` is of rank 0's."""
        return replace(self.layout, head_range=None)

    def when_lost(self, on_lost: Callable[[BaseException], None]) -> None:
        """`on_lost` hears, on any thread, that one of the other ranks is gone: no step will succeed any more."""
        if self.ranks is not None:
            self.ranks.when_lost(on_lost)

    def close(self) -> None:
        """Ends the other ranks, where there are any."""
        if self.ranks is not None:
            self.ranks.close()

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
        logits_RV, drawing = self._forward(work, on_layer)
        tokens: list[SampledToken | None] = [None] * len(work)
        if drawing:
            rows = [work[index] for index in drawing]
            drawn = sample(logits_RV, rows, self.model.eos_token_ids)
            for index, token in zip(drawing, drawn, strict=True):
                tokens[index] = token
        return StepOutput(tuple(tokens))

    def _forward(
        self, work: Sequence[ScheduledSequence], on_layer: Callable[[int], None] | None
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Logits of the sequences that draw, and their places in `work`."""
        host = lay_out(work, self.layout.page_size)
        return self._run(host, on_layer), tuple(host.drawing.tolist())

    def _run(self, host: HostBatch, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Logits of a step that is not replayed."""
        if self.ranks is not None:
            self.ranks.announce(RankedStep(host))
        with self._explained():
            return self.runner.forward(to_device(host, self.kv_pages.device), on_layer)

    def lay_out(self, work: Sequence[ScheduledSequence]) -> LaidOutStep:
        """All that `compute` needs of a step that is not empty; sequences may change afterwards."""
        return lay_out_step(work, self.layout.page_size)

    def announce(self, step: LaidOutStep) -> None:
        """Other ranks begin with a step as soon as they can. Every step is announced before it is computed, and those
        that were announced are computed in that order, be it in vain."""
        if self.ranks is not None:
            self.ranks.announce(RankedStep(step.host, step.awaited, may_replay=True))

    def compute(self, step: LaidOutStep, before: Drawn | Known | None = None) -> Drawn | Known:
        """Gives the device a step; on a GPU it returns before that is done. From one thread at a time, like `step`.

        `before`: the step whose tokens this one awaits."""
        with self._explained():
            return compute(step, self._replay, self._group, self.kv_pages.device, self.model.eos_token_ids, before)

    def give(self, work: Sequence[ScheduledSequence], on_layer: Callable[[int], None] | None = None) -> Drawn | Known:
        """As `step`, but on a GPU it returns before that is done, unless a draw depends on the text."""
        step = self.lay_out(work)
        if self.ranks is not None:
            self.ranks.announce(RankedStep(step.host))
        device, ends = self.kv_pages.device, self.model.eos_token_ids
        with self._explained():
            return compute(step, lambda batch: self.runner.forward(batch, on_layer), self._group, device, ends)

    def compute_in_vain(self, step: LaidOutStep) -> None:
        """Where a step awaits one that failed, and other ranks compute it."""
        if self.ranks is not None:
            with self._explained():
                compute_in_vain(step, self._replay, self._group, self.kv_pages.device)

    def _replay(self, batch: Batch) -> torch.Tensor:
        return self.runner.forward(batch) if self._graphs is None else self._graphs.forward(batch)

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.ranks is None else self.ranks.explained()

    def capture_graphs(
        self, on_progress: Callable[[int, int], None] = lambda done, of: None, max_sequences: int | None = None
    ) -> None:
        """Decode steps are replayed from now on, where that is possible; those of more than `max_sequences` never come.
        Blocks for seconds, the first time; `on_progress` hears how many sizes of batch are done."""
        if self._graphs is not None and not self._graphs.is_captured:
            capture_everywhere(self._graphs, self.ranks, on_progress, max_sequences)

    def warm_up(self) -> None:
        """One step of each kind that kernels are compiled for, so that no request waits for that. Blocks: for half a
        minute where there are such kernels and no cache has them."""
        started_s = time.monotonic()
        [page] = self.pool.allocate(1)
        try:
            most_tokens = self.saturating_tokens if self.runner.compiles else 0
            for batch in warm_up_batches(page, self.layout.page_size, self.max_context, most_tokens):
                logits_1V = self._run(batch)
            warm_up_draws(logits_1V)
            if self.kv_pages.is_cuda:
                torch.cuda.synchronize(self.kv_pages.device)
        finally:
            self.pool.release([page])
        if self.runner.compiles:
            log.info("kernels of every kind of step are there, after %.1f s", time.monotonic() - started_s)
        if self.ranks is not None:
            self.ranks.set_ready()


def _make_eraser(kv_pages: torch.Tensor, ranks: Ranks | None) -> Callable[[Sequence[PageId]], None]:
    if ranks is None:
        return functools.partial(zero_pages, kv_pages)
    return functools.partial(zero_everywhere, kv_pages, ranks)


def _make_tiers(
    config: EngineConfig, kv_pages: torch.Tensor, page_bytes: int, ranks: Ranks | None
) -> CacheTiers | None:
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
    ranked = None if ranks is None else RankedHostTier(host, ranks)
    if config.disk_path is None:
        return CacheTiers(ranked or host)
    num_pages = config.disk_bytes // page_bytes
    file: SlotFile
    file = own = DiskFile(config.disk_path, num_pages, host)
    if ranks is not None:
        file = RankedDiskFile(own, ranks, config.disk_path, num_pages)
    return CacheTiers(ranked or host, DiskTier(file, num_pages))
