"""Log-probabilities of sampled tokens and of the likeliest ones, before penalties and temperature.

`RowLogprobs` is computed behind sampling, on the logits' device; `engine.step.compute` takes it to the host with the
tokens, where it becomes what a request is sent.

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


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    rows_L: np.ndarray  # int64, row of logits
    num_top_L: np.ndarray  # int64, how many alternatives the row asks for
    own_L: torch.Tensor  # float32, log-probability of the sampled token
    top_ids_LA: torch.Tensor  # int64, likeliest first
    top_LA: torch.Tensor  # float32

    @classmethod
    def of(cls, logits_RV: torch.Tensor, token_ids_R: torch.Tensor, num_top_R: np.ndarray) -> RowLogprobs:
        """Returns those of the rows with at least 0 alternatives. Never waits for a GPU."""
        rows_L = np.flatnonzero(num_top_R >= 0)
        logits_LV, chosen_L1 = logits_RV, token_ids_R[:, None]
        if len(rows_L) < len(num_top_R):
            index_L = upload(rows_L, logits_RV.device)
            logits_LV, chosen_L1 = logits_RV.index_select(0, index_L), chosen_L1.index_select(0, index_L)
        num_top_L = num_top_R[rows_L]
        logits_LV = logits_LV.float()
        total_L1 = logits_LV.logsumexp(-1, keepdim=True)
        top_LA, top_ids_LA = _likeliest(logits_LV, min(int(num_top_L.max()), logits_LV.shape[1]))
        own_L = (logits_LV.gather(1, chosen_L1) - total_L1)[:, 0]
        return cls(rows_L, num_top_L, own_L, top_ids_LA, top_LA - total_L1)

    def on_host(self, copy: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu) -> RowLogprobs:
        """Returns these copied by `copy`, which may return before the copy is done."""
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


def _likeliest(logits_LV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return logits_LV.topk(count, dim=-1)
