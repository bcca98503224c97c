"""Replays decode steps from CUDA graphs, one per batch size: the host makes one launch instead of hundreds.

It sits between `Engine.compute` and the model runner, and takes steps in which every sequence has one token. All other
steps, and batches above the largest bucket, go to the model runner unchanged. A batch is padded to the next bucket;
padding computes token 0 at position 0 in a page that the pool does not know (`SPARE_PAGES`), so it reads and writes
nothing of any sequence. Graphs read page tables where steps have put them (`PageTables`), and tokens and positions from
buffers that they were captured over; everything derived from these is computed inside the graph, on the device. Only an
attention library that plans on the host (`DecodePlanner`) does so before each replay, from the lengths of the batch. A
step whose tables did not fit goes to the model runner. All graphs share one memory pool and one buffer of logits, so
only one runs at a time, and its logits are sampled before the next one runs. With a separate buffer, each graph would
keep a row of the vocabulary for every sequence of its bucket.

Decode steps are captured on every rank of a replica or on none, size by size: the ranks add up their results in
captured steps as in all others, so whether a step is replayed must not differ between them.

Shapes: `B` sequences of a bucket, `W` pages of a sequence, `V` vocabulary.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from engine.graphs.page_tables import PageTables
from engine.kernels.attention_interface import AttentionMetadata, Lengths
from engine.kernels.libraries.attention import DecodePlanner
from engine.parallel.leader import RankLeader
from engine.step.batch import Batch, Forward, ForwardOutput

log = logging.getLogger(__name__)

SPARE_PAGES = 1  # behind the pages of the pool, for padding to write to


def buckets_up_to(largest: int) -> list[int]:
    """Returns the batch sizes to capture, up to `largest`.

    Padding costs up to half of a batch below 8 sequences, where a step reads little but weights, and less than a
    quarter above.
    """
    small = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 1, 32)]
    return [*(size for size in small if size < largest), largest]


class Capture(Protocol):
    """Implemented by `CudaCapture`, and by a double in tests."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Captures `run` and returns a function that replays it over the same memory."""
        ...


class CudaCapture:
    """Captures graphs that share one pool of memory, on one stream: libraries keep a workspace for each stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # compiles and tunes kernels, which must not happen while a graph is captured
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Calls that other threads make meanwhile, such as NCCL's watchdog, must not invalidate the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


class GraphRunner:
    """Owns the graphs and the buffers that they read and write."""

    def __init__(
        self,
        forward: Forward,
        buckets: Sequence[int],
        max_context: int,
        page_size: int,
        spare_page: int,
        device: torch.device,
        has_adapters: bool = False,
        planner: DecodePlanner | None = None,
    ) -> None:
        """`forward` is the model runner's, which takes all other batches. No sequence ever has `spare_page`. With
        `has_adapters` each size is captured a second time, for batches in which a sequence has one. `planner` plans
        what attention computes before each replay."""
        self._forward = forward
        self._planner = planner
        self._buckets = sorted(buckets)
        self._max_context = max_context
        self._page_size = page_size
        largest, num_pages = self._buckets[-1], -(-max_context // page_size)
        self.tables = PageTables(largest, num_pages, spare_page, device)
        self._token_ids_B = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions_B = torch.zeros(largest, dtype=torch.int64, device=device)
        self._adapter_B = torch.zeros(largest, dtype=torch.int64, device=device) if has_adapters else None
        self._logits_BV: torch.Tensor  # for the largest captured size; allocated by the first capture
        self._states_BX: torch.Tensor | None = None  # hidden states, likewise; None if no layer is tapped
        self._capture: Capture
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}  # by size, and whether sequences have adapters
        self._num_written = 0  # rows of the buffers that the latest replay has written
        self.num_replays = 0
        self.num_eager = 0

    @property
    def is_captured(self) -> bool:
        return bool(self._graphs)

    def sizes(self, max_sequences: int | None = None) -> list[int]:
        """Returns the sizes to capture for batches of up to `max_sequences`, largest first.

        In this order the smaller ones fit into the memory of the largest.
        """
        largest = next((size for size in self._buckets if size >= (max_sequences or self._buckets[-1])), None)
        return [size for size in reversed(self._buckets) if largest is None or size <= largest]

    @torch.inference_mode()
    def capture(self, size: int, make_capture: Callable[[], Capture]) -> None:
        """Captures one of `sizes`, to be called in their order. Blocks. Raises RuntimeError if CUDA refuses."""
        is_first = not self._graphs
        if is_first:
            self.tables.clear()
        self._plan(size, None)
        if is_first:
            largest = self._compute(size, adapted=False)
            self._logits_BV = torch.empty_like(largest.logits_RV)
            self._states_BX = None if largest.states_TX is None else torch.empty_like(largest.states_TX)
            self._capture = make_capture()
        for adapted in (False, True) if self._adapter_B is not None else (False,):
            self._graphs[size, adapted] = self._capture(functools.partial(self._run, size, adapted))

    def drop(self) -> None:
        """Drops all graphs; every step then goes to the model runner."""
        self._graphs.clear()

    @torch.inference_mode()
    def forward(self, batch: Batch, *, on_start: Callable[[], None] | None = None) -> ForwardOutput:
        """Returns logits, of which those of a replay are overwritten by the next one, and a copy of hidden states."""
        size, adapted = self._bucket_of(batch), batch.adapter_T is not None
        if size is None:
            self.num_eager += 1
            return self._forward(batch, on_start=on_start)
        count = batch.meta.num_sequences
        self._fill(batch, count)
        self._plan(size, batch.meta.lengths)
        if on_start is not None:
            on_start()
        self._graphs[size, adapted]()
        self.num_replays += 1
        states_BX = self._states_BX if batch.taps else None
        return ForwardOutput(self._logits_BV[:count], None if states_BX is None else states_BX[:count].clone())

    def _bucket_of(self, batch: Batch) -> int | None:
        meta = batch.meta
        if not batch.uses_tables:
            return None
        if not meta.num_sequences == meta.num_decodes == meta.num_tokens == len(batch.sampled_places):
            return None
        if meta.max_context_len > self._max_context:
            return None
        adapted = batch.adapter_T is not None
        return next(
            (size for size in self._buckets if size >= meta.num_sequences and (size, adapted) in self._graphs), None
        )

    def _fill(self, batch: Batch, count: int) -> None:
        """Copies a step's inputs into the buffers by one launch, and clears what longer steps have left behind them."""
        buffers, columns = [self._token_ids_B, self._positions_B], [batch.token_ids_T, batch.positions_T]
        if self._adapter_B is not None:
            buffers.append(self._adapter_B)
            columns += [] if batch.adapter_T is None else [batch.adapter_T]
        torch._foreach_copy_([buffer[:count] for buffer in buffers[: len(columns)]], columns)
        if count < self._num_written:
            torch._foreach_zero_([buffer[count : self._num_written] for buffer in buffers])
        self._num_written = count

    def _plan(self, size: int, lengths: Lengths | None) -> None:
        """Plans the attention of a bucket. Padding has a context of one token; without `lengths`, every row has."""
        if self._planner is None:
            return
        context_B = np.ones(size, np.int64)
        if lengths is not None:
            context_B[: len(lengths.context_B)] = lengths.context_B
        self._planner.plan_decodes(self.tables.pages_RW[:size], context_B, self._page_size)

    def _run(self, size: int, adapted: bool) -> None:
        """Computes one captured step, which may depend only on the buffers and the bucket."""
        output = self._compute(size, adapted=adapted)
        self._logits_BV[:size].copy_(output.logits_RV)
        if self._states_BX is not None and output.states_TX is not None:
            self._states_BX[:size].copy_(output.states_TX)

    def _compute(self, size: int, *, adapted: bool) -> ForwardOutput:
        positions_B, table_BW = self._positions_B[:size], self.tables.pages_RW[:size]
        rows_B = torch.arange(size, device=positions_B.device)
        page_B = table_BW.gather(1, (positions_B // self._page_size)[:, None])[:, 0]
        meta = AttentionMetadata(
            page_table_BP=table_BW,
            query_start_B1=torch.arange(size + 1, dtype=torch.int32, device=positions_B.device),
            context_lens_B=(positions_B + 1).to(torch.int32),
            max_query_len=1,
            max_context_len=self._max_context,
            num_decodes=size,
            slot_page_T=page_B.to(torch.int64),
            slot_offset_T=positions_B % self._page_size,
        )
        adapter_B = self._adapter_B[:size] if adapted and self._adapter_B is not None else None
        return self._forward(Batch(self._token_ids_B[:size], positions_B, rows_B, tuple(range(size)), meta, adapter_B))


def capture_on_all_ranks(
    graphs: GraphRunner,
    ranks: RankLeader | None,
    on_progress: Callable[[int, int], None],
    max_sequences: int | None = None,
) -> None:
    """Captures every size on every rank, or on none if a rank's device refuses. Blocks. Raises RankFailure.

    `on_progress` receives the number of sizes done and their total.
    """
    started_s, sizes = time.monotonic(), graphs.sizes(max_sequences)
    for count, size in enumerate(sizes, start=1):
        answers = [] if ranks is None else ranks.start_call("capture", size)
        problems = [_capture(graphs, size), *([] if ranks is None else ranks.wait(answers))]
        if any(problems):
            graphs.drop()
            if ranks is not None:
                ranks.call_all("drop_graphs")
            log.warning("decode steps are not captured: %s", next(filter(None, problems)))
            return
        on_progress(count, len(sizes))
    log.info("captured decode steps of up to %d in %.1f s", sizes[0], time.monotonic() - started_s)


def _capture(graphs: GraphRunner, size: int) -> str:
    """Returns CUDA's error message, or an empty string."""
    try:
        graphs.capture(size, CudaCapture)
    except RuntimeError as error:
        return str(error) or repr(error)
    return ""


class GraphOwner(Protocol):
    """Implemented by `engine.parallel.worker_rank.WorkerRank`."""

    graphs: GraphRunner | None


def graph_handlers(owner: GraphOwner) -> Mapping[str, Callable[[Any], Any]]:
    """Returns the handlers by which another rank serves `capture_on_all_ranks`, by kind of message."""

    def capture(size: int) -> str:
        return "this rank has no graphs to capture" if owner.graphs is None else _capture(owner.graphs, size)

    def drop(_: None) -> None:
        if owner.graphs is not None:
            owner.graphs.drop()

    return {"capture": capture, "drop_graphs": drop}
