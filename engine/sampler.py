"""Draws the next token of every sequence that reached its end in this step.

The last stage of `Engine.step`: logits in, tokens out. It owns no state and changes neither logits nor sequences. A
draw takes one uniform named by (seed, position) and walks the distribution in vocabulary order, hence it depends on
nothing but its own row: not on the batch, its order or its padding, and not on which worker runs it.

Order of operations (as vLLM and transformers have it): logit bias, penalties and bans (`engine.logit_edits`), then
temperature, then min-p, top-k and top-p, each on what the one before left. All three filters are a floor under the
probability, and tokens that tie with the last one kept are kept: no result depends on how ties are sorted
(`engine.distribution`). Log-probabilities are those of the untouched distribution.

On a CPU rows are grouped by what they ask for: a greedy row costs one argmax, also beside rows that ask for more. On a
GPU with Triton one set of kernels (`engine.kernels.sample`) serves all rows of a batch.

Shapes: `B` rows of logits, `R` rows of a group, `V` vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from engine.distribution import draw_from, padded, select
from engine.draws import DrawColumns, Draws
from engine.logit_edits import edit_logits, is_edited
from engine.roster import records_of
from engine.sequence import SampledToken, ScheduledSequence, Sequence
from engine.warm_up import SAMPLINGS
from penstock.errors import InternalError
from penstock.types import SamplingParams, TokenLogprob

DrawTokens = Callable[[torch.Tensor, Draws], tuple[torch.Tensor, torch.Tensor]]  # see `engine.kernels.sample`
_CPU_CHUNK = 1 << 18  # logits worked on at a time on a CPU: 1 MiB of fp32 stays in L2, 3x faster than 64 rows at once


@torch.inference_mode()
def draw(logits_RV: torch.Tensor, draws: DrawColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, whether there was anything finite to draw from), int64 and bool [R], where the logits are.

    The same tokens as `sample` gives rows without edits. What it gives a row that was not finite is a token, but
    means nothing. Greedy rows are always taken to be finite.
    """
    kernel = _kernel_for(logits_RV)
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


def warm_up_draws(logits_1V: torch.Tensor) -> None:
    """Draws in every way, from logits as they come and as they are edited."""
    for sampling in SAMPLINGS:
        draws = DrawColumns(records_of([sampling]), np.zeros(1, np.int64))
        for logits in (logits_1V, logits_1V.float()):
            draw(logits, draws)


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
    draw_tokens = _kernel_for(logits_BV)
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


def _kernel_for(logits_RV: torch.Tensor) -> DrawTokens | None:
    return _device_kernel() if logits_RV.is_cuda else None


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
            picked = pick(select(logits_BV, group), [sequences[index] for index in group], eos_token_ids)
            for index, token_id in zip(group, picked, strict=True):
                token_ids[index] = token_id
    return token_ids


def _is_greedy(sampling: SamplingParams) -> bool:
    return sampling.greedy or sampling.top_k == 1


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
        scores_RV = padded(logits_RV[rows])
        if any(is_edited(sequence) for sequence in sequences[rows]):
            edit_logits(scores_RV[:, : logits_RV.shape[1]], sequences[rows], eos)
        parts.append(draw_from(scores_RV, draws[rows], logits_RV.shape[1]))
    token_ids, totals = zip(*parts, strict=True)
    return torch.cat(token_ids), torch.cat(totals)


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
    logprobs_RV = select(logits_BV, asked).float().log_softmax(-1)
    chosen_R1 = torch.tensor([[token_ids[row]] for row in asked], device=logits_BV.device)
    values = logprobs_RV.gather(1, chosen_R1)[:, 0].tolist()
    top = logprobs_RV.topk(min(max(wanted.values()), logits_BV.shape[1]), dim=-1)
    found: dict[int, TokenLogprob] = {}
    for row, value, ids, likeliest in zip(asked, values, top.indices.tolist(), top.values.tolist(), strict=True):
        pairs = tuple(zip(ids, likeliest, strict=True))[: wanted[row]]
        found[row] = TokenLogprob(token_ids[row], value, pairs)
    return found
