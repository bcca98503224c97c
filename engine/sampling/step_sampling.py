"""Holds everything that sampling a step needs besides logits: parameters, edits, and which rows have a grammar or
log-probabilities.

It is made while a step is laid out, on the step loop; `engine.sampling.sampler` takes it on the thread that computes
the step. Only rows with a grammar name their sequences: their masks are computed from the texts, which must not change
until then.

Imports numpy but not torch itself. Shapes: `R` rows of logits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from engine.sampling.row_edits import RowEdits
from engine.sampling.row_params import SamplingRows
from engine.step.sequence import Sequence

_NOBODY: Mapping[int, Sequence] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class StepSampling:
    """The sampling of the rows of one step. Immutable; not frozen, which would take a microsecond of every step."""

    rows: SamplingRows
    edits: RowEdits | None  # None: no row is edited by more than a grammar; otherwise those with one are included
    num_top_R: np.ndarray | None  # int64, alternatives whose log-probability is wanted, -1: no log-probabilities at all
    ruled: Mapping[int, Sequence]  # sequences with a grammar, by row

    @classmethod
    def of(cls, sequences: Seq[Sequence], vocab_size: int, eos_token_ids: Collection[int]) -> StepSampling:
        """Returns how to sample the next token of each of these sequences, all of whose tokens are known."""
        return cls.at(SamplingRows.of(sequences), dict(enumerate(sequences)), vocab_size, eos_token_ids)

    @classmethod
    def at(
        cls,
        rows: SamplingRows,
        special: Mapping[int, Sequence],
        vocab_size: int,
        eos_token_ids: Collection[int],
        awaited_rows: np.ndarray | None = None,
    ) -> StepSampling:
        """`special` holds every row that asks for more than a distribution, in ascending order.

        `awaited_rows` are the rows whose last token is not known yet, ascending.
        """
        if not special:
            return cls(rows, None, None, _NOBODY)
        ruled: dict[int, Sequence] = {}
        edited: dict[int, Sequence] = {}
        wanted: dict[int, int] = {}
        for row, sequence in special.items():
            sampling = sequence.sampling
            if sampling.grammar is not None:
                ruled[row] = sequence
            if _is_edited(sequence, int(rows.positions[row])):
                edited[row] = sequence
            if sampling.logprobs is not None:
                wanted[row] = sampling.logprobs
        edits = num_top_R = None
        if edited:
            both = {row: sequence for row, sequence in special.items() if row in edited or row in ruled}
            edits = RowEdits.of(both, rows.positions, vocab_size, eos_token_ids, awaited_rows)
        if wanted:
            num_top_R = np.full(len(rows), -1)
            num_top_R[list(wanted)] = list(wanted.values())
        return cls(rows, edits, num_top_R, ruled)


def _is_edited(sequence: Sequence, position: int) -> bool:
    """Returns whether more than a grammar edits the row's logits."""
    sampling = sequence.sampling
    if sampling.edits_beside_grammar:
        return True
    # With a grammar, its mask bans what would end the output too early.
    return sampling.grammar is None and position - sequence.num_prompt_tokens < sampling.min_tokens
