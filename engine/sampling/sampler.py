"""Samples the next token of every sequence whose text ends in this step.

The last stage of a step: logits in, tokens out. It owns no state and changes neither logits nor sequences. Sampling
takes one uniform number identified by (seed, position) and walks the distribution in vocabulary order, so a token
depends only on its own row: not on the batch, its order or its padding, and not on which worker runs it.

Order of operations (as in vLLM and transformers): logit bias, penalties, bans and grammars
(`engine.sampling.logit_edits`), then temperature, then min-p, top-k and top-p, each on what the previous one left
(`engine.sampling.distribution`). Log-probabilities are those of the unedited distribution.

One kernel serves greedy and random rows alike: on a CPU `engine.cpu.sampling`, which reads grammar masks, too; on a GPU
with Triton `engine.kernels.triton.sample`. Without them rows are grouped by what they ask for.

Shapes: `R` rows of logits, `E` edited ones, `V` vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from engine.cpu.library import NativeKernels, load_native
from engine.cpu.sampling import can_sample, sample_tokens
from engine.kernels.upload import upload
from engine.sampling.distribution import pad_scores, sample_scores
from engine.sampling.grammar.masks import TokenMasks, apply_masks
from engine.sampling.logit_edits import edit_logits
from engine.sampling.row_logprobs import RowLogprobs
from engine.sampling.row_params import SamplingRows, SamplingTensors
from engine.sampling.step_sampling import StepSampling
from engine.step.plan import sampling_records
from engine.step.sequence import SampledToken, ScheduledSequence, Sequence
from penstock.errors import InternalError, InvalidInput, PenstockError
from penstock.types import SamplingParams

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
def sample_rows(
    logits_RV: torch.Tensor, rows: SamplingRows, may_overwrite: bool = False, params: SamplingTensors | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (token ids, whether the distribution was finite), int64 and bool [R], on the logits' device.
    `may_overwrite` saves a copy of the logits; `params` are those of `rows` if they are on the device already.

    The tokens are those that `sample` gives rows without edits. The token of a row that is not finite is meaningless,
    but is one of the vocabulary. A greedy row is finite if its largest logit is and it holds no NaN.
    """
    if (kernels := _cpu_kernels(logits_RV)) is not None:
        return sample_tokens(kernels, logits_RV, rows.records, rows.positions)
    kernel = _kernel_for(logits_RV)
    if kernel is not None:
        token_ids_R, totals_R = kernel(logits_RV, params or rows.on(logits_RV.shape[1], logits_RV.device))
        return token_ids_R, _is_finite(totals_R)
    is_greedy = rows.records["is_greedy"]
    if is_greedy.all():
        return _likeliest(logits_RV)
    if not is_greedy.any():
        token_ids_R, totals_R = _sample_random(logits_RV, rows, may_overwrite)
        return token_ids_R, _is_finite(totals_R)
    token_ids_R = logits_RV.new_empty(len(rows), dtype=torch.int64)
    valid_R = torch.empty_like(token_ids_R, dtype=torch.bool)
    greedy, random = np.flatnonzero(is_greedy), np.flatnonzero(~is_greedy)
    device = logits_RV.device
    greedy_G, random_D = (torch.from_numpy(indexes).to(device) for indexes in (greedy, random))
    token_ids_R[greedy_G], valid_R[greedy_G] = _likeliest(logits_RV[greedy_G])
    token_ids_R[random_D], totals_D = _sample_random(logits_RV[random_D], rows[random], may_overwrite=True)
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


@dataclass(slots=True, eq=False)
class Sampled:
    """The tokens of a step where they were sampled; on a GPU they may still be in flight. Immutable."""

    token_ids_R: torch.Tensor  # int64
    valid_R: torch.Tensor  # bool: the distribution was finite
    logprobs: RowLogprobs | None = None


@torch.inference_mode()
def sample_step(
    logits_RV: torch.Tensor,
    sampling: StepSampling,
    masks: TokenMasks | None = None,
    awaited: torch.Tensor | None = None,
    params: SamplingTensors | None = None,
) -> Sampled:
    """Samples a token for each row of logits, which are fp32, bf16 or fp16; arithmetic is in fp32.

    `masks` hold every row with a grammar. `awaited` are the step's awaited tokens (see `edit_logits`), `params` the
    rows' parameters if they are on the device already. On a GPU the host waits for nothing.
    """
    edits, rows, ruled = sampling.edits, sampling.rows, sampling.ruled
    if edits is not None and edits.changes_nothing:
        edits = None
    if edits is None and (masks is None or not ruled):
        token_ids_R, valid_R = sample_rows(logits_RV, rows, params=params)
    elif edits is None and masks is not None and (kernels := _cpu_kernels(logits_RV)) is not None:
        mask_of_row = masks.of_rows(len(rows), ruled)
        token_ids_R, valid_R = sample_tokens(
            kernels, logits_RV, rows.records, rows.positions, masks.words_GW, mask_of_row
        )
    else:
        edited = np.array(list(ruled), np.int64) if edits is None else edits.index_E
        index_E = upload(edited, logits_RV.device)
        chosen_EV = logits_RV if len(edited) == len(rows) else logits_RV[index_E]
        edited_EV = chosen_EV.to(torch.float32, copy=True)
        if edits is not None:
            edit_logits(edited_EV, edits, awaited)
        if masks is not None:
            apply_masks(edited_EV, [ruled.get(row) for row in edited.tolist()], masks)
        token_ids_R, valid_R = _sample_both(logits_RV, edited_EV, edited, index_E, rows, params)
    logprobs = None
    if sampling.num_top_R is not None:
        logprobs = RowLogprobs.of(logits_RV, token_ids_R, sampling.num_top_R)
    return Sampled(token_ids_R, valid_R, logprobs)


def _sample_both(
    logits_RV: torch.Tensor,
    edited_EV: torch.Tensor,
    edited: np.ndarray,
    index_E: torch.Tensor,
    rows: SamplingRows,
    params: SamplingTensors | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples edited rows from their copies and the others from the model's logits, like `sample_rows`."""
    if len(edited) == len(rows):
        return sample_rows(edited_EV, rows, may_overwrite=True, params=params)
    if logits_RV.is_cuda:  # one launch for all rows, which costs a copy
        scores_RV = logits_RV.to(torch.float32, copy=True).index_copy_(0, index_E, edited_EV)
        return sample_rows(scores_RV, rows, params=params)
    plain = np.delete(np.arange(len(rows)), edited)
    token_ids_R = torch.empty(len(rows), dtype=torch.int64)
    valid_R = torch.empty(len(rows), dtype=torch.bool)
    index_P = torch.from_numpy(plain)
    token_ids_R[index_P], valid_R[index_P] = sample_rows(logits_RV[index_P], rows[plain], may_overwrite=True)
    token_ids_R[index_E], valid_R[index_E] = sample_rows(edited_EV, rows[edited], may_overwrite=True)
    return token_ids_R, valid_R


def sample(
    logits_BV: torch.Tensor,
    rows: SequenceOf[ScheduledSequence],
    eos_token_ids: Collection[int],
    masks: TokenMasks | None = None,
) -> list[SampledToken]:
    """Returns one token per row like `sample_each`. Raises the error of the first row that has one."""
    tokens, failed = sample_each(logits_BV, rows, eos_token_ids, masks)
    for row in sorted(failed):
        raise failed[row]
    return tokens


def sample_each(
    logits_BV: torch.Tensor,
    rows: SequenceOf[ScheduledSequence],
    eos_token_ids: Collection[int],
    masks: TokenMasks | None = None,
) -> tuple[list[SampledToken], dict[int, PenstockError]]:
    """Returns one token per row, and the errors of rows whose token is meaningless. Blocks until they are known.

    Row i of `logits_BV` belongs to `rows[i].sequence`. `masks` hold every row with a grammar. See `failed_rows`.
    """
    if logits_BV.shape[0] != len(rows):
        raise InternalError(f"sample: {logits_BV.shape[0]} rows of logits for {len(rows)} sequences")
    sequences = [row.sequence for row in rows]
    sampling = StepSampling.of(sequences, logits_BV.shape[1], eos_token_ids)
    sampled = sample_step(logits_BV, sampling, masks)
    token_ids, valid = torch.stack((sampled.token_ids_R, sampled.valid_R.long())).tolist()  # one copy to the host
    logprobs = {} if sampled.logprobs is None else sampled.logprobs.on_host().by_row(token_ids)
    tokens = [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids)]
    invalid = [row for row, is_valid in enumerate(valid) if not is_valid]
    return tokens, failed_rows(sampling, token_ids, {row: sequences[row] for row in invalid}, masks)


def failed_rows(
    sampling: StepSampling,
    token_ids: SequenceOf[int] | np.ndarray,
    invalid: Mapping[int, Sequence],
    masks: TokenMasks | None,
) -> dict[int, PenstockError]:
    """Returns, by row, why a sampled token is meaningless.

    A row fails if its distribution is not finite (`invalid`), if its bans leave no token, or if its grammar allows none
    of the tokens that the other parameters leave.
    """
    if sampling.edits is None and masks is not None and not masks.failed and not invalid:
        return {}
    failed = {} if sampling.edits is None else dict(sampling.edits.failed)
    if sampling.ruled:
        for row, error in _grammar_errors(sampling.ruled, token_ids, invalid, masks).items():
            failed.setdefault(row, error)
    for row, sequence in invalid.items():
        failed.setdefault(row, no_distribution(sequence))
    return failed


def _grammar_errors(
    ruled: Mapping[int, Sequence],
    token_ids: SequenceOf[int] | np.ndarray,
    invalid: Mapping[int, Sequence],
    masks: TokenMasks | None,
) -> dict[int, PenstockError]:
    """Returns, by row, why the token of a row with a grammar is meaningless.

    Only an invalid row can have a token that its mask forbids: every other row has a distribution over the allowed
    tokens.
    """
    if masks is None:
        return {
            row: InternalError(f"request {sequence.request_id}: its grammar's mask was not computed")
            for row, sequence in ruled.items()
        }
    if not invalid and not masks.failed:
        return {}
    failed = {row: masks.failed[sequence] for row, sequence in ruled.items() if sequence in masks.failed}
    suspects = {row: sequence for row, sequence in invalid.items() if row in ruled}
    allowed = masks.allows(list(suspects.values()), [token_ids[row] for row in suspects])
    for row, is_allowed in zip(suspects, allowed, strict=True):
        if not is_allowed:  # every token is at minus infinity, and an argmax takes the first
            failed.setdefault(
                row,
                InvalidInput("sampling", "leaves no token that its grammar allows; relax the bans beside the grammar"),
            )
    return failed


def _cpu_kernels(logits_RV: torch.Tensor) -> NativeKernels | None:
    return load_native() if logits_RV.device.type == "cpu" and can_sample(logits_RV) else None


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


def _sample_random(
    logits_RV: torch.Tensor, rows: SamplingRows, may_overwrite: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and each row's total weight after filtering."""
    vocab_size, step = logits_RV.shape[1], len(rows)
    if logits_RV.device.type == "cpu":
        step = max(1, _CPU_CHUNK // vocab_size)
    chunks = [slice(start, start + step) for start in range(0, len(rows), step)]
    parts = [sample_scores(pad_scores(logits_RV[chunk], may_overwrite), rows[chunk], vocab_size) for chunk in chunks]
    token_ids, totals = zip(*parts, strict=True)
    # Without a distribution, the walk may end in the padding.
    return torch.cat(token_ids).clamp_(max=vocab_size - 1), torch.cat(totals)
