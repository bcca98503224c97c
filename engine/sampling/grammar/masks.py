"""The tokens that grammars allow a batch's rows: computed while the model computes the step, applied to its logits.

Only rows with a grammar have a mask; a step without such rows starts nothing here. llguidance computes masks outside
the interpreter's lock, several rows at a time.

Shapes: `G` rows with a grammar, `W` words of 32 tokens, `V` vocabulary.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch
from llguidance import LLExecutor

from engine.kernels.upload import upload
from engine.sampling.grammar.matcher import GrammarMatcher
from engine.step.sequence import Sequence
from penstock.errors import InternalError, PenstockError
from penstock.text.grammars import FIELD

_BITS = 32
_NUM_THREADS = max(1, min(8, (os.cpu_count() or 1) - 1))  # leaves a core for the step
_HAND_OVER_S = 0.1e-3  # masks that take less are not worth a thread: handing them over and back takes about as long
_AVERAGED = 0.1  # weight of the newest masks in the average
_WAIT_S = 30.0  # llguidance's own limits end a mask within milliseconds; this bounds the wait on a machine that stalls


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of one step's grammar rows, on the host."""

    places: Mapping[Sequence, int]  # row of `words_GW` by sequence
    words_GW: np.ndarray  # int32, a bit for each token
    failed: Mapping[Sequence, PenstockError] = field(default_factory=dict)  # whose rows of `words_GW` allow every token

    def allows(self, sequences: Seq[Sequence], token_ids: Seq[int]) -> list[bool]:
        """Returns whether each sequence's mask allows its token; every sequence must have a mask."""
        tokens_G = np.array(token_ids, np.int64)
        words_G = self.words_GW[self.rows_of(sequences), tokens_G // _BITS]
        allowed: list[bool] = (words_G >> (tokens_G % _BITS) & 1).astype(np.bool_).tolist()
        return allowed

    def rows_of(self, sequences: Iterable[Sequence]) -> list[int]:
        return [self.places[sequence] for sequence in sequences]


def apply_masks(logits_RV: torch.Tensor, sequences: Seq[Sequence | None], masks: TokenMasks) -> None:
    """Sets the logits of tokens that a row's grammar does not allow to minus infinity, in place."""
    ruled = {row: one for row, one in enumerate(sequences) if one is not None and one in masks.places}
    if not ruled:
        return
    rows, places, words_GW = list(ruled), masks.rows_of(ruled.values()), masks.words_GW
    if places != list(range(len(words_GW))):
        words_GW = words_GW[places]
    (mask_on_host if logits_RV.device.type == "cpu" else mask_on_device)(logits_RV, rows, words_GW)


def mask_on_host(logits_RV: torch.Tensor, rows: Seq[int], words_GW: np.ndarray) -> None:
    """Masks these rows of logits on a CPU."""
    logits = logits_RV.numpy()
    banned_GV = np.unpackbits(~words_GW.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    if len(rows) == len(logits):
        np.copyto(logits, -np.inf, where=banned_GV)
        return
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
    """Computes masks while the step runs, one step at a time. Its threads start with the first masks that take long.

    Only llguidance's own work runs there, without the interpreter's lock: Python on two threads would delay the step.
    Masks that take less than handing them to a thread are computed by the step's own thread, when it asks for them: on
    a GPU that overlaps with the step, too.
    """

    def __init__(self, vocab_size: int, hand_over_s: float = _HAND_OVER_S) -> None:
        """The masks of a step are computed without a thread if they take less than `hand_over_s` together."""
        self._hand_over_s = hand_over_s
        self._num_words = -(-vocab_size // _BITS)
        self._jobs: SimpleQueue[_MaskJob | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._executor: LLExecutor | None = None
        self._mask_s = 0.0  # running average of a mask's processor time

    def start(self, sequences: Seq[Sequence]) -> PendingMasks | None:
        """Starts on the masks of those sequences that have a grammar, whose texts must not change until they are done.

        Returns None if no sequence has a grammar. Never blocks for long.
        """
        wanted = [sequence for sequence in sequences if sequence.sampling.grammar is not None]
        if not wanted:
            return None
        words_GW = np.zeros((len(wanted), self._num_words), np.int32)
        matchers: dict[int, GrammarMatcher] = {}
        failed: dict[Sequence, PenstockError] = {}
        for row, sequence in enumerate(wanted):
            try:
                matcher = _matcher_of(sequence)
                matcher.read(sequence.token_ids, sequence.num_prompt_tokens)
                matchers[row] = matcher
            except PenstockError as error:
                failed[sequence] = error
        return PendingMasks(wanted, words_GW, matchers, failed, self._fill(words_GW, matchers))

    def _fill(self, words_GW: np.ndarray, matchers: Mapping[int, GrammarMatcher]) -> Callable[[], None] | None:
        """Returns a call that blocks until the masks are filled in."""
        if not matchers:  # every row has failed
            return None
        if len(matchers) * self._mask_s < self._hand_over_s:
            return partial(self._fill_here, words_GW, matchers)
        if self._executor is None:
            self._executor = LLExecutor(_NUM_THREADS)
            self._thread = threading.Thread(target=self._run, name="grammar masks", daemon=True)
            self._thread.start()
        job = _MaskJob(self._executor, words_GW, matchers)
        self._jobs.put(job)
        return partial(self._wait, job)

    def _fill_here(self, words_GW: np.ndarray, matchers: Mapping[int, GrammarMatcher]) -> None:
        started_s = time.thread_time()
        address, num_bytes = words_GW.ctypes.data, words_GW.shape[1] * words_GW.itemsize
        for row, matcher in matchers.items():
            matcher.library_matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
        self._measure((time.thread_time() - started_s) / len(matchers))

    def _wait(self, job: _MaskJob) -> None:
        job.wait()
        self._measure(job.mask_s)

    def _measure(self, mask_s: float) -> None:
        self._mask_s += _AVERAGED * (mask_s - self._mask_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()

    def close(self) -> None:
        """Ends the thread once it has computed what was started."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_WAIT_S)
            self._thread = None


class _MaskJob:
    """The masks of one step, computed on the thread of masks.

    A plain lock and a queue hand it over: a ThreadPoolExecutor and its Future do so in Python, most of the time with
    the interpreter's lock, and take 50 us.
    """

    def __init__(self, executor: LLExecutor, words_GW: np.ndarray, matchers: Mapping[int, GrammarMatcher]) -> None:
        num_rows, num_words = words_GW.shape
        pairs = [(matcher.library_matcher, row) for row, matcher in matchers.items()]
        self._call = partial(
            executor.unsafe_compute_mask_ptr, pairs, words_GW.ctypes.data, num_words * words_GW.itemsize, num_rows
        )
        self._num_masks = len(pairs)
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()
        self.mask_s = 0.0  # upper bound for one mask; known once the job is done

    def run(self) -> None:
        started_s = time.perf_counter()
        try:
            self._call()
        except BaseException as error:  # a panic of the library is not an Exception; the waiting step raises it
            self._error = error
        num_threads = min(_NUM_THREADS, self._num_masks)
        self.mask_s = (time.perf_counter() - started_s) * num_threads / self._num_masks
        self._done.release()

    def wait(self) -> None:
        """Blocks until the masks are computed, and raises what computing them has raised."""
        if not self._done.acquire(timeout=_WAIT_S):
            raise InternalError(f"grammar masks were not computed within {_WAIT_S:g} s")
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """The masks of a step that is being computed."""

    sequences: Seq[Sequence]
    words_GW: np.ndarray  # being written
    matchers: Mapping[int, GrammarMatcher]  # by row
    failed: dict[Sequence, PenstockError]
    fill: Callable[[], None] | None  # blocks until they are written; None: there is nothing to write

    def wait(self) -> TokenMasks:
        if self.fill is not None:
            self.fill()
        for row, matcher in self.matchers.items():
            sequence = self.sequences[row]
            try:
                matcher.amend(self.words_GW[row], sequence.num_output_tokens, sequence.sampling)
            except PenstockError as error:
                self.failed[sequence] = error
        places = {sequence: row for row, sequence in enumerate(self.sequences)}
        for row in np.flatnonzero(~self.words_GW.any(axis=1)).tolist():
            sequence = self.sequences[row]
            self.failed.setdefault(sequence, leaves_nothing(sequence))
        for sequence in self.failed:
            self.words_GW[places[sequence]] = -1
        return TokenMasks(places, self.words_GW, self.failed)


def leaves_nothing(sequence: Sequence) -> InternalError:
    return InternalError(f"{FIELD}: llguidance allows no token after {sequence.num_output_tokens} tokens")


def _matcher_of(sequence: Sequence) -> GrammarMatcher:
    if sequence.matcher is None:
        raise InternalError(f"{sequence.request_id} was scheduled before its grammar was compiled")
    return sequence.matcher
