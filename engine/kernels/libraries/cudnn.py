"""Computes attention of long prompt chunks with cuDNN, through torch's `_scaled_dot_product_cudnn_attention`.

torch gives cuDNN no page table and no mask but the square causal one, and cuDNN builds a plan for each shape that it
meets, which takes the host up to some tenths of a second and is kept per thread. So a context is read in pieces of few
shapes: whole segments before the chunk, which every query sees, and one causal square of the rest and the chunk. Zeros
fill the square: before the queries, where the rest has none, and behind them. The results are joined by their
log-sum-exp. Short chunks, and layers whose window hides a part of the context, go to the fallback backend.

Shapes: `C` tokens of a piece of the context; otherwise those of `engine.kernels.attention_interface`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from engine.kernels.attention_interface import AttentionBackend, AttentionMetadata, select_sequences

_attend = torch.ops.aten._scaled_dot_product_cudnn_attention


@dataclass(frozen=True, slots=True)
class PieceShapes:
    """The shapes that cuDNN meets: at most 15 squares and 42 segments for chunks of up to 8192 tokens."""

    fewest_queries: int = 256  # of a chunk; below, filling a square up to a multiple of them wastes too much
    long_queries: int = 2048  # from here on, lengths are multiples of a half of this
    segments: tuple[int, ...] = (8192, 2048, 512)  # longest first; each a multiple of the next

    def padded(self, num_tokens: int) -> int:
        """Returns the length of the piece that holds `num_tokens`."""
        step = self.fewest_queries if num_tokens <= self.long_queries else self.long_queries // 2
        return -(-num_tokens // step) * step

    def segments_of(self, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Yields the first token of each whole segment and the token after its last."""
        start = 0
        for length in self.segments:
            while start + length <= num_tokens:
                yield start, start + length
                start += length


class CudnnAttention:
    """See `engine.kernels.libraries.attention.AttentionLibrary`."""

    takes_decodes = False
    planner = None

    def __init__(self, fallback: AttentionBackend, shapes: PieceShapes | None = None) -> None:
        self._fallback = fallback
        self._shapes = shapes or PieceShapes()

    def attend(
        self,
        q_TNH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        o_TNH: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        assert softcap is None, "refused by engine.kernels.libraries.capabilities"
        assert meta.lengths is not None, "chunks are not captured in CUDA graphs"
        start_B1, context_B = meta.lengths.query_start_B1.tolist(), meta.lengths.context_B.tolist()

        def is_long(place: int) -> bool:
            sees_all = window is None or context_B[place] <= window
            return sees_all and start_B1[place + 1] - start_B1[place] >= self._shapes.fewest_queries

        for long, group in groupby(range(len(context_B)), is_long):
            places = list(group)
            if not long:
                first, stop = places[0], places[-1] + 1
                rows = slice(start_B1[first], start_B1[stop])
                some = select_sequences(meta, first, stop, 0)
                o_TNH[rows] = self._fallback.paged_attention(q_TNH[rows], pool_layer, some, scale, window)
                continue
            for place in places:
                rows = slice(start_B1[place], start_B1[place + 1])
                pages_P = meta.page_table_BP[place]
                self._attend_sequence(q_TNH[rows], pool_layer, pages_P, context_B[place], o_TNH[rows], scale)

    def _attend_sequence(
        self,
        q_TNH: torch.Tensor,
        pool_layer: torch.Tensor,
        pages_P: torch.Tensor,
        context: int,
        o_TNH: torch.Tensor,
        scale: float,
    ) -> None:
        """Writes causal attention of the last tokens of a context into `o_TNH`."""
        num_queries, shortest = len(q_TNH), self._shapes.segments[-1]
        begin = (context - num_queries) // shortest * shortest  # of the square
        seen = context - begin
        length, first = self._shapes.padded(seen), seen - num_queries
        q_CNH = F.pad(q_TNH, (0, 0, 0, 0, first, length - seen))
        k_KCH, v_KCH = _gather(pool_layer, pages_P, begin, context, length)
        found_NCH, lse_NC = _attend_piece(q_CNH, k_KCH, v_KCH, scale, is_causal=True)
        found_NTH, lse_NT = found_NCH[:, first:seen], lse_NC[:, first:seen]
        if begin:
            queries_CNH = F.pad(q_TNH, (0, 0, 0, 0, 0, self._shapes.padded(num_queries) - num_queries))
        for start, stop in self._shapes.segments_of(begin):
            k_KCH, v_KCH = _gather(pool_layer, pages_P, start, stop, stop - start)
            more_NCH, more_lse_NC = _attend_piece(queries_CNH, k_KCH, v_KCH, scale, is_causal=False)
            more = more_NCH[:, :num_queries], more_lse_NC[:, :num_queries]
            found_NTH, lse_NT = join_by_lse(found_NTH, lse_NT, *more)
        o_TNH.copy_(found_NTH.transpose(0, 1))


def _attend_piece(
    q_CNH: torch.Tensor, k_KCH: torch.Tensor, v_KCH: torch.Tensor, scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention [N, C, H] and the natural logarithm of its sums of weights, float32 [N, C]."""
    query = q_CNH.transpose(0, 1)[None]
    found = _attend(query, k_KCH[None], v_KCH[None], None, True, 0.0, is_causal, False, scale=scale)
    return found[0][0], found[1][0, :, :, 0]


def _gather(
    pool_layer: torch.Tensor, pages_P: torch.Tensor, start: int, stop: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns copies of K and V of tokens `start` to `stop`, [K, C, H], with zeros up to `length`.

    `start` and `length` are multiples of the page size. Slots that nobody has written may hold NaN, which even a weight
    of zero would spread.
    """
    size = pool_layer.shape[3]
    pages_W = pages_P[start // size : -(-stop // size)]
    pages_W = F.pad(pages_W, (0, length // size - len(pages_W)))
    kv_2KCH = pool_layer.permute(1, 2, 0, 3, 4).index_select(2, pages_W).flatten(2, 3)
    kv_2KCH[:, :, stop - start :] = 0
    return kv_2KCH[0], kv_2KCH[1]


def join_by_lse(
    one_NTH: torch.Tensor, one_lse_NT: torch.Tensor, other_NTH: torch.Tensor, other_lse_NT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention over two parts of a context, in float32, and its log-sum-exp, from those of each part."""
    lse_NT = torch.logaddexp(one_lse_NT, other_lse_NT)
    one_NTH = one_NTH * (one_lse_NT - lse_NT).exp()[:, :, None]
    return one_NTH.addcmul(other_NTH, (other_lse_NT - lse_NT).exp()[:, :, None]), lse_NT
