"""Draws the next token of every sequence that reached its end in this step.

The last stage of `Engine.step`: logits in, tokens out. It owns no state and changes neither logits nor sequences. A
draw takes one uniform named by (seed, position) and walks the distribution in vocabulary order, hence it depends on
nothing but its own row: not on the batch, its order or its padding, and not on which worker runs it.

Order of operations (as vLLM and transformers have it): logit bias, penalties and bans (`engine.logit_edits`), then
temperature, then min-p, top-k and top-p, each on what the one before left. All three filters are a floor under the
probability, and tokens that tie with the last one kept are kept: no result depends on how ties are sorted.
Log-probabilities are those of the untouched distribution.

On a CPU rows are grouped by what they ask for: a greedy row costs one argmax, also beside rows that ask for more. On a
GPU with Triton one set of kernels (`engine.kernels.sample`) serves all rows of a batch.

Shapes: `B` rows of logits, `R` rows of a group, `V` vocabulary, `C` likeliest candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from engine.counter_random import uniforms
from engine.draws import DrawColumns, Draws
from engine.logit_edits import edit_logits, is_edited
from engine.sequence import SampledToken, ScheduledSequence, Sequence
from penstock.errors import InternalError
from penstock.types import SamplingParams, TokenLogprob

DrawTokens = Callable[[torch.Tensor, Draws], tuple[torch.Tensor, torch.Tensor]]  # see `engine.kernels.sample`
_MIN_TEMPERATURE = 1e-30  # below, fp32 division would give 0 / 0; any such temperature is an argmax already
_NUCLEUS_GUESS = 1024  # candidates tried for top-p before all of V is sorted; text rarely needs more than 200
_BLOCK = 128  # neighbours in the vocabulary whose weights are summed at once
_CPU_CHUNK = 1 << 18  # logits worked on at a time on a CPU: 1 MiB of fp32 stays in L2, 3x faster than 64 rows at once


@torch.inference_mode()
def draw(logits_RV: torch.Tensor, draws: DrawColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, whether there was anything finite to draw from), int64 and bool [R], where the logits are.

    The same tokens as `sample` gives rows without edits. What it gives a row that was not finite is a token, but
    means nothing. Greedy rows are always taken to be finite.
    """
    kernel = _device_kernel() if logits_RV.is_cuda else None
    if kernel is not None:
        token_ids_R, totals_R = kernel(logits_RV, draws.on(logits_RV.shape[1], logits_RV.device))
        return token_ids_R, _is_mass(totals_R)
    is_greedy = draws.records["is_greedy"]
    if is_greedy.all():
        token_ids_R = _likeliest(logits_RV)
        return token_ids_R, torch.ones_like(token_ids_R, dtype=torch.bool)
    if not is_greedy.any():
        token_ids_R, totals_R = _draw(logits_RV, draws)
        return token_ids_R, _is_mass(totals_R)
    token_ids_R = logits_RV.new_empty(len(draws), dtype=torch.int64)
    valid_R = torch.ones_like(token_ids_R, dtype=torch.bool)
    greedy, drawn = np.flatnonzero(is_greedy), np.flatnonzero(~is_greedy)
    device = logits_RV.device
    greedy_G, drawn_D = (torch.from_numpy(rows).to(device) for rows in (greedy, drawn))
    token_ids_R[greedy_G] = _likeliest(logits_RV[greedy_G])
    token_ids_R[drawn_D], totals_D = _draw(logits_RV[drawn_D], draws[drawn])
    valid_R[drawn_D] = _is_mass(totals_D)
    return token_ids_R, valid_R


def _is_mass(totals_R: torch.Tensor) -> torch.Tensor:
    return (totals_R > 0.0) & (totals_R < float("inf"))


@torch.inference_mode()
def sample(
    logits_BV: torch.Tensor, rows: SequenceOf[ScheduledSequence], eos_token_ids: Collection[int]
) -> list[SampledToken]:
    """One token for each row; row i of `logits_BV` belongs to `rows[i].sequence`. Blocks until they are known.

    `logits_BV` is fp32, bf16 or fp16, on any device; arithmetic is in fp32. Raises InternalError where a row that must
    be drawn from is not finite.
    """
    if logits_BV.shape[0] != len(rows):
        raise InternalError(f"sample: {logits_BV.shape[0]} rows of logits for {len(rows)} sequences")
    sequences = [row.sequence for row in rows]
    draw_tokens = _device_kernel() if logits_BV.is_cuda else None
    if draw_tokens is not None:
        token_ids = sample_on_device(logits_BV, sequences, eos_token_ids, draw_tokens)
    else:
        token_ids = _sample_by_group(logits_BV, sequences, eos_token_ids)
    logprobs = _logprobs(logits_BV, sequences, token_ids)
    return [SampledToken(token_id, logprobs.get(index)) for index, token_id in enumerate(token_ids)]


def sample_on_device(
    logits_BV: torch.Tensor, sequences: SequenceOf[Sequence], eos_token_ids: Collection[int], draw_tokens: DrawTokens
) -> list[int]:
    """The same tokens by the sampling kernel, all rows at once; the only wait is for the tokens."""
    if any(is_edited(sequence) for sequence in sequences):
        logits_BV = logits_BV.to(torch.float32, copy=True)
        edit_logits(logits_BV, sequences, eos_token_ids)
    samplings = [sequence.sampling for sequence in sequences]
    positions = [len(sequence.token_ids) for sequence in sequences]
    draws = Draws.of(samplings, positions, logits_BV.shape[1], logits_BV.device)
    tokens_B, totals_B = draw_tokens(logits_BV, draws)
    found = torch.stack((tokens_B.double(), totals_B)).cpu()  # one copy; a double holds every token id
    _check_totals(sequences, found[1].tolist())
    return found[0].long().tolist()


@functools.cache
def _device_kernel() -> DrawTokens | None:
    """None where Triton is missing: torch's own operations serve then."""
    try:
        from engine.kernels.sample import draw_tokens
    except ImportError:
        return None
    return draw_tokens


def _check_totals(sequences: SequenceOf[Sequence], totals: SequenceOf[float]) -> None:
    for sequence, total in zip(sequences, totals, strict=True):
        if not 0.0 < total < float("inf"):
            raise nothing_to_draw(sequence)


def _sample_by_group(
    logits_BV: torch.Tensor, sequences: SequenceOf[Sequence], eos_token_ids: Collection[int]
) -> list[int]:
    plain: list[int] = []
    edited: list[int] = []
    drawn: list[int] = []
    for index, sequence in enumerate(sequences):
        group = drawn if not _is_greedy(sequence.sampling) else edited if is_edited(sequence) else plain
        group.append(index)
    token_ids = [0] * len(sequences)
    for group, pick in ((plain, _pick_plain), (edited, _pick_edited), (drawn, _pick_drawn)):
        if group:
            picked = pick(_select(logits_BV, group), [sequences[index] for index in group], eos_token_ids)
            for index, token_id in zip(group, picked, strict=True):
                token_ids[index] = token_id
    return token_ids


def _is_greedy(sampling: SamplingParams) -> bool:
    return sampling.greedy or sampling.top_k == 1


def _select(logits_BV: torch.Tensor, group: list[int]) -> torch.Tensor:
    """Rows of a group; the whole batch uncopied where the group is the whole batch."""
    if len(group) == logits_BV.shape[0]:
        return logits_BV
    return logits_BV[torch.tensor(group, device=logits_BV.device)]


def _likeliest(logits_RV: torch.Tensor) -> torch.Tensor:
    """The likeliest token, the first of equals."""
    if logits_RV.device.type == "cpu":  # numpy's argmax is vectorized: 3 us a row of 32000 where torch takes 40
        return torch.from_numpy(np.argmax(logits_RV.float().numpy(), axis=-1))
    return logits_RV.argmax(-1)


def _pick_plain(logits_RV: torch.Tensor, sequences: SequenceOf[Sequence], eos: Collection[int]) -> list[int]:
    return _likeliest(logits_RV).tolist()


def _pick_edited(logits_RV: torch.Tensor, sequences: SequenceOf[Sequence], eos: Collection[int]) -> list[int]:
    edited_RV = logits_RV.to(torch.float32, copy=True)
    edit_logits(edited_RV, sequences, eos)
    return _pick_plain(edited_RV, sequences, eos)


def _pick_drawn(logits_RV: torch.Tensor, sequences: SequenceOf[Sequence], eos: Collection[int]) -> list[int]:
    token_ids_R, totals_R = _draw(logits_RV, DrawColumns.of(sequences), sequences, eos)
    _check_totals(sequences, totals_R.tolist())
    return token_ids_R.tolist()


def nothing_to_draw(sequence: Sequence) -> InternalError:
    return InternalError(f"request {sequence.request_id}: its logits hold no finite distribution to draw from")


def _draw(
    logits_RV: torch.Tensor, draws: DrawColumns, sequences: SequenceOf[Sequence] = (), eos: Collection[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and the weight of all that was left of each row. `sequences`: where some may ask for edits."""
    step = len(draws)
    if logits_RV.device.type == "cpu":
        step = max(1, _CPU_CHUNK // logits_RV.shape[1])
    parts = []
    for start in range(0, len(draws), step):
        rows = slice(start, start + step)
        scores_RV = _pad(logits_RV[rows])
        if any(is_edited(sequence) for sequence in sequences[rows]):
            edit_logits(scores_RV[:, : logits_RV.shape[1]], sequences[rows], eos)
        parts.append(_draw_chunk(scores_RV, draws[rows], logits_RV.shape[1]))
    token_ids, totals = zip(*parts, strict=True)
    return torch.cat(token_ids), torch.cat(totals)


def _pad(logits_RV: torch.Tensor) -> torch.Tensor:
    """An fp32 copy, as wide as a whole number of blocks."""
    num_rows, vocab_size = logits_RV.shape
    padded_size = -(-vocab_size // _BLOCK) * _BLOCK
    scores_RV = torch.full((num_rows, padded_size), float("-inf"), device=logits_RV.device)
    scores_RV[:, :vocab_size] = logits_RV
    return scores_RV


def _draw_chunk(scores_RV: torch.Tensor, draws: DrawColumns, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    temperature_R1 = _column(np.maximum(draws.records["temperature"], _MIN_TEMPERATURE), scores_RV)
    scores_RV.sub_(scores_RV.amax(-1, keepdim=True)).div_(temperature_R1)
    weights_RV = scores_RV.exp_()  # probabilities up to one factor a row: the likeliest token weighs 1
    _filter(weights_RV, draws.records, vocab_size)
    return _invert_cdf(weights_RV, uniforms(draws.records["seed"], draws.positions))


def _filter(weights_RV: torch.Tensor, records: np.ndarray, vocab_size: int) -> None:
    """Set to 0 in place the weights that min-p, top-k and top-p leave out."""
    top_k, top_p, min_p = records["top_k"], records["top_p"], records["min_p"]
    with_k = np.flatnonzero((top_k > 0) & (top_k < vocab_size)).tolist()
    with_p = np.flatnonzero(top_p < 1.0).tolist()
    floor_R1 = _column(min_p, weights_RV)  # of 1, the largest weight
    top_RC: torch.Tensor | None = None
    if with_k:
        ks = torch.from_numpy(top_k[with_k, None]).to(weights_RV.device)
        top_RC = _largest(_select(weights_RV, with_k), int(top_k[with_k].max()))
        floor_R1[with_k] = torch.maximum(floor_R1[with_k], top_RC.gather(1, ks - 1))
    if with_k or (min_p > 0.0).any():
        _apply_floor(weights_RV, floor_R1)
    if with_p:
        if top_RC is not None and with_k == with_p:
            _apply_floor(top_RC, floor_R1[with_p])
        else:
            top_RC = None
        floor_R1[with_p] = _nucleus_floor(_select(weights_RV, with_p), top_p[with_p], top_RC)
        _apply_floor(weights_RV, floor_R1)


def _nucleus_floor(weights_RV: torch.Tensor, goals: np.ndarray, top_RC: torch.Tensor | None) -> torch.Tensor:
    """The smallest weight in the least set that holds the goal, a share of all that is left of the row.

    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration". `top_RC`: what top-k has left, descending,
    where the caller has it; then whatever else is left ties with the last of it. Without it few candidates suffice
    nearly always, and rows where they do not are sorted in full.
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
    """The weight at which the running sum of descending candidates reaches the goal, else the last positive one's.

    And whether it does. Rounding may leave a complete sum just below a goal near 1.
    """
    place_R1 = torch.searchsorted(top_RC.cumsum(-1, dtype=torch.float64), goal_R1)  # first with sum >= goal
    last_R1 = (top_RC > 0).sum(-1, keepdim=True) - 1
    return top_RC.gather(1, torch.minimum(place_R1, last_R1).clamp_(min=0)), place_R1 < top_RC.shape[1]


def _apply_floor(weights_RV: torch.Tensor, floor_R1: torch.Tensor) -> None:
    # A comparison into floats and a product are vectorized; masked_fill_ and where are 10x slower on a CPU.
    weights_RV.mul_(torch.ge(weights_RV, floor_R1, out=torch.empty_like(weights_RV)))


def _largest(weights_RV: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest weights of each row, descending."""
    if weights_RV.device.type == "cpu":  # numpy sorts with AVX: 0.1 ms for 32000 floats where torch takes 3
        weights = weights_RV.numpy()
        if count < weights.shape[1]:
            weights = np.partition(weights, -count, axis=-1)[:, -count:]
        return torch.from_numpy(np.sort(weights, axis=-1)).flip(-1)
    return weights_RV.topk(count, dim=-1).values


def _block_sums(weights_RV: torch.Tensor) -> torch.Tensor:
    """fp64 sums of each `_BLOCK` neighbours; within a block fp32 errs by less than 1e-6 of its sum."""
    return weights_RV.view(weights_RV.shape[0], -1, _BLOCK).sum(-1).double()


def _invert_cdf(weights_RV: torch.Tensor, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token in vocabulary order at which the running weight exceeds its number x total, and the totals.

    In two steps, the block and the place in it: a running sum over the whole vocabulary takes 20 times as long.
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
    """The first place whose running sum exceeds the target, hence one with a weight above 0.

    A target that rounding has carried up to the last sum, which nothing exceeds, is taken as just below it. The
    result is a place even where the sums are no numbers, because the totals are judged later, on the host.
    """
    last_R1 = sums_RX[:, -1:].contiguous()
    below_R1 = torch.nextafter(last_R1, torch.zeros_like(last_R1))
    places_R1 = torch.searchsorted(sums_RX, torch.minimum(target_R1, below_R1), right=True)
    return places_R1.clamp_(max=sums_RX.shape[1] - 1)


def _logprobs(
    logits_BV: torch.Tensor, sequences: SequenceOf[Sequence], token_ids: list[int]
) -> dict[int, TokenLogprob]:
    """Raw log-probabilities of the rows that ask for them, by row."""
    wanted = {
        row: sequence.sampling.logprobs
        for row, sequence in enumerate(sequences)
        if sequence.sampling.logprobs is not None
    }
    if not wanted:
        return {}
    asked = list(wanted)
    logprobs_RV = _select(logits_BV, asked).float().log_softmax(-1)
    chosen_R1 = torch.tensor([[token_ids[row]] for row in asked], device=logits_BV.device)
    values = logprobs_RV.gather(1, chosen_R1)[:, 0].tolist()
    top = logprobs_RV.topk(min(max(wanted.values()), logits_BV.shape[1]), dim=-1)
    found: dict[int, TokenLogprob] = {}
    for row, value, ids, likeliest in zip(asked, values, top.indices.tolist(), top.values.tolist(), strict=True):
        pairs = tuple(zip(ids, likeliest, strict=True))[: wanted[row]]
        found[row] = TokenLogprob(token_ids[row], value, pairs)
    return found


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float64)[:, None]).to(like.device, like.dtype)
