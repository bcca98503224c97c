"""Computes the tokens that grammars allow for a batch's rows, while the model computes the step, and applies them to
its logits.

Only rows with a grammar have a mask; a step without such rows starts nothing here. llguidance computes masks outside
the interpreter's lock. On a CPU one kernel applies them all (`engine/cpu/csrc/token_masks.cpp`).

Shapes: `G` rows with a grammar, `W` words of 32 tokens, `V` vocabulary.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch
from llguidance import LLExecutor

from engine.cpu.library import NativeKernels, load_native
from engine.kernels.upload import upload
from engine.sampling.grammar.matcher import GrammarMatcher
from engine.step.batch import Forward
from engine.step.sequence import Sequence
from penstock.errors import InternalError, PenstockError
from penstock.text.grammars import FIELD

log = logging.getLogger(__name__)

_BITS = 32
_NUM_THREADS = max(1, min(8, (os.cpu_count() or 1) - 1))  # leaves a core for the step
_WAIT_S = 30.0  # llguidance's own limits end a mask within milliseconds; this bounds the wait on a machine that stalls


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of one step's grammar rows, on the host."""

    places: Mapping[Sequence, int]  # row of `words_GW` by sequence
    words_GW: np.ndarray  # int32, a bit for each token
    failed: Mapping[Sequence, PenstockError] = field(default_factory=dict)  # their rows of `words_GW` allow every token

    def allows(self, sequences: Seq[Sequence], token_ids: Seq[int]) -> list[bool]:
        """Returns whether each sequence's mask allows its token; every sequence must have a mask."""
        tokens_G = np.array(token_ids, np.int64)
        words_G = self.words_GW[self.rows_of(sequences), tokens_G // _BITS]
        allowed: list[bool] = (words_G >> (tokens_G % _BITS) & 1).astype(np.bool_).tolist()
        return allowed

    def rows_of(self, sequences: Iterable[Sequence]) -> list[int]:
        return [self.places[sequence] for sequence in sequences]

    def of_rows(self, num_rows: int, ruled: Mapping[int, Sequence]) -> list[int]:
        """Returns the row of `words_GW` for each row of logits, -1 for none; `ruled` holds sequences by row."""
        found = [-1] * num_rows
        for row, sequence in ruled.items():
            found[row] = self.places.get(sequence, -1)
        return found


def apply_masks(logits_RV: torch.Tensor, sequences: Seq[Sequence | None], masks: TokenMasks) -> None:
    """Sets the logits of tokens that a row's grammar does not allow to minus infinity, in place.

    On a CPU the logits are fp32 and contiguous.
    """
    ruled = {
        row: sequence for row, sequence in enumerate(sequences) if sequence is not None and sequence in masks.places
    }
    if not ruled:
        return
    rows, places, words_GW = list(ruled), masks.rows_of(ruled.values()), masks.words_GW
    if places != list(range(len(words_GW))):
        words_GW = words_GW[places]
    if logits_RV.device.type != "cpu":
        mask_on_device(logits_RV, rows, words_GW)
    elif (kernels := _kernels()) is not None:
        mask_by_kernel(kernels, logits_RV, rows, words_GW)
    else:
        mask_on_host(logits_RV, rows, words_GW)


def mask_by_kernel(kernels: NativeKernels, logits_RV: torch.Tensor, rows: Seq[int], words_GW: np.ndarray) -> None:
    """Masks these rows of logits on a CPU, in one call."""
    num_rows, vocab_size = logits_RV.shape
    index_G = np.array(rows, np.int64)
    assert logits_RV.dtype == torch.float32, "logits are fp32"
    assert logits_RV.is_contiguous(), "rows of logits are contiguous"
    assert words_GW.dtype == np.int32, "masks are words"
    assert words_GW.flags.c_contiguous, "masks are contiguous"
    assert words_GW.shape[1] * _BITS >= vocab_size, "there is a bit for each token"
    assert len(rows) == len(words_GW), "each row has a mask"
    assert min(rows) >= 0, "rows are those of the logits"
    assert max(rows) < num_rows, "rows are those of the logits"
    kernels.mask_rows(
        logits_RV.data_ptr(), index_G.ctypes.data, words_GW.ctypes.data, vocab_size, *words_GW.shape, vocab_size
    )


@functools.cache
def _kernels() -> NativeKernels | None:
    return load_native()


def mask_on_host(logits_RV: torch.Tensor, rows: Seq[int], words_GW: np.ndarray) -> None:
    """Masks these rows of logits as the kernel does, without it."""
    logits = logits_RV.numpy()
    banned_GV = np.unpackbits(~words_GW.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    for row, banned_V in zip(rows, banned_GV, strict=True):
        np.copyto(logits[row], -np.inf, where=banned_V)


def mask_on_device(logits_RV: torch.Tensor, rows: Seq[int], words_GW: np.ndarray) -> None:
    """Masks these rows of logits on the device, which receives one bit for each token; the host does not wait."""
    device = logits_RV.device
    shifts = torch.arange(_BITS, dtype=torch.int32, device=device)
    allowed_GWB = (upload(words_GW, device)[:, :, None] >> shifts) & 1
    banned_GV = allowed_GWB.flatten(1)[:, : logits_RV.shape[1]] == 0
    index = upload(np.array(rows, np.int64), device)
    logits_RV[index] = logits_RV[index].masked_fill(banned_GV, float("-inf"))


class MaskThread:
    """Follows grammars and computes masks beside the step, one step at a time. Its thread starts with the first step
    that needs it.

    The thread needs the interpreter's lock for a few microseconds per row; the step does not hold the lock while the
    model computes. A separate thread also keeps the grammars out of the cache of the core that computes the model.

    A step waits for it only so long. Then the step's rows with a grammar fail, and so do those of later steps, at once,
    until the thread has answered.
    """

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // _BITS)
        self._jobs: SimpleQueue[PendingMasks | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._executor: LLExecutor | None = None
        self._last: PendingMasks | None = None  # the masks that the thread was given last

    def prepare(self, sequences: Seq[Sequence]) -> PendingMasks | None:
        """Returns the masks of those sequences that have a grammar, yet to be started; None if none has one."""
        wanted = [sequence for sequence in sequences if sequence.sampling.grammar is not None]
        if not wanted:
            return None
        if self._executor is None and _NUM_THREADS > 1 and len(wanted) > 1:
            self._executor = LLExecutor(_NUM_THREADS)
        return PendingMasks(wanted, self._num_words, self._executor)

    def start(self, pending: PendingMasks) -> None:
        """Starts on the masks; the texts must not change until they are done. Never blocks.

        While the thread has not answered a step that gave up waiting, the masks fail at once instead.
        """
        if self._is_stalled():
            pending.fail()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar masks", daemon=True)
            self._thread.start()
        pending.is_started = True
        self._last = pending
        self._jobs.put(pending)

    def _is_stalled(self) -> bool:
        return self._last is not None and self._last.is_overdue

    def beside(self, pending: PendingMasks, forward: Forward) -> Forward:
        """Returns `forward` that starts on the masks when the batch is laid out; call it within `with pending`.

        An earlier start would make both threads wait for the interpreter's lock.
        """
        return partial(forward, on_start=partial(self.start, pending))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()

    def close(self) -> None:
        """Ends the thread once it has computed what was started."""
        if self._thread is not None:
            self._jobs.put(None)
            if not self._is_stalled():
                self._thread.join(_WAIT_S)
            self._thread = None


class PendingMasks:
    """The masks of one step: one thread runs it, and another one waits for it.

    A plain lock and a queue pass it between the threads. A ThreadPoolExecutor and its Future would do so in Python,
    mostly holding the interpreter's lock, and take 50 us.
    """

    def __init__(self, sequences: Seq[Sequence], num_words: int, executor: LLExecutor | None) -> None:
        """`executor` computes several masks at a time."""
        self._sequences, self._num_words, self._executor = sequences, num_words, executor
        self.is_started = False  # on another thread
        self._is_given_up = False
        self._masks: TokenMasks | None = None
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        """Computes the masks on this thread. `wait` raises whatever this raises."""
        try:
            self._masks = self._compute()
        except BaseException as error:  # a panic of the library is not an Exception
            self._error = error
        self._done.release()

    def fail(self) -> None:
        """Ends it with an error for each row, instead of `run`."""
        self._masks = self._without_masks()
        self._done.release()

    @property
    def is_overdue(self) -> bool:
        """Returns whether its step has given up waiting and nothing has been computed since."""
        return self._is_given_up and self._done.locked()

    def wait(self) -> TokenMasks:
        """Blocks until the masks are computed, and raises whatever computing them raised. If that takes too long, each
        row fails.
        """
        if self._masks is not None:
            return self._masks
        if not self._settles():
            return self._without_masks()
        if self._error is not None:
            raise self._error
        assert self._masks is not None
        return self._masks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """If the block has failed, blocks until no thread reads the texts: whoever handles the failure may change
        them.
        """
        if kind is not None and self.is_started:
            self._settles()

    def _settles(self) -> bool:
        """Blocks until it has run, for at most the time that a step waits. Returns whether it has run."""
        if self._done.acquire(timeout=_WAIT_S):
            self._done.release()
            return True
        self._is_given_up = True
        log.error("grammar masks were not computed within %g s; rows with a grammar fail until they are", _WAIT_S)
        return False

    def _without_masks(self) -> TokenMasks:
        problem = f"{FIELD}: the worker cannot compute masks now: the last ones took more than {_WAIT_S:g} s; try again"
        places = {sequence: row for row, sequence in enumerate(self._sequences)}
        words_GW = np.full((len(places), self._num_words), -1, np.int32)
        return TokenMasks(places, words_GW, {sequence: InternalError(problem) for sequence in places})

    def _compute(self) -> TokenMasks:
        sequences = self._sequences
        words_GW = np.zeros((len(sequences), self._num_words), np.int32)
        matchers: dict[int, GrammarMatcher] = {}
        failed: dict[Sequence, PenstockError] = {}
        for row, sequence in enumerate(sequences):
            try:
                matcher = _matcher_of(sequence)
                matcher.read(sequence.token_ids, sequence.num_prompt_tokens)
                matchers[row] = matcher
            except PenstockError as error:
                failed[sequence] = error
        self._fill(words_GW, matchers)
        for row, matcher in matchers.items():
            sequence = sequences[row]
            try:
                matcher.amend(words_GW[row], sequence.num_output_tokens, sequence.sampling)
            except PenstockError as error:
                failed[sequence] = error
        for row in np.flatnonzero(~words_GW.any(axis=1)).tolist():
            failed.setdefault(sequences[row], leaves_nothing(sequences[row]))
        places = {sequence: row for row, sequence in enumerate(sequences)}
        for sequence in failed:
            words_GW[places[sequence]] = -1
        return TokenMasks(places, words_GW, failed)

    def _fill(self, words_GW: np.ndarray, matchers: Mapping[int, GrammarMatcher]) -> None:
        """Has llguidance write the masks, without the interpreter's lock."""
        address, num_bytes = words_GW.ctypes.data, self._num_words * words_GW.itemsize
        if self._executor is not None and len(matchers) > 1:
            pairs = [(matcher.library_matcher, row) for row, matcher in matchers.items()]
            self._executor.unsafe_compute_mask_ptr(pairs, address, num_bytes, len(words_GW))
            return
        for row, matcher in matchers.items():
            matcher.library_matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)


def leaves_nothing(sequence: Sequence) -> InternalError:
    return InternalError(f"{FIELD}: llguidance allows no token after {sequence.num_output_tokens} tokens")


def _matcher_of(sequence: Sequence) -> GrammarMatcher:
    if sequence.matcher is None:
        raise InternalError(f"{sequence.request_id} was scheduled before its grammar was compiled")
    return sequence.matcher
