"""What rows of logits ask of a draw: in columns on the host, as steps are laid out, and as the tensors that the
sampling kernel reads (`engine.kernels.sample`).

Shapes: `B` rows.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from engine.roster import ASKS, records_of
from engine.sequence import Sequence
from engine.upload import upload
from penstock.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Draws:
    """Of each row, on the logits' device; and what at least one row does, known on the host."""

    temperature_B: torch.Tensor  # float32; 0: the likeliest token
    top_k_B: torch.Tensor  # int32; 0: no limit
    top_p_B: torch.Tensor  # float64; 1: no limit
    min_p_B: torch.Tensor  # float32; 0: no limit
    seed_B: torch.Tensor  # int64, the bits of a uint64
    position_B: torch.Tensor  # int64, place in its sequence of the token that is drawn
    some_draw: bool = True  # else every row takes the likeliest
    some_top_k: bool = True
    some_top_p: bool = True

    @classmethod
    def of(
        cls, samplings: SequenceOf[SamplingParams], positions: SequenceOf[int], vocab_size: int, device: torch.device
    ) -> Draws:
        """Copied to the device without waiting for it."""
        greedy = [sampling.greedy or sampling.top_k == 1 for sampling in samplings]
        top_k = [sampling.top_k if sampling.top_k < vocab_size else 0 for sampling in samplings]
        drawing = [sampling for sampling, is_greedy in zip(samplings, greedy, strict=True) if not is_greedy]

        def column(values: SequenceOf[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        # No temperature that is drawn at may become 0 as a float32; 1e-30 is an argmax already.
        temperatures = [max(sampling.temperature, 1e-30) for sampling in samplings]
        return cls(
            column([0.0 if is_greedy else t for t, is_greedy in zip(temperatures, greedy, strict=True)], torch.float32),
            column(top_k, torch.int32),
            column([sampling.top_p for sampling in samplings], torch.float64),
            column([sampling.min_p for sampling in samplings], torch.float32),
            column([(sampling.seed ^ 1 << 63) - (1 << 63) for sampling in samplings], torch.int64),
            column(positions, torch.int64),
            some_draw=bool(drawing),
            some_top_k=any(0 < sampling.top_k < vocab_size for sampling in drawing),
            some_top_p=any(sampling.top_p < 1.0 for sampling in drawing),
        )


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """What plain draws need to know, one record a row: no text, no edits, no log-probabilities."""

    records: np.ndarray  # of `ASKS`: what they say of sampling
    positions: np.ndarray  # int64, of the token that is drawn in its sequence

    @classmethod
    def of(cls, sequences: SequenceOf[Sequence]) -> DrawColumns:
        records = records_of([sequence.sampling for sequence in sequences])
        return cls(records, np.array([len(sequence.token_ids) for sequence in sequences], np.int64))

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, rows: slice | np.ndarray) -> DrawColumns:
        return DrawColumns(self.records[rows], self.positions[rows])

    def then(self, others: DrawColumns) -> DrawColumns:
        """These, and the others behind them."""
        records = np.frombuffer(self.records.tobytes() + others.records.tobytes(), ASKS)
        return DrawColumns(records, np.concatenate((self.positions, others.positions)))

    def on(self, vocab_size: int, device: torch.device) -> Draws:
        """Copied to the device without waiting for it."""
        records, is_drawn = self.records, ~self.records["is_greedy"]
        top_k = np.where(records["top_k"] < vocab_size, records["top_k"], 0)

        def column(values: np.ndarray, dtype: type) -> torch.Tensor:
            return upload(values.astype(dtype), device)

        return Draws(
            column(np.where(is_drawn, np.maximum(records["temperature"], 1e-30), 0.0), np.float32),
            column(top_k, np.int32),
            column(records["top_p"], np.float64),
            column(records["min_p"], np.float32),
            column(records["seed"].copy().view(np.int64), np.int64),
            column(self.positions, np.int64),
            some_draw=bool(is_drawn.any()),
            some_top_k=bool((is_drawn & (top_k > 0)).any()),
            some_top_p=bool((is_drawn & (records["top_p"] < 1.0)).any()),
        )
