"""Finds the log-probabilities of prompt tokens in the logits of the rows before them.

Called by `engine.step.compute` and `Engine.step`. It copies only a few rows at a time to float32, since each spans the
whole vocabulary.

Shapes: `S` scored tokens, `R` rows of a piece, `V` vocabulary, `A` the token itself and its alternatives.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.step.prompt_scores import PromptScores, ScoredTokens

_PIECE_ROWS = 16


@torch.inference_mode()
def score_prompts(logits_SV: torch.Tensor, scored: ScoredTokens) -> dict[int, PromptScores]:
    """Returns the scores of each sequence by its place. Blocks until they are known."""
    num_top = min(int(scored.num_top_S.max()), logits_SV.shape[1])
    pieces = [slice(start, start + _PIECE_ROWS) for start in range(0, len(scored.token_ids_S), _PIECE_ROWS)]
    found = [_score(logits_SV[piece], scored.token_ids_S[piece], num_top) for piece in pieces]
    token_ids_SA, logprobs_SA = (np.concatenate(parts) for parts in zip(*found, strict=True))
    starts = np.flatnonzero(np.diff(scored.places_S, prepend=-1)).tolist()
    scores: dict[int, PromptScores] = {}
    for start, end in zip(starts, [*starts[1:], len(scored.places_S)], strict=True):
        width = 1 + int(scored.num_top_S[start])
        part = slice(start, end)
        scores[int(scored.places_S[start])] = PromptScores(
            int(scored.positions_S[start]), token_ids_SA[part, :width], logprobs_SA[part, :width]
        )
    return scores


def _score(logits_RV: torch.Tensor, token_ids_R: np.ndarray, num_top: int) -> tuple[np.ndarray, np.ndarray]:
    logprobs_RV = logits_RV.float().log_softmax(-1)
    own_R1 = torch.from_numpy(token_ids_R[:, None].copy()).to(logits_RV.device)
    top = logprobs_RV.topk(num_top, dim=-1)
    token_ids_RA = torch.cat((own_R1, top.indices), dim=1)
    logprobs_RA = torch.cat((logprobs_RV.gather(1, own_R1), top.values), dim=1)
    return token_ids_RA.cpu().numpy(), logprobs_RA.cpu().numpy()
