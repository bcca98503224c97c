"""Changes to a row of logits that a request asks for before temperature: bias, penalties, bans.

Called by `engine.sampling.sampler` on its own fp32 copy of the rows that need it, never on the model's output. A row
that asks for nothing costs nothing. Edits are gathered on the host as (row, token, value) and applied in one indexed
operation per kind, so the cost does not grow with the vocabulary. Ids outside the vocabulary are skipped, since they
cannot be sampled.

Order: logit bias, repetition penalty, presence and frequency penalties, bans, the masks of grammars.
Shapes: `R` rows, `V` vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from engine.sampling.grammar.masks import TokenMasks, apply_masks
from engine.step.sequence import Sequence


def is_edited(sequence: Sequence) -> bool:
    sampling = sequence.sampling
    return bool(
        sampling.has_penalties
        or sampling.logit_bias
        or sampling.grammar is not None
        or sequence.num_output_tokens < sampling.min_tokens
    )


def edit_logits(
    logits_RV: torch.Tensor,
    sequences: SequenceOf[Sequence],
    eos_token_ids: Collection[int],
    masks: TokenMasks | None = None,
) -> None:
    """Applies to row i, in place, what `sequences[i]` asks for. `logits_RV` is fp32. `masks` are those of its grammars.

    Repetition penalty over prompt and output, dividing positive and multiplying negative logits (Keskar et al. 2019,
    "CTRL", as transformers has it); presence and frequency penalties over the output alone (OpenAI's definition).
    """
    vocab_size = logits_RV.shape[1]
    bias, repetition, additive, banned = _Cells(), _Cells(), _Cells(), _Cells()
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if sampling.logit_bias:
            known = {token: value for token, value in sampling.logit_bias.items() if 0 <= token < vocab_size}
            bias.add(row, known, known.values())
        if sampling.repetition_penalty != 1.0:
            seen = set(sequence.token_ids)
            repetition.add(row, seen, [sampling.repetition_penalty] * len(seen))
        if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
            counts = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
            presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
            additive.add(row, counts, [-presence - frequency * count for count in counts.values()])
        if sequence.num_output_tokens < sampling.min_tokens and sampling.grammar is None:  # else its mask bans them
            ending = _ending(sequence, vocab_size, eos_token_ids)
            banned.add(row, ending, [float("-inf")] * len(ending))
    bias.add_to(logits_RV)
    repetition.penalize(logits_RV)
    additive.add_to(logits_RV)
    banned.add_to(logits_RV)
    if masks is not None:
        apply_masks(logits_RV, sequences, masks)


def _ending(sequence: Sequence, vocab_size: int, eos_token_ids: Collection[int]) -> set[int]:
    """Returns the tokens that would end the sequence; an ignored eos is not among them."""
    ending = set(sequence.sampling.stop_token_ids)
    if not sequence.sampling.ignore_eos:
        ending.update(eos_token_ids)
    ending = {token for token in ending if 0 <= token < vocab_size}
    # If the stop tokens are the whole vocabulary, nothing would be left to sample: the request may stop early instead.
    return ending if len(ending) < vocab_size else set()


@dataclass(slots=True)
class _Cells:
    """Distinct cells of the logits, with a value for each."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, tokens: Collection[int], values: Iterable[float]) -> None:
        self.rows += [row] * len(tokens)
        self.tokens += tokens
        self.values += values

    def add_to(self, logits_RV: torch.Tensor) -> None:
        if self.rows:
            index, values = self._tensors(logits_RV)
            logits_RV[index] += values

    def penalize(self, logits_RV: torch.Tensor) -> None:
        if self.rows:
            index, values = self._tensors(logits_RV)
            scores = logits_RV[index]
            logits_RV[index] = torch.where(scores < 0, scores * values, scores / values)

    def _tensors(self, logits_RV: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        device = logits_RV.device
        rows, tokens = torch.tensor([self.rows, self.tokens], dtype=torch.int64, device=device)
        return (rows, tokens), torch.tensor(self.values, dtype=logits_RV.dtype, device=device)
