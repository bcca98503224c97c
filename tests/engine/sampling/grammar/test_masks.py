"""Tests masks over batches: equal to a plain reference, applied only to grammar rows, an error only for its own row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.cpu.library import load_native
from engine.sampling.grammar import masks as masks_module
from engine.sampling.grammar.masks import (
    MaskThread,
    PendingMasks,
    TokenMasks,
    apply_masks,
    mask_by_kernel,
    mask_on_device,
    mask_on_host,
)
from engine.sampling.sampler import sample, sample_each
from engine.step import compute
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.errors import InternalError, InvalidInput
from tests.support.engine.grammars import EOS, GRAMMARS, VOCAB_SIZE, encode, generation, regex, spell

KERNELS = load_native()
Mask = Callable[[torch.Tensor, list[int], np.ndarray], None]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(name="thread", params=[1, 2], ids=["one by one", "several at a time"])
def _thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MaskThread]:
    monkeypatch.setattr(masks_module, "_NUM_THREADS", request.param)
    made = MaskThread(VOCAB_SIZE)
    yield made
    made.close()


def masks_of(thread: MaskThread, sequences: list[Sequence], here: bool = False) -> TokenMasks:
    pending = thread.prepare(sequences)
    assert pending is not None
    if here:
        pending.run()
    else:
        thread.start(pending)
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
    for device in {torch.device("cpu"), DEVICE}:  # as on a GPU, whatever this machine has
        masked = logits_RV.to(device, copy=True)
        mask_on_device(masked, rows, words_GW)
        assert torch.equal(masked.cpu(), reference(logits_RV, sequences, masks))
    ways: list[Mask] = [mask_on_host] if KERNELS is None else [mask_on_host, partial(mask_by_kernel, KERNELS)]
    for mask in ways:
        masked = logits_RV.clone()
        mask(masked, rows, words_GW)
        assert torch.equal(masked, reference(logits_RV, sequences, masks)), mask
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
    assert thread.prepare([sequences[1], sequences[3]]) is None


def test_an_error_fails_only_its_row(thread: MaskThread) -> None:
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


def test_a_step_continues_although_every_row_fails(thread: MaskThread) -> None:
    stray = generation(regex("a+"), encode("b"), temperature=0.0)
    rows = [ScheduledSequence(stray, 1)]
    _, failed = sample_each(torch.randn(1, VOCAB_SIZE), rows, EOS, masks_of(thread, [stray]))
    assert isinstance(failed[0], InvalidInput)


def test_masks_are_the_same_from_the_thread_and_the_caller(thread: MaskThread) -> None:
    outputs = [encode("a"), encode("aaa"), encode("b")]
    before, after = (
        masks_of(thread, [generation(regex("a+"), output) for output in outputs], here) for here in (False, True)
    )
    assert np.array_equal(before.words_GW, after.words_GW)
    assert len(before.failed) == len(after.failed) == 1


def test_masks_start_when_the_forward_says_so_and_end_with_a_failed_step(
    thread: MaskThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = generation(regex("a+"))
    step: Any = SimpleNamespace(sampling=SimpleNamespace(ruled={0: sequence}))
    begun: list[PendingMasks] = []
    prepare = thread.prepare

    def keep(sequences: list[Sequence]) -> PendingMasks:
        pending = prepare(sequences)
        assert pending is not None
        begun.append(pending)
        return pending

    monkeypatch.setattr(thread, "prepare", keep)

    def forward(batch: object, on_start: Callable[[], None]) -> object:
        assert not begun[-1].is_started
        on_start()
        assert begun[-1].is_started
        return batch

    def fail_after(step: object, forward: Callable[[str], str], *others: object) -> None:
        raise InternalError(f"no scores of {forward('a batch')}")

    def fail_before(step: object, forward: object, *others: object) -> None:
        raise InternalError("no batch")

    for fail in (fail_after, fail_before):
        monkeypatch.setattr(compute, "forward_step", fail)
        with pytest.raises(InternalError, match=r"no (scores of a )?batch"):
            compute.compute(step, cast(Any, forward), cast(Any, None), torch.device("cpu"), masks=thread)
    after, before = begun
    assert not after._done.locked()
    assert len(after.wait().places) == 1
    assert not before.is_started


def test_an_error_on_the_thread_is_raised_by_the_step_that_waits(thread: MaskThread) -> None:
    pending = thread.prepare([generation(regex("a+")), generation(regex("b+"))])
    assert pending is not None
    pending._num_words -= 1  # llguidance refuses memory of another size
    thread.start(pending)
    for _ in range(2):
        with pytest.raises(ValueError, match="buffer size"):
            pending.wait()


def test_grammar_rows_fail_at_once_while_the_thread_is_stalled(
    thread: MaskThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the step that finds the thread stalled waits for it; rows without a grammar are sampled in every step."""
    held, answered = threading.Event(), threading.Event()
    run = PendingMasks.run

    def run_late(pending: PendingMasks) -> None:
        held.wait()
        run(pending)
        answered.set()

    monkeypatch.setattr(PendingMasks, "run", run_late)
    monkeypatch.setattr(masks_module, "_WAIT_S", 0.01)
    ruled, free = generation(regex("a+")), generation(None)
    try:
        for wait_s in (0.01, 3600.0):
            monkeypatch.setattr(masks_module, "_WAIT_S", wait_s)
            masks = masks_of(thread, [ruled, free])
            tokens, failed = sample_each(
                torch.zeros(2, VOCAB_SIZE), [ScheduledSequence(sequence, 1) for sequence in (ruled, free)], EOS, masks
            )
            assert set(failed) == {0}
            assert "the worker cannot compute masks now" in failed[0].message
            assert tokens[1] is not None
    finally:
        held.set()
    assert answered.wait(60)
    monkeypatch.setattr(masks_module, "_WAIT_S", 60.0)
    assert masks_of(thread, [ruled]).failed == {}


def test_a_row_whose_bans_leave_no_token_fails(thread: MaskThread) -> None:
    """The argmax over minus infinities is the first token, which the grammar does not allow."""
    sequence = generation(regex("a+"), temperature=0.0)
    logits = torch.full((1, VOCAB_SIZE), float("-inf"))
    _, failed = sample_each(logits, [ScheduledSequence(sequence, 1)], EOS, masks_of(thread, [sequence]))
    assert "leaves no token that its grammar allows" in failed[0].message


def test_a_missing_mask_is_an_error() -> None:
    with pytest.raises(InternalError, match="its grammar's mask was not computed"):
        sample(torch.randn(1, VOCAB_SIZE), [ScheduledSequence(generation(regex("a")), 1)], EOS)
