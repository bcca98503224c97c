"""Turns scores into tokens: temperature, the filters, and the walk along the distribution.

It is the part of `engine.sampling.sampler` that works only on tensors and columns and knows no sequences, and the
reference for the kernels that do the same in one call: `engine/cpu/csrc/sample.cpp` and
`engine/kernels/triton/sample.py`. A change of a rule belongs in all three. Each filter
is a floor on the probability, and tokens that tie with the last one kept are kept, so no result depends on how ties are
sorted.

Shapes: `R` rows of a group, `V` vocabulary (in whole blocks where weights are walked), `C` likeliest candidates, `X`
blocks, `Y` places in a block.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.sampling.counter_random import uniforms
from engine.sampling.row_params import SamplingRows

_MIN_TEMPERATURE = 1e-30  # below, fp32 division would give 0 / 0; any such temperature is an argmax already
_NUCLEUS_GUESS = 1024  # candidates tried for top-p before all of V is sorted; text rarely needs more than 200
_BLOCK = 128  # neighbours in the vocabulary whose weights are summed at once


def select_rows(logits_BV: torch.Tensor, group: list[int]) -> torch.Tensor:
    """Returns the rows of a group; without copying if the group is the whole batch."""
    if len(group) == logits_BV.shape[0]:
        return logits_BV
    return logits_BV[torch.tensor(group, device=logits_BV.device)]


def pad_scores(logits_RV: torch.Tensor, may_overwrite: bool = False) -> torch.Tensor:
    """Returns an fp32 copy padded with -inf to a whole number of blocks, or the logits themselves if they are that and
    may be overwritten."""
    num_rows, vocab_size = logits_RV.shape
    padded_size = -(-vocab_size // _BLOCK) * _BLOCK
    if may_overwrite and padded_size == vocab_size and logits_RV.dtype == torch.float32:
        return logits_RV
    scores_RV = torch.full((num_rows, padded_size), float("-inf"), device=logits_RV.device)
    scores_RV[:, :vocab_size] = logits_RV
    return scores_RV


def sample_scores(scores_RV: torch.Tensor, rows: SamplingRows, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and each row's total weight after filtering. Overwrites the scores, made by `pad_scores`."""
    temperature_R1 = _column(np.maximum(rows.records["temperature"], _MIN_TEMPERATURE), scores_RV)
    scores_RV.sub_(scores_RV.amax(-1, keepdim=True)).div_(temperature_R1)
    weights_RV = _exp(scores_RV)  # probabilities up to a factor per row: the likeliest token has weight 1
    _filter(weights_RV, rows.records, vocab_size)
    return _invert_cdf(weights_RV, uniforms(rows.records["seed"], rows.positions))


def _exp(scores_RV: torch.Tensor) -> torch.Tensor:
    """Returns e to the power of each score, in place."""
    if scores_RV.device.type == "cpu":  # torch's takes three times as long at minus infinity, which masks produce
        scores = scores_RV.numpy()
        np.exp(scores, out=scores)
        return scores_RV
    return scores_RV.exp_()


def _filter(weights_RV: torch.Tensor, records: np.ndarray, vocab_size: int) -> None:
    """Sets the weights that min-p, top-k and top-p exclude to 0, in place."""
    top_k, top_p, min_p = records["top_k"], records["top_p"], records["min_p"]
    with_k = np.flatnonzero((top_k > 0) & (top_k < vocab_size)).tolist()
    with_p = np.flatnonzero(top_p < 1.0).tolist()
    floor_R1 = _column(min_p, weights_RV)  # relative to 1, the largest weight
    top_RC: torch.Tensor | None = None
    if with_k:
        ks = torch.from_numpy(top_k[with_k, None]).to(weights_RV.device)
        top_RC = _largest(select_rows(weights_RV, with_k), int(top_k[with_k].max()))
        floor_R1[with_k] = torch.maximum(floor_R1[with_k], top_RC.gather(1, ks - 1))
    if with_k or (min_p > 0.0).any():
        _apply_floor(weights_RV, floor_R1)
    if with_p:
        if top_RC is not None and with_k == with_p:
            _apply_floor(top_RC, floor_R1[with_p])
        else:
            top_RC = None
        floor_R1[with_p] = _nucleus_floor(select_rows(weights_RV, with_p), top_p[with_p], top_RC)
        _apply_floor(weights_RV, floor_R1)


def _nucleus_floor(weights_RV: torch.Tensor, goals: np.ndarray, top_RC: torch.Tensor | None) -> torch.Tensor:
    """Returns the smallest weight in the smallest set that reaches the goal, a fraction of the row's remaining weight.

    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration". `top_RC` is what top-k has left, descending,
    if the caller has it; whatever else is left then ties with its last weight. Without it a few candidates nearly
    always suffice, and rows where they do not are sorted in full.
    """
    goal_R1 = _block_sums(weights_RV).sum(-1, keepdim=True)
    goal_R1 *= _column(goals, goal_R1)
    if top_RC is not None:
        return _floor_among(top_RC, goal_R1)[0]
    size = weights_RV.shape[1]
    floor_R1, reached_R1 = _floor_among(_largest(weights_RV, min(_NUCLEUS_GUESS, size)), goal_R1)
    if not bool(reached_R1.all()):
        short_S = (~reached_R1[:, 0]).nonzero()[:, 0]
        floor_R1[short_S], _ = _floor_among(_largest(weights_RV[short_S], size), goal_R1[short_S])
    return floor_R1


def _floor_among(top_RC: torch.Tensor, goal_R1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weight at which the running sum of descending candidates reaches the goal, and whether it does.

    If it does not, the weight is the last positive one: rounding may leave a complete sum just below a goal near 1.
    """
    place_R1 = torch.searchsorted(top_RC.cumsum(-1, dtype=torch.float64), goal_R1)  # first with sum >= goal
    last_R1 = (top_RC > 0).sum(-1, keepdim=True) - 1
    return top_RC.gather(1, torch.minimum(place_R1, last_R1).clamp_(min=0)), place_R1 < top_RC.shape[1]


def _apply_floor(weights_RV: torch.Tensor, floor_R1: torch.Tensor) -> None:
    # A comparison into floats and a product are vectorized; masked_fill_ and where are 10x slower on a CPU.
    weights_RV.mul_(torch.ge(weights_RV, floor_R1, out=torch.empty_like(weights_RV)))


def _largest(weights_RV: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the `count` largest weights of each row, descending."""
    if weights_RV.device.type == "cpu":  # numpy sorts with AVX: 0.1 ms for 32000 floats where torch takes 3
        weights = weights_RV.numpy()
        if count < weights.shape[1]:
            weights = np.partition(weights, -count, axis=-1)[:, -count:]
        return torch.from_numpy(np.sort(weights, axis=-1)).flip(-1)
    return weights_RV.topk(count, dim=-1).values


def _block_sums(weights_RV: torch.Tensor) -> torch.Tensor:
    """Returns fp64 sums of each `_BLOCK` neighbours; within a block fp32 errs by less than 1e-6 of its sum."""
    return weights_RV.view(weights_RV.shape[0], -1, _BLOCK).sum(-1).double()


def _invert_cdf(weights_RV: torch.Tensor, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first token in vocabulary order whose running weight exceeds number x total, and the totals.

    Finds the block first and then the place in it: a running sum over the whole vocabulary takes 20 times as long.
    """
    cdf_RX = _block_sums(weights_RV).cumsum(-1)
    total_R1 = cdf_RX[:, -1:].contiguous()
    target_R1 = total_R1 * _column(numbers, total_R1)
    block_R1 = _first_above(cdf_RX, target_R1)
    before_R1 = torch.where(block_R1 > 0, cdf_RX.gather(1, (block_R1 - 1).clamp(min=0)), 0.0)
    blocks_RXY = weights_RV.view(weights_RV.shape[0], -1, _BLOCK)
    inside_RY = blocks_RXY[torch.arange(len(numbers), device=weights_RV.device), block_R1[:, 0]]
    place_R1 = _first_above(inside_RY.cumsum(-1, dtype=torch.float64), target_R1 - before_R1)
    return (block_R1 * _BLOCK + place_R1)[:, 0], total_R1[:, 0]


def _first_above(sums_RX: torch.Tensor, target_R1: torch.Tensor) -> torch.Tensor:
    """Returns the first place whose running sum exceeds the target; its weight is therefore above 0.

    A target that rounding has raised to the last sum, which nothing exceeds, is lowered to just below it. The result is
    a valid place even if the sums are not numbers, because the totals are checked later, on the host.
    """
    last_R1 = sums_RX[:, -1:].contiguous()
    below_R1 = torch.nextafter(last_R1, torch.zeros_like(last_R1))
    places_R1 = torch.searchsorted(sums_RX, torch.minimum(target_R1, below_R1), right=True)
    return places_R1.clamp_(max=sums_RX.shape[1] - 1)


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float64)[:, None]).to(like.device, like.dtype)
