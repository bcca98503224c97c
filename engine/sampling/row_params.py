"""Holds the sampling parameters of each row of logits: columns on the host, and the tensors that the sampling kernel
reads.

`SamplingRows` is made while a step is laid out and does not read sequences afterwards; `SamplingTensors` is what
`engine.kernels.triton.sample` takes.

Shapes: `B` rows.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.upload import upload_all
from engine.step.plan import ROW_PARAMS, sampling_records
from engine.step.sequence import Sequence
from penstock.types import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Parameters of each row on the logits' device, and what at least one row uses, known on the host."""

    temperature_B: torch.Tensor  # float32; 0 takes the likeliest token
    top_k_B: torch.Tensor  # int32; 0 sets no limit
    top_p_B: torch.Tensor  # float64; 1 sets no limit
    min_p_B: torch.Tensor  # float32; 0 sets no limit
    seed_B: torch.Tensor  # int64, the bits of a uint64
    position_B: torch.Tensor  # int64, position of the sampled token in its sequence
    any_random: bool = True  # False: every row takes the likeliest token
    any_top_k: bool = True
    any_top_p: bool = True

    @classmethod
    def of(
        cls, samplings: SequenceOf[SamplingParams], positions: SequenceOf[int], vocab_size: int, device: torch.device
    ) -> SamplingTensors:
        """Copies the parameters to the device without waiting for it."""
        return SamplingRows(sampling_records(samplings), np.array(positions, np.int64)).on(vocab_size, device)


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The parameters on the host, laid out as `SamplingTensors`."""

    arrays: tuple[np.ndarray, ...]  # in the order and with the types of its tensors
    any_random: bool
    any_top_k: bool
    any_top_p: bool

    def on_device(self, tensors: SequenceOf[torch.Tensor]) -> SamplingTensors:
        """Returns the parameters, given `arrays` on the device."""
        temperature_B, top_k_B, top_p_B, min_p_B, seed_B, position_B = tensors
        return SamplingTensors(
            temperature_B,
            top_k_B,
            top_p_B,
            min_p_B,
            seed_B,
            position_B,
            self.any_random,
            self.any_top_k,
            self.any_top_p,
        )


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The parameters of each row whose sampling needs no text: neither edits nor log-probabilities."""

    records: np.ndarray  # of `ROW_PARAMS`, whose sampling fields count
    positions: np.ndarray  # int64, position of the sampled token in its sequence

    @classmethod
    def of(cls, sequences: SequenceOf[Sequence], ahead: SequenceOf[int] = ()) -> SamplingRows:
        """`ahead`: how many tokens beyond the end of its text each row's token is sampled; by default none."""
        records = sampling_records([sequence.sampling for sequence in sequences])
        positions = np.array([len(sequence.token_ids) for sequence in sequences], np.int64)
        return cls(records, positions + np.array(ahead, np.int64) if ahead else positions)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, rows: slice | np.ndarray) -> SamplingRows:
        return SamplingRows(self.records[rows], self.positions[rows])

    def then(self, others: SamplingRows) -> SamplingRows:
        """Returns these rows followed by `others`."""
        records = np.frombuffer(self.records.tobytes() + others.records.tobytes(), ROW_PARAMS)
        return SamplingRows(records, np.concatenate((self.positions, others.positions)))

    def on(self, vocab_size: int, device: torch.device) -> SamplingTensors:
        """Copies the parameters to the device without waiting for it."""
        columns = self.columns(vocab_size)
        return columns.on_device(upload_all(columns.arrays, device))

    def columns(self, vocab_size: int) -> SamplingColumns:
        """Returns the parameters as a device gets them."""
        records, is_random = self.records, ~self.records["is_greedy"]
        top_k = np.where(records["top_k"] < vocab_size, records["top_k"], 0)
        arrays = (
            # No temperature above 0 may become 0 as a float32; 1e-30 is an argmax already.
            np.where(is_random, np.maximum(records["temperature"], 1e-30), 0.0).astype(np.float32),
            top_k.astype(np.int32),
            records["top_p"].astype(np.float64),
            records["min_p"].astype(np.float32),
            records["seed"].copy().view(np.int64),
            self.positions.astype(np.int64),
        )
        return SamplingColumns(
            arrays,
            any_random=bool(is_random.any()),
            any_top_k=bool((is_random & (top_k > 0)).any()),
            any_top_p=bool((is_random & (records["top_p"] < 1.0)).any()),
        )
