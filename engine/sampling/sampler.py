"""Samples the next token of every sequence whose text ends in this step.

The last stage of a step: logits in, tokens out. It owns no state and changes neither logits nor sequences. Sampling
takes one uniform number named by (seed, position) and walks the distribution in vocabulary order, so a token depends on
nothing but its own row: not on the batch, its order or its padding, and not on which worker runs it.

Order of operations (as in vLLM and transformers): logit bias, penalties, bans and grammars
(`engine.sampling.logit_edits`), then temperature, then min-p, top-k and top-p, each on what the previous one left
(`engine.sampling.distribution`). Log-probabilities are those of the unedited distribution.

Rows are grouped by what they ask for. On a CPU a greedy row costs one argmax, even beside rows that ask for more. On a
GPU with Triton one set of kernels (`engine.kernels.triton.sample`) serves greedy and random rows alike.

Shapes: `B` rows of logits, `R` rows of a group, `V` vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from engine.sampling.distribution import pad_scores, sample_scores, select_rows
from engine.sampling.grammar.masks import TokenMasks
from engine.sampling.logit_edits import edit_logits, is_edited
from engine.sampling.row_params import SamplingRows, SamplingTensors
from engine.step.plan import sampling_records
from engine.step.sequence import SampledToken, ScheduledSequence, Sequence
from penstock.errors import InternalError, InvalidInput, PenstockError
from penstock.types import SamplingParams, TokenLogprob

# Logits and parameters to (token ids, total weights); see `engine.kernels.triton.sample`.
SampleKernel = Callable[[torch.Tensor, SamplingTensors], tuple[torch.Tensor, torch.Tensor]]
_CPU_CHUNK = 1 << 18  # logits processed at a time on a CPU: 1 MiB of fp32 stays in L2, 3x faster than 64 rows at once
# Each way to sample: the likeliest token, without filters, and with both filters.
_WARM_UP_PARAMS = (
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=1.0, top_k=2, top_p=0.5),
)


@torch.inference_mode()
def sample_rows(logits_RV: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (token ids, whether the distribution was finite), int64 and bool [R], on the logits' device.

    The tokens are those that `sample` gives rows without edits. The token of a row that is not finite means nothing,
    but is one of the vocabulary. A greedy row is finite if its largest logit is and it holds no NaN.
    """
    kernel = _kernel_for(logits_RV)
    if kernel is not None:
        token_ids_R, totals_R = kernel(logits_RV, rows.on(logits_RV.shape[1], logits_RV.device))
        return token_ids_R, _is_finite(totals_R)
    is_greedy = rows.records["is_greedy"]
    if is_greedy.all():
        return _likeliest(logits_RV)
    if not is_greedy.any():
        token_ids_R, totals_R = _sample_random(logits_RV, rows)
        return token_ids_R, _is_finite(totals_R)
    token_ids_R = logits_RV.new_empty(len(rows), dtype=torch.int64)
    valid_R = torch.empty_like(token_ids_R, dtype=torch.bool)
    greedy, random = np.flatnonzero(is_greedy), np.flatnonzero(~is_greedy)
    device = logits_RV.device
    greedy_G, random_D = (torch.from_numpy(indexes).to(device) for indexes in (greedy, random))
    token_ids_R[greedy_G], valid_R[greedy_G] = _likeliest(logits_RV[greedy_G])
    token_ids_R[random_D], totals_D = _sample_random(logits_RV[random_D], rows[random])
    valid_R[random_D] = _is_finite(totals_D)
    return token_ids_R, valid_R


def warm_up_sampling(logits_1V: torch.Tensor) -> None:
    """Samples in every way, from logits as the model returns them and as edits make them."""
    for sampling in _WARM_UP_PARAMS:
        rows = SamplingRows(sampling_records([sampling]), np.zeros(1, np.int64))
        for logits in (logits_1V, logits_1V.float()):
            sample_rows(logits, rows)


def _is_finite(totals_R: torch.Tensor) -> torch.Tensor:
    return (totals_R > 0.0) & (totals_R < float("inf"))


@torch.inference_mode()
def sample(
    logits_BV: torch.Tensor,
    rows: SequenceOf[ScheduledSequence],
    eos_token_ids: Collection[int],
    masks: TokenMasks | None = None,
) -> list[SampledToken]:
    """Returns one token per row like `sample_each`. Raises the error of the first row that has one."""
    tokens, failed = sample_each(logits_BV, rows, eos_token_ids, masks)
    for error in failed.values():
        raise error
    return tokens


@torch.inference_mode()
def sample_each(
    logits_BV: torch.Tensor,
    rows: SequenceOf[ScheduledSequence],
    eos_token_ids: Collection[int],
    masks: TokenMasks | None = None,
) -> tuple[list[SampledToken], dict[int, PenstockError]]:
    """Returns one token per row, and the errors of rows whose token means nothing. Blocks until they are known.

    Row i of `logits_BV` belongs to `rows[i].sequence`; `logits_BV` is fp32, bf16 or fp16, on any device; arithmetic is
    in fp32. `masks` hold every row with a grammar. A row fails if its distribution is not finite or
    if its grammar allows nothing that the other parameters leave.
    """
    if logits_BV.shape[0] != len(rows):
        raise InternalError(f"sample: {logits_BV.shape[0]} rows of logits for {len(rows)} sequences")
    sequences = [row.sequence for row in rows]
    edited = [index for index, sequence in enumerate(sequences) if is_edited(sequence)]
    plain = [index for index, sequence in enumerate(sequences) if not is_edited(sequence)]
    token_ids, failed = [0] * len(rows), dict[int, PenstockError]()
    for group in (plain, edited):
        if not group:
            continue
        group_RV, members = select_rows(logits_BV, group), [sequences[index] for index in group]
        if group is edited:
            group_RV = group_RV.to(torch.float32, copy=True)
            edit_logits(group_RV, members, eos_token_ids, masks)
        sampled_R, valid_R = sample_rows(group_RV, SamplingRows.of(members))
        sampled, valid = torch.stack((sampled_R, valid_R.long())).tolist()  # one copy to the host
        for index, token_id in zip(group, sampled, strict=True):
            token_ids[index] = token_id
        if group is edited:
            failed |= _grammar_errors(group, members, sampled, masks)
        for index, is_valid in zip(group, valid, strict=True):
            if not is_valid:
                failed.setdefault(index, no_distribution(sequences[index]))
    logprobs = _logprobs(logits_BV, sequences, token_ids)
    return [SampledToken(token_id, logprobs.get(index)) for index, token_id in enumerate(token_ids)], failed


def _grammar_errors(
    group: list[int], members: list[Sequence], token_ids: list[int], masks: TokenMasks | None
) -> dict[int, PenstockError]:
    """Returns, by its index in `group`, why the token of a row with a grammar means nothing."""
    if masks is None:
        return {
            index: InternalError(f"request {sequence.request_id}: its grammar's mask was not computed")
            for index, sequence in zip(group, members, strict=True)
            if sequence.sampling.grammar is not None
        }
    ruled = [place for place, sequence in enumerate(members) if sequence.sampling.grammar is not None]
    allowed = masks.allows([members[place] for place in ruled], [token_ids[place] for place in ruled])
    failed: dict[int, PenstockError] = {}
    for place, is_allowed in zip(ruled, allowed, strict=True):
        if members[place] in masks.failed:
            failed[group[place]] = masks.failed[members[place]]
        elif not is_allowed:  # every token is at minus infinity, and an argmax takes the first
            failed[group[place]] = InvalidInput(
                "sampling", "leaves no token that its grammar allows; relax the bans beside the grammar"
            )
    return failed


def _kernel_for(logits_RV: torch.Tensor) -> SampleKernel | None:
    return _device_kernel() if logits_RV.is_cuda else None


@functools.cache
def _device_kernel() -> SampleKernel | None:
    """Returns None if Triton is missing; torch's own operations serve then."""
    try:
        from engine.kernels.triton.sample import sample_tokens
    except ImportError:
        return None
    return sample_tokens


def _likeliest(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the likeliest token of each row, the first of equals, and whether its logit is finite.

    A NaN counts as the largest logit.
    """
    if logits_RV.device.type == "cpu":  # numpy's argmax is vectorized: 3 us a row of 32000 where torch takes 40
        values_RV = logits_RV.float().numpy()
        places_R = np.argmax(values_RV, axis=-1)
        return torch.from_numpy(places_R), torch.from_numpy(np.isfinite(values_RV[np.arange(len(places_R)), places_R]))
    places_R = logits_RV.argmax(-1)
    return places_R, logits_RV.gather(-1, places_R[:, None])[:, 0].isfinite()


def no_distribution(sequence: Sequence) -> InternalError:
    return InternalError(f"request {sequence.request_id}: its logits hold no finite distribution to sample from")


def _sample_random(logits_RV: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and each row's total weight after filtering."""
    vocab_size, step = logits_RV.shape[1], len(rows)
    if logits_RV.device.type == "cpu":
        step = max(1, _CPU_CHUNK // vocab_size)
    chunks = [slice(start, start + step) for start in range(0, len(rows), step)]
    parts = [sample_scores(pad_scores(logits_RV[chunk]), rows[chunk], vocab_size) for chunk in chunks]
    token_ids, totals = zip(*parts, strict=True)
    return torch.cat(token_ids), torch.cat(totals)


def _logprobs(
    logits_BV: torch.Tensor, sequences: SequenceOf[Sequence], token_ids: list[int]
) -> dict[int, TokenLogprob]:
    """Returns log-probabilities of the unedited distribution, by row, for rows that ask for them."""
    num_top = {
        row: sequence.sampling.logprobs
        for row, sequence in enumerate(sequences)
        if sequence.sampling.logprobs is not None
    }
    if not num_top:
        return {}
    rows = list(num_top)
    logprobs_RV = select_rows(logits_BV, rows).float().log_softmax(-1)
    chosen_R1 = torch.tensor([[token_ids[row]] for row in rows], device=logits_BV.device)
    values = logprobs_RV.gather(1, chosen_R1)[:, 0].tolist()
    top = logprobs_RV.topk(min(max(num_top.values()), logits_BV.shape[1]), dim=-1)
    found: dict[int, TokenLogprob] = {}
    for row, value, ids, likeliest in zip(rows, values, top.indices.tolist(), top.values.tolist(), strict=True):
        pairs = tuple(zip(ids, likeliest, strict=True))[: num_top[row]]
        found[row] = TokenLogprob(token_ids[row], value, pairs)
    return found
