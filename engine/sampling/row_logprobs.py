"""Computes the log-probabilities of sampled tokens and of the likeliest ones, before penalties and temperature.

`RowLogprobs` is computed after sampling, on the logits' device; `engine.step.compute` copies it to the host with the
tokens and converts it to what requests receive.

Shapes: `L` rows that ask for log-probabilities, `A` alternatives, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.upload import upload
from penstock.types import TokenLogprob

_CPU_CHUNK = 1 << 18  # logits scored at a time on a CPU: their exponentials stay in its cache
_BLOCK = 128  # neighbours in the vocabulary of which the largest is found first


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    rows_L: np.ndarray  # int64, row of logits
    num_top_L: np.ndarray  # int64, how many alternatives the row asks for
    own_L: torch.Tensor  # float32, log-probability of the sampled token
    top_ids_LA: torch.Tensor  # int64, likeliest first
    top_LA: torch.Tensor  # float32

    @classmethod
    def of(cls, logits_RV: torch.Tensor, token_ids_R: torch.Tensor, num_top_R: np.ndarray) -> RowLogprobs:
        """Returns the log-probabilities of the rows that ask for 0 or more alternatives. Never waits for a GPU."""
        rows_L = np.flatnonzero(num_top_R >= 0)
        logits_LV, chosen_L1 = logits_RV, token_ids_R[:, None]
        if len(rows_L) < len(num_top_R):
            index_L = upload(rows_L, logits_RV.device)
            logits_LV, chosen_L1 = logits_RV.index_select(0, index_L), chosen_L1.index_select(0, index_L)
        num_top_L = num_top_R[rows_L]
        count = min(int(num_top_L.max()), logits_LV.shape[1])
        step = len(rows_L)
        if logits_RV.device.type == "cpu":
            step = max(1, _CPU_CHUNK // logits_LV.shape[1])
        pieces = [slice(start, start + step) for start in range(0, len(rows_L), step)]
        parts = [_score(logits_LV[piece], chosen_L1[piece], count) for piece in pieces]
        own_L, top_ids_LA, top_LA = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return cls(rows_L, num_top_L, own_L, top_ids_LA, top_LA)

    def on_host(self, copy: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu) -> RowLogprobs:
        """Returns the same data copied by `copy`, which may return before the copy is done."""
        return RowLogprobs(self.rows_L, self.num_top_L, copy(self.own_L), copy(self.top_ids_LA), copy(self.top_LA))

    def by_row(self, token_ids: Seq[int] | np.ndarray) -> dict[int, TokenLogprob]:
        """Returns the rows' log-probabilities; `token_ids` are the sampled tokens of all rows."""
        columns = zip(
            self.rows_L.tolist(),
            self.num_top_L.tolist(),
            self.own_L.tolist(),
            self.top_ids_LA.tolist(),
            self.top_LA.tolist(),
            strict=True,
        )
        return {
            row: TokenLogprob(int(token_ids[row]), own, tuple(zip(ids[:num_top], top, strict=False)))
            for row, num_top, own, ids, top in columns
        }


def _score(
    logits_LV: torch.Tensor, chosen_L1: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the log-probabilities of the chosen tokens, and the ids and log-probabilities of the likeliest ones."""
    logits_LV = logits_LV.float()
    total_L1 = logits_LV.logsumexp(-1, keepdim=True)
    top_LA, top_ids_LA = _likeliest(logits_LV, count)
    return (logits_LV.gather(1, chosen_L1) - total_L1)[:, 0], top_ids_LA, top_LA - total_L1


def _likeliest(logits_LV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the largest logits of each row, descending, and their tokens.

    On a CPU a floor is found first: `count` blocks of the vocabulary have a token that reaches it, and few tokens do.
    That takes a quarter of the time of `topk`, and puts equals in the order of the vocabulary.
    """
    num_rows, vocab_size = logits_LV.shape
    num_blocks = vocab_size // _BLOCK
    if logits_LV.device.type != "cpu" or not 0 < count < num_blocks:
        return logits_LV.topk(count, dim=-1)
    logits = logits_LV.numpy()
    peaks_LX = logits[:, : num_blocks * _BLOCK].reshape(num_rows, num_blocks, _BLOCK).max(-1)
    if np.isnan(peaks_LX).any():
        return logits_LV.topk(count, dim=-1)
    floor_L = np.partition(peaks_LX, -count, axis=-1)[:, -count]
    rows_C, tokens_C = np.divmod(np.flatnonzero(logits >= floor_L[:, None]), vocab_size)
    order_C = np.lexsort((tokens_C, -logits[rows_C, tokens_C], rows_C))
    first_L = np.searchsorted(rows_C, np.arange(num_rows))
    tokens_LA = tokens_C[order_C[first_L[:, None] + np.arange(count)]]
    return torch.from_numpy(np.take_along_axis(logits, tokens_LA, axis=1)), torch.from_numpy(tokens_LA)
