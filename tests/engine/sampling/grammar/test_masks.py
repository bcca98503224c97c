"""Tests masks over batches: the same as a plain reference, for grammar rows alone, and an error for its row alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

from engine.sampling.grammar.masks import MaskThread, TokenMasks, apply_masks, mask_on_device
from engine.sampling.sampler import sample, sample_each
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.errors import InternalError, InvalidInput
from tests.support.engine.grammars import EOS, GRAMMARS, VOCAB_SIZE, encode, generation, regex, spell

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(name="thread", params=[0.0, math.inf], ids=["on its thread", "here"])
def _thread(request: pytest.FixtureRequest) -> Iterator[MaskThread]:
    made = MaskThread(VOCAB_SIZE, request.param)
    yield made
    made.close()


def masks_of(thread: MaskThread, sequences: list[Sequence]) -> TokenMasks:
    pending = thread.start(sequences)
    assert pending is not None
    return pending.wait()


def reference(logits_RV: torch.Tensor, sequences: list[Sequence], masks: TokenMasks) -> torch.Tensor:
    wanted = logits_RV.clone()
    for row, sequence in enumerate(sequences):
        for token_id in range(logits_RV.shape[1]):
            if sequence in masks.places and masks.allows([sequence], [token_id]) == [False]:
                wanted[row, token_id] = float("-inf")
    return wanted


@pytest.mark.parametrize("vocab_size", [5, 64, 2011, 2048])
def test_masks_are_applied_as_the_reference_applies_them(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    sequences = [generation(None) for _ in range(7)]
    words_GW = rng.integers(-(2**31), 2**31, (4, -(-vocab_size // 32)), np.int64).astype(np.int32)
    masks = TokenMasks({sequences[row]: place for place, row in enumerate((5, 0, 3, 6))}, words_GW)
    logits_RV = torch.randn(7, vocab_size)
    masked = logits_RV.to(DEVICE, copy=True)
    apply_masks(masked, sequences, masks)
    assert torch.equal(masked.cpu(), reference(logits_RV, sequences, masks))
    rows = [0, 3, 5, 6]
    words_GW = words_GW[[masks.places[sequences[row]] for row in rows]]
    for device in {torch.device("cpu"), DEVICE}:  # as a GPU does it, whatever is here
        masked = logits_RV.to(device, copy=True)
        mask_on_device(masked, rows, words_GW)
        assert torch.equal(masked.cpu(), reference(logits_RV, sequences, masks))
    whole = logits_RV[rows].clone()
    apply_masks(whole, [sequences[row] for row in rows], masks)
    assert torch.equal(whole, reference(logits_RV, sequences, masks)[rows])


def test_rows_without_a_grammar_are_sampled_as_if_alone(thread: MaskThread) -> None:
    torch.manual_seed(0)
    sequences = [
        generation(GRAMMARS["choice"], temperature=0.0),
        generation(None, temperature=0.0),
        generation(regex("[0-9]{3}"), temperature=0.7, seed=3),
        generation(None, temperature=0.7, seed=4),
        generation(None, temperature=0.7, seed=4, repetition_penalty=1.5),
    ]
    rows, logits = [ScheduledSequence(sequence, 1) for sequence in sequences], torch.randn(5, VOCAB_SIZE)
    before = logits.clone()
    together = sample(logits, rows, EOS, masks_of(thread, sequences))
    assert torch.equal(logits, before)
    for row in (1, 3, 4):
        assert sample(logits[row : row + 1], [rows[row]], EOS) == [together[row]]
    assert spell([together[0].token_id])[0] in "yni"
    assert spell([together[2].token_id]).isdigit()
    assert thread.start([sequences[1], sequences[3]]) is None


def test_an_error_belongs_to_its_row(thread: MaskThread) -> None:
    stray = generation(regex("a+"), encode("b"), temperature=0.0)
    early = generation(regex("a+"), temperature=0.0)
    early.matcher = None
    fine = generation(regex("a+"), temperature=0.0)
    sequences = [stray, fine, early]
    rows = [ScheduledSequence(sequence, 1) for sequence in sequences]
    tokens, failed = sample_each(torch.randn(3, VOCAB_SIZE), rows, EOS, masks_of(thread, sequences))
    assert set(failed) == {0, 2}
    assert isinstance(failed[0], InvalidInput)
    assert isinstance(failed[2], InternalError)
    assert spell([tokens[1].token_id])[0] == "a"


def test_a_step_goes_on_where_every_row_fails(thread: MaskThread) -> None:
    stray = generation(regex("a+"), encode("b"), temperature=0.0)
    rows = [ScheduledSequence(stray, 1)]
    _, failed = sample_each(torch.randn(1, VOCAB_SIZE), rows, EOS, masks_of(thread, [stray]))
    assert isinstance(failed[0], InvalidInput)


def test_a_slow_average_moves_masks_to_the_thread_and_back() -> None:
    thread = MaskThread(VOCAB_SIZE)
    sequence = generation(regex("a+"), temperature=0.0)
    ran_here = []
    for mask_s in (0.0, 1.0, 0.0):
        thread._mask_s = mask_s
        pending = thread.start([sequence])
        assert pending is not None
        assert isinstance(pending.fill, partial)
        ran_here.append(pending.fill.func == thread._fill_here)
        assert pending.wait().allows([sequence], encode("a")) == [True]
        assert thread._mask_s < 1.0
    thread.close()
    assert ran_here == [True, False, True]


def test_a_row_of_which_bans_leave_nothing_fails(thread: MaskThread) -> None:
    """An argmax over minus infinity takes the first token, which the grammar does not allow."""
    sequence = generation(regex("a+"), temperature=0.0)
    logits = torch.full((1, VOCAB_SIZE), float("-inf"))
    _, failed = sample_each(logits, [ScheduledSequence(sequence, 1)], EOS, masks_of(thread, [sequence]))
    assert "leaves no token that its grammar allows" in failed[0].message


def test_a_mask_that_nobody_computed_is_an_error() -> None:
    with pytest.raises(InternalError, match="its grammar's mask was not computed"):
        sample(torch.randn(1, VOCAB_SIZE), [ScheduledSequence(generation(regex("a")), 1)], EOS)
