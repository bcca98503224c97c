"""A model replica behind one object: weights, KV pages, prefix cache, and the step.

A worker's step loop is the only caller. The engine owns the model and the page tensor. The caller decides which
sequence holds which page (through `pool` and `prefix_cache`), and a step changes neither.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from engine.adapters.engine_adapters import EngineAdapters
from engine.cache.kv_layout import KVLayout
from engine.cache.pool_memory import zero_pages
from engine.cache.prefix_cache import PrefixCache
from engine.cache.tensor_parallel import make_tiers, zero_on_all_ranks
from engine.cache.windows.page_window import PageWindow
from engine.cache.windows.window_parts import WindowParts
from engine.graphs.cuda_graphs import capture_on_all_ranks
from engine.graphs.warm_up import warm_up_batches
from engine.memory.estimates import count_slots, saturating_tokens, select_context, sink_window
from engine.parallel.leader import Launch, RankLeader
from engine.parallel.model_part import ModelPart
from engine.parallel.next_weights import NextWeights, apply_weights, prepare_weights
from engine.parallel.shard import Shard
from engine.parallel.step_codec import BroadcastStep
from engine.sampling.grammar.masks import MaskThread, PendingMasks
from engine.sampling.prompt_logprobs import score_prompts
from engine.sampling.row_params import SamplingRows
from engine.sampling.sampler import sample, sample_rows, warm_up_sampling
from engine.step.batch import (
    Batch,
    Forward,
    ForwardOutput,
    HostBatch,
    add_windowed_parts,
    build_host_batch,
    to_device,
)
from engine.step.compute import (
    ForwardedStep,
    PreparedStep,
    SampledTokens,
    StepDevice,
    compute,
    compute_discarded,
    forward_step,
    prepare_step,
    sample_forwarded,
)
from engine.step.job_thread import JobThread, use_device
from engine.step.prompt_stream import PromptStream
from engine.step.sequence import SampledToken, ScheduledSequence, StepOutput
from engine.step.sequence import Sequence as EngineSequence
from engine.weights.broadcast.receive import receive_weights
from engine.weights.broadcast.staged import StagedWeights
from penstock.client.broadcast.manifest import BroadcastMember, WeightsBroadcast
from penstock.config import EngineConfig, LoadedWeightsConfig
from penstock.errors import CheckpointError, ConfigError, InternalError
from penstock.kv.events import KvEventLog
from penstock.text.grammars import GrammarCompiler
from penstock.types import PageId

log = logging.getLogger(__name__)


class Engine:
    """Created by `load`."""

    def __init__(
        self,
        part: ModelPart,
        kv_pages: torch.Tensor,
        cache: PrefixCache,
        ranks: RankLeader | None,
        window_kv: torch.Tensor | None = None,
    ) -> None:
        """`kv_pages` is `layout.shape`, contiguous. `ranks` commands the other ranks of a split model. `window_kv` has
        the windowed layers' parts of pages, by slot (`WindowParts`), if pages have two parts; `layout` is then that of
        the other part.
        """
        self.model = part.model
        self.layout = part.layout.full_part
        self.kv_pages = kv_pages
        self.window_kv = window_kv
        self.pool = cache.pool
        self.prefix_cache = cache
        self.runner = part.make_runner(kv_pages, window_kv)
        self.ranks = ranks
        # True if a decode step is given to the device before the previous steps are over.
        self.runs_ahead = kv_pages.is_cuda if part.config.run_ahead is None else part.config.run_ahead
        self.max_context = select_context(part.config, part.model)  # tokens that a sequence may have
        self.grammars = GrammarCompiler(part.config.model, part.model.vocab_size, part.model.eos_token_ids)
        self._masks = MaskThread(part.model.vocab_size)
        self._graphs = part.make_graphs(self.runner, self.pool.num_pages)
        self._part = part
        self._prompt_stream: PromptStream | None = None
        self._next_weights: NextWeights | None = None
        self._staged: StagedWeights | None = None  # received and not in use yet
        self._group = part.group
        self.adapters = None if part.adapters is None else EngineAdapters(part.adapters, ranks)
        # Captures graphs and launches steps, so that what libraries keep for a thread lives as long as the graphs.
        self.device_thread = JobThread("device", part.device) if kv_pages.is_cuda else None

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        on_progress: Callable[[float], None] = lambda _: None,
        on_event: KvEventLog | None = None,
        launch: Launch | None = None,
        *,
        has_prompt_stream: bool = False,
    ) -> Engine:
        """Reads the checkpoint and allocates the page pool. Blocks.

        `on_progress` receives the fraction of weights read. `launch` starts the processes of the other ranks, if
        `config` asks for any. `has_prompt_stream` leaves memory for `open_prompt_stream`. Raises CheckpointError for a
        folder that cannot be served, ConfigError for settings that cannot work.
        """
        ranks = None
        if config.tensor_parallel > 1:
            if launch is None:
                raise ConfigError(f"engine.tensor_parallel = {config.tensor_parallel} needs processes: give a launch")
            ranks = RankLeader(config, launch)
        try:
            return cls._load(config, ranks, on_progress, on_event if config.kv_events else None, has_prompt_stream)
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise

    @classmethod
    def _load(
        cls,
        config: EngineConfig,
        ranks: RankLeader | None,
        on_progress: Callable[[float], None],
        on_event: KvEventLog | None,
        has_prompt_stream: bool,
    ) -> Engine:
        if ranks is None:
            part = ModelPart.load(config, on_progress=on_progress)
            num_pages = part.count_pages(has_prompt_stream=has_prompt_stream)
        else:
            answers = ranks.begin_load()
            part = ModelPart.load(config, Shard.of(config, 0), ranks.join_group, on_progress)
            num_pages = min(part.count_pages(), *ranks.wait(answers))
            ranks.call_all("pool", num_pages)
        kv_pages, window_kv, parts = part.make_pool(num_pages), None, None
        if part.layout.window_layers:
            window_kv = part.make_window_pool(count_slots(config, num_pages))
            window = PageWindow(part.model.widest_window, config.page_size)
            on_free_slots = _make_eraser(window_kv, ranks) if config.zero_freed_pages else None
            parts = WindowParts(num_pages, len(window_kv), window, on_free_slots)
        cache = PrefixCache(
            num_pages,
            config.page_size,
            on_event,
            config.prefix_caching,
            tiers=make_tiers(config, kv_pages, part.layout.page_bytes, ranks),
            window=part.model.page_window,
            on_free=_make_eraser(kv_pages, ranks) if config.zero_freed_pages else None,
            retention=config.retention,
            parts=parts,
            sinks=sink_window(config, part.model),
        )
        engine = cls(part, kv_pages, cache, ranks, window_kv)
        _log_loaded(engine, part)
        return engine

    @property
    def num_ranks(self) -> int:
        return 1 if self.ranks is None else self.ranks.num_ranks

    @property
    def model_layout(self) -> KVLayout:
        """The layout of the pages of all ranks together, which identifies a worker; `layout` is rank 0's own."""
        return replace(self.layout, head_range=None, layer_range=None)

    @property
    def _slot_of_P(self) -> np.ndarray | None:
        return None if self.pool.parts is None else self.pool.parts.slot_of_P

    @property
    def weights_version(self) -> int:
        return self._part.config.weights_version

    @property
    def weights_folder(self) -> str:
        """Returns the folder of the weights in force."""
        return self._part.config.weights_folder

    def receive_weights(self, broadcast: WeightsBroadcast, member: BroadcastMember) -> None:
        """Receives weights into host memory; `prepare_weights` reads them there. Blocks; steps may run meanwhile.

        Raises as `engine.weights.broadcast.receive.receive_weights`.
        """
        self.discard_weights()
        self._staged = receive_weights(self._part.model, broadcast, member)

    def prepare_weights(self, weights: LoadedWeightsConfig) -> None:
        """Checks weights on all ranks, replacing any that were prepared before. Blocks; steps may run meanwhile.

        Raises CheckpointError if they do not fit the model; the weights in use stay.
        """
        self._next_weights = None
        staged = self._staged.folder_of(weights.digest) if self._staged is not None else None
        body = {"weights": weights.model_dump(), "staged": str(staged or "")}
        answers = self.ranks.start_call("prepare_weights", body) if self.ranks is not None else []
        try:
            prepared = prepare_weights(self._part, weights, staged)
        finally:
            if self.ranks is not None:
                self.ranks.wait(answers)
        self._next_weights = prepared
        if prepared.decoder is not None:
            self._free_staged()

    def discard_weights(self) -> None:
        """Frees what `receive_weights` and `prepare_weights` have read."""
        self._next_weights = None
        self._free_staged()

    def _free_staged(self) -> None:
        if self._staged is not None:
            self._staged.close()
            self._staged = None

    def apply_weights(self) -> None:
        """Switches to the prepared weights on all ranks, and forgets every cached page. Blocks.

        No step may run meanwhile, and no page be referenced. After an error the engine is useless.
        """
        assert self._next_weights is not None, "prepare first"
        prepared, self._next_weights = self._next_weights, None
        answers = self.ranks.start_call("apply_weights") if self.ranks is not None else []
        self._part = apply_weights(self._part, prepared)
        if self.ranks is not None:
            self.ranks.wait(answers)
        self._free_staged()
        self.runner.use(self._part.decoder)
        if self._prompt_stream is not None:
            self._prompt_stream.use(self._part.decoder)
        self.layout = self._part.layout.full_part
        self.prefix_cache.clear()

    def when_lost(self, on_lost: Callable[[BaseException], None]) -> None:
        """Calls `on_lost`, on any thread, when another rank is lost; no step succeeds after that."""
        if self.ranks is not None:
            self.ranks.when_lost(on_lost)

    def close(self) -> None:
        """Ends the engine's threads, and the other ranks if there are any."""
        self.discard_weights()
        self._masks.close()
        if self._prompt_stream is not None:
            self._prompt_stream.close()
        if self.device_thread is not None:
            self.device_thread.close()
        if self.ranks is not None:
            self.ranks.close()

    @property
    def saturating_tokens(self) -> int:
        """See `engine.memory.estimates.saturating_tokens`.

        Longer steps gain nothing and delay the first token of every prompt that ends inside them.
        """
        return saturating_tokens("cuda" if self.kv_pages.is_cuda else "cpu")

    def step(self, work: Sequence[ScheduledSequence], on_layer: Callable[[int], None] | None = None) -> StepOutput:
        """Computes one forward over a mixed batch of chunks and decodes, and samples wherever a text ends. Blocks.

        `on_layer(n)` is called when the batch's KV of the first n layers is in the pages or, on a GPU, will be once the
        work given to the current stream so far is done.
        """
        if not work:
            return StepOutput(())
        use_device(self.kv_pages.device)
        host = build_host_batch(work, self.layout.page_size, self._slot_of_P, self.prefix_cache.sinks)
        places = host.sampled_places.tolist()
        pending = self._masks.prepare([work[place].sequence for place in places])
        tokens: list[SampledToken | None] = [None] * len(work)
        with pending or contextlib.nullcontext():
            logits_RV = self._forward(host, on_layer, pending)
            scores = {} if host.scored is None else score_prompts(logits_RV[len(places) :], host.scored)
        if places:
            rows, ends = [work[place] for place in places], self.model.eos_token_ids
            sampled = sample(logits_RV[: len(places)], rows, ends, pending.wait() if pending else None)
            for place, token in zip(places, sampled, strict=True):
                tokens[place] = token
        return StepOutput(tuple(tokens), scores)

    def sample_rows(self, host: HostBatch, rows: SamplingRows) -> np.ndarray:
        """Computes a laid-out batch and returns the token of each of its sampled rows, without edits. Blocks.

        Raises InternalError if a distribution was not finite.
        """
        use_device(self.kv_pages.device)
        token_ids_R, valid_R = sample_rows(self._forward(host), rows)
        if not bool(valid_R.all()):
            raise InternalError("the logits are not finite")
        return token_ids_R.cpu().numpy()

    def _forward(
        self,
        host: HostBatch,
        on_layer: Callable[[int], None] | None = None,
        pending: PendingMasks | None = None,
    ) -> torch.Tensor:
        """Returns the logits of a step that is not replayed from a graph, and starts on the masks meanwhile."""
        if self.ranks is not None:
            self.ranks.announce(BroadcastStep(host))
        with self._explaining_failures():
            forward: Forward = partial(self.runner.run, on_layer=on_layer)
            if pending is not None:
                forward = self._masks.beside(pending, forward)
            return forward(to_device(replace(host, taps=False), self.kv_pages.device)).logits_RV

    def prepare(self, work: Sequence[ScheduledSequence]) -> PreparedStep:
        """Returns all that `compute` needs of a step that is not empty; the sequences may change afterwards."""
        taps_last, model = self.runner.taps_last, self.model
        page_size, slot_of_P, sinks = self.layout.page_size, self._slot_of_P, self.prefix_cache.sinks
        return prepare_step(work, page_size, model.vocab_size, model.eos_token_ids, taps_last, slot_of_P, sinks)

    def announce(self, step: PreparedStep) -> None:
        """Lets other ranks start on a step as soon as they can.

        Every step is announced before it is computed, and every announced step is computed in that order, even if its
        outcome is discarded.
        """
        if self.ranks is not None:
            self.ranks.announce(BroadcastStep(step.host, step.awaited_rows, may_replay=True))

    def compute(self, step: PreparedStep, previous: SampledTokens | None = None) -> SampledTokens:
        """Gives the device a step; on a GPU it returns before the device is done. Call it from one thread at a time.

        `previous` is the step whose tokens this one awaits.
        """
        use_device(self.kv_pages.device)
        with self._explaining_failures():
            return compute(step, self._replay, self._group, self._replay_device, previous, self._masks)

    def forward_ahead(self, step: PreparedStep, previous: SampledTokens | None) -> ForwardedStep:
        """Gives the device a step up to its logits; `sample_ahead` follows once the tokens of `previous` are known."""
        use_device(self.kv_pages.device)
        with self._explaining_failures():
            return forward_step(step, self._replay, self._group, self._replay_device, previous)

    def sample_ahead(
        self, step: PreparedStep, forwarded: ForwardedStep, discarded: Collection[EngineSequence]
    ) -> SampledTokens:
        """Samples a step that `forward_ahead` began before the host knew the text that its grammars need."""
        use_device(self.kv_pages.device)
        return sample_forwarded(step, forwarded, self._masks, discarded)

    def launch(self, work: Sequence[ScheduledSequence], on_layer: Callable[[int], None] | None = None) -> SampledTokens:
        """Computes a step like `step`, but on a GPU returns before it is done."""
        use_device(self.kv_pages.device)
        step = self.prepare(work)
        if self.ranks is not None:
            self.ranks.announce(BroadcastStep(step.host))
        with self._explaining_failures():
            forward = partial(self.runner.run, on_layer=on_layer)
            return compute(step, forward, self._group, StepDevice(self.kv_pages.device), masks=self._masks)

    def compute_discarded(self, step: PreparedStep) -> None:
        """Computes a step that awaits a failed one, because other ranks compute it too; does nothing without other
        ranks.
        """
        if self.ranks is not None:
            use_device(self.kv_pages.device)
            with self._explaining_failures():
                compute_discarded(step, self._replay, self._group, self._replay_device)

    @property
    def _replay_device(self) -> StepDevice:
        return StepDevice(self.kv_pages.device, None if self._graphs is None else self._graphs.tables)

    def _replay(self, batch: Batch, *, on_start: Callable[[], None] | None = None) -> ForwardOutput:
        forward: Forward = self.runner.run if self._graphs is None else self._graphs.forward
        return forward(batch, on_start=on_start)

    def _explaining_failures(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.ranks is None else self.ranks.explaining_failures()

    def capture_graphs(
        self, on_progress: Callable[[int, int], None] = lambda done, of: None, max_sequences: int | None = None
    ) -> None:
        """Captures decode steps of up to `max_sequences`, so that from now on they are replayed where possible.

        Blocks for seconds the first time. `on_progress` receives, on any thread, the number of batch sizes done and
        their total.
        """
        if self._graphs is not None and not self._graphs.is_captured:
            capture = partial(capture_on_all_ranks, self._graphs, self.ranks, on_progress, max_sequences)
            capture() if self.device_thread is None else self.device_thread.run(capture)

    def open_prompt_stream(self, sm_share: float) -> PromptStream:
        """Returns the stream that computes prompts beside decode steps, on a GPU with this share of its SMs. The engine
        keeps it; later calls return the same. Blocks until it has computed a first step. Raises ConfigError.
        """
        if self._prompt_stream is None:
            runner = self._part.make_second_runner(self.kv_pages, self.window_kv)
            stream = PromptStream(runner, self.kv_pages.device, self.model.vocab_size, sm_share)
            with self._warm_up_batches(0) as batches:
                stream.warm_up(batches)
            self._prompt_stream = stream
        return self._prompt_stream

    @contextlib.contextmanager
    def _warm_up_batches(self, most_tokens: int) -> Iterator[Iterator[HostBatch]]:
        """Yields the steps of `warm_up_batches` over a page that is allocated meanwhile."""
        pages = self.pool.allocate(1)
        windowed = [] if self.pool.parts is None else pages
        try:
            if self.pool.parts is not None:
                self.pool.parts.attach(pages)
            batches = warm_up_batches(pages[0], self.layout.page_size, self.max_context, most_tokens)
            yield (add_windowed_parts(batch, self._slot_of_P) for batch in batches)
        finally:
            self.pool.release(pages, windowed)

    def warm_up(self, *, for_grammars: bool = True) -> None:
        """Computes one step of each kind that kernels are compiled for, so that no request waits for a compiler, and
        builds what the first grammar needs.

        Blocks; for half a minute if kernels have to be compiled and no cache has them.
        """
        started_s = time.monotonic()
        use_device(self.kv_pages.device)
        if for_grammars:
            self._prepare_grammars()
        most_tokens = self.saturating_tokens if self.runner.compiles else 0
        with self._warm_up_batches(most_tokens) as batches:
            for batch in batches:
                logits_1V = self._forward(batch)
                if self.adapters is not None and self.runner.compiles:
                    self._forward(replace(batch, adapter_T=np.ones_like(batch.token_ids_T)))
            warm_up_sampling(logits_1V)
            if self.kv_pages.is_cuda:
                torch.cuda.synchronize(self.kv_pages.device)
        if self.runner.compiles:
            log.info("compiled the kernels of every kind of step in %.1f s", time.monotonic() - started_s)
        if self.ranks is not None:
            self.ranks.set_ready()

    def _prepare_grammars(self) -> None:
        try:
            self.grammars.prepare()
        except CheckpointError as error:  # the tokenizer supports no grammars; everything else is served
            log.warning("structured output will be refused: %s", error.message)


def _make_eraser(kv_pages: torch.Tensor, ranks: RankLeader | None) -> Callable[[Sequence[PageId]], None]:
    if ranks is None:
        return partial(zero_pages, kv_pages)
    return partial(zero_on_all_ranks, kv_pages, ranks)


def _log_loaded(engine: Engine, part: ModelPart) -> None:
    layout = engine.layout
    log.info(
        "loaded %s: %d pages%s, %s, KV in %s, %s attention on %s%s",
        part.config.model,
        engine.pool.num_pages,
        f", {engine.pool.parts.num_slots} with windowed layers" if engine.pool.parts is not None else "",
        layout.dtype,
        layout.kv_dtype if layout.is_quantized else layout.dtype,
        part.attention.name,
        part.device,
        f", {engine.num_ranks} ranks" if engine.ranks is not None else "",
    )
    if part.model.num_prediction_layers:
        log.info(
            '%s has %d layers that predict further tokens (MTP); decode.draft_model = "mtp" drafts with the first one',
            part.config.model,
            part.model.num_prediction_layers,
        )
