"""Changes to a row of logits that a request asks for before temperature: bias, penalties, bans.

Called by `engine.sampling.sampler` on its own fp32 copy of the rows that need it, never on the model's output. A row
that asks for nothing costs nothing. Edits are gathered on the host as (row, token, value) and applied in one indexed
operation per kind, so the cost does not grow with the vocabulary. Ids outside the vocabulary are skipped, since they
cannot be sampled.

Order: logit bias, repetition penalty, presence and frequency penalties, bans, and at last what is allowed: all tokens
but the allowed ones are banned, and those that a grammar does not allow.
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
from penstock.errors import InvalidInput


def is_edited(sequence: Sequence) -> bool:
    sampling = sequence.sampling
    return sampling.edits_every_token or sequence.num_output_tokens < sampling.min_tokens


def edit_logits(
    logits_RV: torch.Tensor,
    sequences: SequenceOf[Sequence],
    eos_token_ids: Collection[int],
    masks: TokenMasks | None = None,
) -> None:
    """Applies to row i, in place, what `sequences[i]` asks for. `logits_RV` is fp32. `masks` are those of its grammars.

    Repetition penalty over prompt and output, dividing positive and multiplying negative logits (Keskar et al. 2019,
    "CTRL", as transformers has it); presence and frequency penalties over the output alone (OpenAI's definition).
    Raises InvalidInput for a sequence whose bans leave no token to sample.
    """
    vocab_size = logits_RV.shape[1]
    bias, repetition, additive, banned = _Cells(), _Cells(), _Cells(), _Cells()
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if sampling.grammar is not None and not sampling.edits_beside_grammar:
            continue
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
        tokens = _banned(sequence, vocab_size, eos_token_ids)
        banned.add(row, tokens, [float("-inf")] * len(tokens))
    bias.add_to(logits_RV)
    repetition.penalize(logits_RV)
    additive.add_to(logits_RV)
    banned.add_to(logits_RV)
    for row, sequence in enumerate(sequences):
        if sequence.sampling.allowed_token_ids:
            _keep(logits_RV[row], _allowed(sequence, vocab_size, eos_token_ids))
    if masks is not None:
        apply_masks(logits_RV, sequences, masks)


def _keep(logits_V: torch.Tensor, token_ids: Collection[int]) -> None:
    """Bans every token but these, in place."""
    kept = torch.tensor(sorted(token_ids), dtype=torch.int64, device=logits_V.device)
    scores = logits_V[kept]
    logits_V.fill_(float("-inf"))
    logits_V[kept] = scores


def _allowed(sequence: Sequence, vocab_size: int, eos_token_ids: Collection[int]) -> Collection[int]:
    """Returns the tokens that may be sampled where nothing is banned."""
    if not sequence.sampling.allowed_token_ids:
        return range(vocab_size)
    known = {token for token in sequence.sampling.allowed_token_ids if 0 <= token < vocab_size}
    return known | _ending(sequence, vocab_size, eos_token_ids)


def _banned(sequence: Sequence, vocab_size: int, eos_token_ids: Collection[int]) -> set[int]:
    """Returns the tokens that must not be sampled next. Raises InvalidInput if none would be left."""
    sampling = sequence.sampling
    banned = _completing(sequence, vocab_size) if sampling.bad_sequences else set()
    ending: set[int] = set()
    if sequence.num_output_tokens < sampling.min_tokens and sampling.grammar is None:  # else its mask bans them
        ending = _ending(sequence, vocab_size, eos_token_ids)
    if not banned and not ending:
        return banned
    allowed = _allowed(sequence, vocab_size, eos_token_ids)
    if _leaves_any(allowed, banned | ending):
        return banned | ending
    # If only tokens that end the sequence are left, the request may stop early instead.
    if _leaves_any(allowed, banned):
        return banned
    raise InvalidInput(
        "sampling.bad_words",
        f"and allowed_token_ids leave no token to sample after {sequence.num_output_tokens} tokens of output; allow "
        "more tokens, or ban fewer words",
    )


def _leaves_any(allowed: Collection[int], banned: set[int]) -> bool:
    return len(allowed) > len(banned) or any(token not in banned for token in allowed)


def _completing(sequence: Sequence, vocab_size: int) -> set[int]:
    """Returns the tokens that would complete a bad sequence within the output."""
    token_ids, num_output_tokens = sequence.token_ids, sequence.num_output_tokens
    found = set()
    for bad in sequence.sampling.bad_sequences:
        before = len(bad) - 1
        if before <= num_output_tokens and tuple(token_ids[len(token_ids) - before :]) == bad[:-1]:
            found.add(bad[-1])
    return {token for token in found if 0 <= token < vocab_size}


def _ending(sequence: Sequence, vocab_size: int, eos_token_ids: Collection[int]) -> set[int]:
    """Returns the tokens that would end the sequence; an ignored eos is not among them."""
    ending = set(sequence.sampling.stop_token_ids)
    if not sequence.sampling.ignore_eos:
        ending.update(eos_token_ids)
    return {token for token in ending if 0 <= token < vocab_size}


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
