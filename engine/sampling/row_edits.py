"""Lays out, as columns, the edits that a step's rows ask for before temperature: biases, penalties, bans and allowed
tokens.

It is made while a step is laid out, on the step loop, from the tokens that are known by then. A step scheduled ahead
lacks the last token of some rows, which the step before it samples; `engine.sampling.logit_edits`, which has that token
on the device, makes the edits that depend on it. So no edit makes a step wait for the tokens before it.

Imports numpy but no torch. Shapes: `R` rows of logits, `E` edited rows, `C` cells, each a token of an edited row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from engine.sampling.text_edits import TextEdits
from engine.step.sequence import Sequence
from penstock.errors import PenstockError


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of the edited rows' logits, with a value each."""

    rows_C: np.ndarray  # int64, which of the edited rows
    tokens_C: np.ndarray  # int64
    values_C: np.ndarray

    @classmethod
    def of(cls, parts: Seq[tuple[int, np.ndarray, np.ndarray]]) -> Cells | None:
        """Joins (row, tokens, values); None if there are no cells."""
        if not any(len(tokens) for _, tokens, _ in parts):
            return None
        rows = np.repeat(np.array([row for row, _, _ in parts]), [len(tokens) for _, tokens, _ in parts])
        tokens_C, values_C = (np.concatenate(columns) for columns in zip(*(part[1:] for part in parts), strict=True))
        return cls(rows, tokens_C, values_C)


@dataclass(frozen=True, slots=True)
class RowEdits:
    """The edits of one step. Immutable: texts may grow afterwards."""

    index_E: np.ndarray  # int64, row of logits
    awaited_E: np.ndarray | None  # int64, place among the step's awaited tokens, -1: known; None: all are known
    bias: Cells | None  # float32, distinct cells
    seen: Cells | None  # int64, how often the token is in the known output; distinct cells
    penalties_3E: np.ndarray | None  # float64: repetition, presence, frequency; None: no row has any
    banned: Cells | None  # int64, condition: see `TextEdits.banned`
    allowed: Cells | None  # for rows that allow only these tokens; values are meaningless
    allowed_rows: np.ndarray  # int64, the edited rows with `allowed` cells
    failed: Mapping[int, PenstockError] = field(default_factory=dict)  # by row of logits; its token is meaningless

    @property
    def changes_nothing(self) -> bool:
        """Returns whether no logit changes in this step."""
        cells = (self.bias, self.seen, self.banned, self.allowed)
        return self.penalties_3E is None and all(each is None for each in cells)

    @classmethod
    def of(
        cls,
        sequences: Mapping[int, Sequence],
        positions: Seq[int] | np.ndarray,
        vocab_size: int,
        eos_token_ids: Collection[int],
        awaited_rows: np.ndarray | None = None,
    ) -> RowEdits | None:
        """Returns the edits of the sequences, by row of logits; None if there are none.

        `positions` are those of all rows' sampled tokens. `awaited_rows` are the rows of logits whose last token is
        awaited, ascending. Reads each text up to its end and remembers how far it has read.
        """
        if not sequences:
            return None
        awaited = {} if awaited_rows is None else {row: place for place, row in enumerate(awaited_rows.tolist())}
        parts = _Parts(np.ones((1, len(sequences))), np.zeros((2, len(sequences))))
        for place, (row, sequence) in enumerate(sequences.items()):
            if sequence.sampling.grammar is not None and not sequence.sampling.edits_beside_grammar:
                continue
            if sequence.edits is None:
                sequence.edits = TextEdits(sequence.sampling, sequence.num_prompt_tokens, vocab_size, eos_token_ids)
            try:
                parts.add(place, sequence, sequence.edits, int(positions[row]))
            except PenstockError as error:
                parts.failed[row] = error
        has_penalties = any(sequence.sampling.has_penalties for sequence in sequences.values())
        awaited_E = np.array([awaited.get(row, -1) for row in sequences], np.int64)
        return cls(
            np.array(list(sequences), np.int64),
            awaited_E if (awaited_E >= 0).any() else None,
            Cells.of(parts.bias),
            Cells.of(parts.seen),
            np.concatenate((parts.repetition_1E, parts.additive_2E)) if has_penalties else None,
            Cells.of(parts.banned),
            Cells.of(parts.allowed),
            np.array([place for place, _, _ in parts.allowed], np.int64),
            parts.failed,
        )


_Part = tuple[int, np.ndarray, np.ndarray]


@dataclass(slots=True)
class _Parts:
    """The columns of `RowEdits`, row by row."""

    repetition_1E: np.ndarray
    additive_2E: np.ndarray
    bias: list[_Part] = field(default_factory=list)
    seen: list[_Part] = field(default_factory=list)
    banned: list[_Part] = field(default_factory=list)
    allowed: list[_Part] = field(default_factory=list)
    failed: dict[int, PenstockError] = field(default_factory=dict)

    def add(self, place: int, sequence: Sequence, edits: TextEdits, position: int) -> None:
        """Adds the edits of one row. Raises PenstockError if they leave no token."""
        sampling = sequence.sampling
        if len(edits.bias_tokens):
            self.bias.append((place, edits.bias_tokens, edits.bias_values))
        if sampling.has_penalties:
            self.repetition_1E[0, place] = sampling.repetition_penalty
            self.additive_2E[:, place] = sampling.presence_penalty, sampling.frequency_penalty
            self.seen.append((place, *edits.seen(sequence.token_ids)))
        if edits.allowed_tokens is not None:
            self.allowed.append((place, edits.allowed_tokens, edits.allowed_tokens))
        if bans := edits.banned(sequence.token_ids, position):
            tokens, conditions = np.array(bans, np.int64).T
            self.banned.append((place, tokens, conditions))
