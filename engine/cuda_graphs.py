"""Decode steps replayed from CUDA graphs, one for each size of batch: the host launches one thing instead of hundreds.

Stands between `Engine.compute` and the model's runner, and takes steps in which every sequence has one token; all
others, and batches above the largest bucket, go to the runner as they stand. A batch is padded up to the next bucket.
Padding computes token 0 at position 0 in a page of its own, which the pool does not know (`SPARE_PAGES`), so it reads
and writes nothing of anybody's. A step's inputs are copied into buffers that the graphs were captured over; everything
that follows from token, position and page table is derived inside the graph, on the device. All graphs share one pool
of memory and one buffer of logits, hence one of them runs at a time, and the logits of one are gone with the next: they
are drawn from before. With a result of its own each graph would keep that many rows of the vocabulary for itself.

Shapes: `B` sequences of a bucket, `W` pages of a sequence, `V` vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.batch import Batch
from engine.kernels.metadata import AttentionMetadata

SPARE_PAGES = 1  # behind those of the pool, for padding to write to
Forward = Callable[[Batch], torch.Tensor]


def buckets_up_to(largest: int) -> list[int]:
    """Sizes of batches that graphs are captured for: padding costs up to a half below 8 sequences, where a step reads
    weights and little else, and less than a quarter above."""
    small = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 1, 32)]
    return [*(size for size in small if size < largest), largest]


class Capture(Protocol):
    """What CUDA does; `CudaCapture`, and a double in tests."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """A way to run it again over the same memory."""
        ...


class CudaCapture:
    """Graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            run()  # compiles and tunes kernels, which may not happen while a graph is captured
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # What other threads ask of CUDA meanwhile, such as NCCL's watch over its own calls, is none of the graph's.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay


class GraphRunner:
    """Owns the graphs and the buffers that they read."""

    def __init__(
        self,
        forward: Forward,
        buckets: Sequence[int],
        max_context: int,
        page_size: int,
        spare_page: int,
        device: torch.device,
    ) -> None:
        """`forward`: the runner's, which every other batch goes to. `spare_page`: one that no sequence ever has."""
        self._forward = forward
        self._buckets = sorted(buckets)
        self._max_context = max_context
        self._page_size = page_size
        self._spare_page = spare_page
        largest, num_pages = self._buckets[-1], -(-max_context // page_size)
        self._token_ids_B = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions_B = torch.zeros(largest, dtype=torch.int64, device=device)
        self._page_table_BW = torch.full((largest, num_pages), spare_page, dtype=torch.int32, device=device)
        self._logits_BV: torch.Tensor  # of the largest size that is captured, made by a first step
        self._capture: Capture
        self._graphs: dict[int, Callable[[], None]] = {}
        self.num_replays = 0
        self.num_eager = 0

    @property
    def is_captured(self) -> bool:
        return bool(self._graphs)

    def sizes(self, max_sequences: int | None = None) -> list[int]:
        """What there is to capture for batches of up to so many, the largest first: the others find room in its
        memory."""
        largest = next((size for size in self._buckets if size >= (max_sequences or self._buckets[-1])), None)
        return [size for size in reversed(self._buckets) if largest is None or size <= largest]

    @torch.inference_mode()
    def capture(self, size: int, make_capture: Callable[[], Capture]) -> None:
        """Blocks. Sizes of `sizes` in that order. Raises RuntimeError where CUDA refuses."""
        if not self._graphs:
            self._pad(0, self._buckets[-1])
            self._logits_BV = torch.empty_like(self._compute(size))
            self._capture = make_capture()
        self._graphs[size] = self._capture(functools.partial(self._run, size))

    def drop(self) -> None:
        """Steps go on as they would without graphs."""
        self._graphs.clear()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V]; those of a replay are overwritten by the next."""
        size = self._bucket_of(batch)
        if size is None:
            self.num_eager += 1
            return self._forward(batch)
        count, table_BW = batch.meta.num_sequences, batch.meta.page_table_BP
        self._token_ids_B[:count].copy_(batch.token_ids_T)
        self._positions_B[:count].copy_(batch.positions_T)
        self._page_table_BW[:count, : table_BW.shape[1]].copy_(table_BW)
        if count < size:
            self._pad(count, size)
        self._graphs[size]()
        self.num_replays += 1
        return self._logits_BV[:count]

    def _bucket_of(self, batch: Batch) -> int | None:
        meta = batch.meta
        if not meta.num_sequences == meta.num_decodes == meta.num_tokens == len(batch.drawing):
            return None
        if meta.max_context_len > self._max_context:
            return None
        return next((size for size in self._buckets if size >= meta.num_sequences and size in self._graphs), None)

    def _pad(self, first: int, stop: int) -> None:
        self._token_ids_B[first:stop] = 0
        self._positions_B[first:stop] = 0
        self._page_table_BW[first:stop, 0] = self._spare_page

    def _run(self, size: int) -> None:
        """What a graph holds: nothing in here may depend on anything but the buffers and the bucket."""
        self._logits_BV[:size].copy_(self._compute(size))

    def _compute(self, size: int) -> torch.Tensor:
        positions_B, table_BW = self._positions_B[:size], self._page_table_BW[:size]
        places_B = torch.arange(size, device=positions_B.device)
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
        return self._forward(Batch(self._token_ids_B[:size], positions_B, places_B, tuple(range(size)), meta))
