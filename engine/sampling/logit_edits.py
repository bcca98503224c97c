"""Applies the changes that a request asks for to a row of logits before temperature: bias, penalties, bans.

Called by `engine.sampling.sampler` on its own fp32 copy of the rows that need it, never on the model's output. A row
that asks for nothing costs nothing. `engine.sampling.row_edits` has laid out the edits as cells; each kind is one
indexed operation, so the cost does not grow with the vocabulary, and the host waits for nothing. Tokens that the
previous step has sampled and that the host does not know yet are counted here.

Order: logit bias, repetition penalty, presence and frequency penalties, bans, and finally the allowed tokens: all
others are banned. Masks of grammars follow (`engine.sampling.grammar.masks`). Shapes: `E` edited rows, `V` vocabulary,
`C` cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.kernels.upload import upload_all
from engine.sampling.row_edits import Cells, RowEdits

_NONE = np.zeros(0, np.int64)


def edit_logits(logits_EV: torch.Tensor, edits: RowEdits, awaited: torch.Tensor | None = None) -> None:
    """Applies the edits in place. `logits_EV` is fp32 and contiguous; row i belongs to `edits.index_E[i]`.

    Repetition penalty over prompt and output, dividing positive and multiplying negative logits (Keskar et al. 2019,
    "CTRL", as transformers has it); presence and frequency penalties over only the output (OpenAI's definition).
    `awaited` are the step's awaited tokens, int64 on the device, required if `edits` name any.
    """
    device = logits_EV.device
    penalties_3E = np.zeros((3, 0)) if edits.penalties_3E is None else edits.penalties_3E
    awaited_E = _NONE if edits.awaited_E is None else edits.awaited_E
    cells = [column for kind in (edits.bias, edits.seen, edits.banned, edits.allowed) for column in _columns(kind)]
    columns = upload_all((penalties_3E, awaited_E, edits.allowed_rows, *cells), device)
    penalty_3E, place_E, allowed_rows = columns[:3]
    bias, seen, banned, allowed = (columns[start : start + 3] for start in range(3, 15, 3))
    last_E = None
    if edits.awaited_E is not None:
        assert awaited is not None
        last_E = torch.where(place_E < 0, -1, awaited.index_select(0, place_E.clamp(min=0)))
    if edits.bias is not None:
        _add(logits_EV, *bias)
    if edits.penalties_3E is not None:
        _penalize(logits_EV, penalty_3E, seen, last_E)
    if edits.banned is not None:
        rows_C, tokens_C, condition_C = banned
        holds_C = condition_C < 0
        if last_E is not None:
            holds_C |= condition_C == last_E.index_select(0, rows_C)
        _add(logits_EV, rows_C, tokens_C, torch.where(holds_C, float("-inf"), 0.0))
    if len(edits.allowed_rows):
        _keep(logits_EV, allowed_rows, *allowed[:2])


def _columns(cells: Cells | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (_NONE, _NONE, _NONE) if cells is None else (cells.rows_C, cells.tokens_C, cells.values_C)


def _add(logits_EV: torch.Tensor, rows_C: torch.Tensor, tokens_C: torch.Tensor, values_C: torch.Tensor) -> None:
    """Adds to cells, which may repeat if what is added is 0 or minus infinity."""
    logits_EV.view(-1).scatter_add_(0, rows_C * logits_EV.shape[1] + tokens_C, values_C)


def _penalize(
    logits_EV: torch.Tensor,
    penalty_3E: torch.Tensor,
    seen: Sequence[torch.Tensor],
    last_E: torch.Tensor | None,
) -> None:
    """Applies all penalties to the seen tokens, and to the awaited ones as if they had been counted.

    `seen` are the rows, tokens and counts of distinct cells.
    """
    rows_C, tokens_C, count_C = seen
    flat = logits_EV.view(-1)
    if last_E is not None:
        is_last_C = (tokens_C == last_E.index_select(0, rows_C)).long()
        count_C = count_C + is_last_C
    place_C = rows_C * logits_EV.shape[1] + tokens_C
    flat[place_C] = _penalized(flat[place_C], penalty_3E.index_select(1, rows_C), count_C)
    if last_E is not None:  # tokens that are new to their text
        is_new_E = (last_E >= 0) & (torch.zeros_like(last_E).index_add_(0, rows_C, is_last_C) == 0)
        place_E = torch.arange(len(last_E), device=flat.device) * logits_EV.shape[1] + last_E.clamp(min=0)
        score_E = flat[place_E]
        penalized_E = _penalized(score_E, penalty_3E, torch.ones_like(last_E))
        flat[place_E] = torch.where(is_new_E, penalized_E, score_E)


def _penalized(score_C: torch.Tensor, penalty_3C: torch.Tensor, count_C: torch.Tensor) -> torch.Tensor:
    """Returns the scores of tokens that are in the prompt, or `count` times in the output."""
    repetition_C, presence_C, frequency_C = penalty_3C
    repetition_C = repetition_C.float()
    score_C = torch.where(score_C < 0, score_C * repetition_C, score_C / repetition_C)
    subtracted_C = torch.where(count_C > 0, presence_C + frequency_C * count_C, 0.0)
    return score_C - subtracted_C.float()


def _keep(logits_EV: torch.Tensor, rows: torch.Tensor, rows_C: torch.Tensor, tokens_C: torch.Tensor) -> None:
    """Bans every token of these rows but those of the cells."""
    scores_C = logits_EV[rows_C, tokens_C]
    logits_EV.index_fill_(0, rows, float("-inf"))
    logits_EV[rows_C, tokens_C] = scores_C
