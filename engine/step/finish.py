"""Decides whether a generation is over.

Both kinds of worker call it after every appended token. Stop strings are handled elsewhere: the router finds them in
the detokenized text and cancels the request.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.step.sequence import Sequence
from penstock.types import FinishReason


def finish_reason(sequence: Sequence, eos_token_ids: Collection[int], context_length: int) -> FinishReason | None:
    """Returns why the sequence ends with its last token, or None while it continues.

    None of the first `min_tokens` output tokens counts as a stop. A stop token that is also the last one that fits
    counts as a stop. With a grammar, every end-of-sequence token counts: one that should be ignored, or comes too
    early, is sampled only where the grammar allows nothing else.
    """
    sampling = sequence.sampling
    num_output_tokens = sequence.num_output_tokens
    if num_output_tokens <= 0:
        return None
    last = sequence.token_ids[-1]
    is_eos = last in eos_token_ids
    if is_eos and sampling.grammar is not None:
        return FinishReason.STOP
    stops = last in sampling.stop_token_ids or (is_eos and not sampling.ignore_eos)
    if stops and num_output_tokens > sampling.min_tokens:
        return FinishReason.STOP
    if num_output_tokens >= sampling.max_tokens or len(sequence.token_ids) >= context_length:
        return FinishReason.LENGTH
    return None
