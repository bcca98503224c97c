"""The tokens that grammars allow a batch's rows: computed while the model computes the step, applied to its logits.

Only rows with a grammar have a mask; a step without such rows starts nothing here. llguidance computes masks outside
the interpreter's lock, several rows at a time.

Shapes: `G` rows with a grammar, `W` words of 32 tokens, `V` vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLExecutor

from engine.kernels.upload import upload
from engine.sampling.grammar.matcher import GrammarMatcher
from engine.step.sequence import Sequence
from penstock.errors import InternalError, PenstockError

_BITS = 32
_MAX_THREADS = 8
_WAIT_S = 30.0  # llguidance's own limits end a mask within milliseconds; this is for a machine that stands still


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of one step's grammar rows, on the host."""

    places: Mapping[Sequence, int]  # row of `words_GW` by sequence
    words_GW: np.ndarray  # int32, a bit for each token
    failed: Mapping[Sequence, PenstockError] = field(default_factory=dict)  # whose rows of `words_GW` allow every token

    def allows(self, sequence: Sequence, token_id: int) -> bool:
        word = int(self.words_GW[self.places[sequence], token_id // _BITS])
        return bool(word >> (token_id % _BITS) & 1)


def apply_masks(logits_RV: torch.Tensor, sequences: Seq[Sequence], masks: TokenMasks) -> None:
    """Sets, in place, the logits of tokens that the grammar of a row's sequence does not allow to minus infinity."""
    rows = [row for row, sequence in enumerate(sequences) if sequence in masks.places]
    if not rows:
        return
    words_GW = masks.words_GW[[masks.places[sequences[row]] for row in rows]]
    (mask_on_host if logits_RV.device.type == "cpu" else mask_on_device)(logits_RV, rows, words_GW)


def mask_on_host(logits_RV: torch.Tensor, rows: Seq[int], words_GW: np.ndarray) -> None:
    """Masks these rows of logits on a CPU."""
    banned = np.unpackbits(~words_GW.view(np.uint8), axis=1, count=logits_RV.shape[1], bitorder="little")
    banned_GV = torch.from_numpy(banned.view(np.bool_))
    if len(rows) == len(logits_RV):
        logits_RV.masked_fill_(banned_GV, float("-inf"))
        return
    for row, banned_V in zip(rows, banned_GV, strict=True):
        logits_RV[row].masked_fill_(banned_V, float("-inf"))


def mask_on_device(logits_RV: torch.Tensor, rows: Seq[int], words_GW: np.ndarray) -> None:
    """Masks these rows of logits where they are: one bit for each token travels, and nothing waits."""
    device = logits_RV.device
    shifts = torch.arange(_BITS, dtype=torch.int32, device=device)
    allowed_GWB = (upload(words_GW, device)[:, :, None] >> shifts) & 1
    banned_GV = allowed_GWB.flatten(1)[:, : logits_RV.shape[1]] == 0
    index = upload(np.array(rows, np.int64), device)
    logits_RV[index] = logits_RV[index].masked_fill(banned_GV, float("-inf"))


class MaskThread:
    """Computes masks beside the step, one step at a time. Its threads start with the first grammar.

    Only llguidance's own work runs there, without the interpreter's lock: Python on two threads would delay the step.
    """

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // _BITS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar masks")
        self._executor: LLExecutor | None = None

    def start(self, sequences: Seq[Sequence]) -> PendingMasks | None:
        """Starts on the masks of those sequences that have a grammar, whose texts must not change until they are done.

        Returns None if none of them has one. Never blocks for long.
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

    def _fill(self, words_GW: np.ndarray, matchers: Mapping[int, GrammarMatcher]) -> Future[None] | None:
        if not matchers:  # every row has failed
            return None
        if len(matchers) == 1:
            ((row, matcher),) = matchers.items()
            words_W = words_GW[row]
            compute_one = matcher.library_matcher.unsafe_compute_mask_ptr
            return self._thread.submit(compute_one, words_W.ctypes.data, words_W.nbytes)
        self._executor = self._executor or LLExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
        jobs = [(matcher.library_matcher, row) for row, matcher in matchers.items()]
        num_rows, num_words = words_GW.shape
        compute_all = self._executor.unsafe_compute_mask_ptr
        return self._thread.submit(compute_all, jobs, words_GW.ctypes.data, num_words * _BITS // 8, num_rows)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """The masks of a step that is being computed."""

    sequences: Seq[Sequence]
    words_GW: np.ndarray  # being written
    matchers: Mapping[int, GrammarMatcher]  # by row
    failed: dict[Sequence, PenstockError]
    filled: Future[None] | None  # None: there is nothing to fill

    def wait(self) -> TokenMasks:
        if self.filled is not None:
            self.filled.result(_WAIT_S)
        for row, matcher in self.matchers.items():
            sequence = self.sequences[row]
            try:
                matcher.amend(self.words_GW[row], sequence.num_output_tokens, sequence.sampling)
            except PenstockError as error:
                self.failed[sequence] = error
        for row, sequence in enumerate(self.sequences):
            if sequence in self.failed:
                self.words_GW[row] = -1
        places = {sequence: row for row, sequence in enumerate(self.sequences)}
        return TokenMasks(places, self.words_GW, self.failed)


def _matcher_of(sequence: Sequence) -> GrammarMatcher:
    if sequence.matcher is None:
        raise InternalError(f"{sequence.request_id} was scheduled before its grammar was compiled")
    return sequence.matcher
