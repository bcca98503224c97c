"""Proposes the next tokens of a head over the target's hidden states. Runs on the step loop between two steps.

A step hands out the hidden states of the tokens that it computes here, and `observe` keeps the last of them for each
sequence until tokens are drafted. Then the head stores an entry for each of them, drafts from the last one, and goes on
from its own output. Entries of drafted tokens are overwritten later by those of the tokens that the target has sampled.

No hand-off carries any of this. The hidden states of tokens that another worker has computed, that the prefix cache
held, or that are more than `MOST_PENDING` tokens old when drafting begins are missing, and the head attends to the
entries that it has: a sequence that was handed over drafts from its second step here on. A missing entry may cost
acceptance, but never changes a token.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
import torch

from decode_worker.drafting.draft_rows import NewTokens, lay_out, num_missing_pages
from engine.cache.page_pool import OutOfPages, PagePool
from engine.engine import Engine
from engine.models.heads.head_loader import HeadRunner, load_head, load_mtp
from engine.models.heads.mtp_config import MTP
from engine.sampling.row_params import SamplingRows
from engine.sampling.sampler import sample_rows
from engine.step.batch import to_device
from engine.step.hidden_states import HiddenStates
from engine.step.plan import sampling_records
from engine.step.sequence import Sequence
from engine.step.speculation.proposal import Proposal, ProposalKind
from engine.step.speculation.step_cost_table import StepCostTable
from penstock.errors import InternalError, PenstockError
from penstock.types import PageId, SamplingParams

log = logging.getLogger(__name__)

MOST_PENDING = 128  # tokens of a sequence whose hidden states are kept until tokens are drafted, at most
_CATCH_UP_TOKENS = 256  # entries that one call stores before it drafts, to bound the delay


class _HeadDraft:
    """The entries of one sequence: stored ones, and hidden states of those still to be stored."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.record = sampling_records([sampling])
        self.pages: list[PageId] = []
        self.num_stored = 0
        self.next_position = 0  # behind the last known hidden state
        self._pending: deque[HiddenStates] = deque()
        self.num_pending = 0

    def observe(self, states: HiddenStates, num_tokens: int) -> None:
        """Keeps the hidden states of tokens that another one follows in a text of `num_tokens`. Those of rejected
        proposals are behind its end."""
        first = max(states.start, self.next_position)
        stop = min(states.start + len(states.states_TX), num_tokens - 1)
        if first >= stop:
            return
        first_kept = max(first, stop - MOST_PENDING)
        kept_TX = states.states_TX[first_kept - states.start : stop - states.start]
        if len(kept_TX) < len(states.states_TX) // 2:
            kept_TX = kept_TX.clone()  # lets the other tokens' states go
        self._pending.append(HiddenStates(first_kept, kept_TX))
        self.num_pending += len(kept_TX)
        self.next_position = stop
        while self.num_pending > MOST_PENDING:
            self._drop_oldest(self.num_pending - MOST_PENDING)

    def _drop_oldest(self, count: int) -> None:
        oldest = self._pending.popleft()
        left_TX = oldest.states_TX[count:]
        if len(left_TX):
            self._pending.appendleft(HiddenStates(oldest.start + count, left_TX))
        self.num_pending -= len(oldest.states_TX) - len(left_TX)

    def is_ready(self, num_tokens: int) -> bool:
        """Returns whether the hidden state before the last token is here, from which the next one is drafted."""
        return self.num_pending > 0 and self.next_position == num_tokens - 1

    def take_pending(self, token_ids: list[int]) -> tuple[NewTokens, list[torch.Tensor]]:
        """Returns the entries to store, and their hidden states; they count as stored from now on."""
        positions = [position for each in self._pending for position in _positions(each)]
        states = [each.states_TX for each in self._pending]
        entries = NewTokens([token_ids[each + 1] for each in positions], positions, self.num_stored, self.pages)
        self.num_stored += self.num_pending
        self._pending.clear()
        self.num_pending = 0
        return entries, states


def _positions(states: HiddenStates) -> range:
    return range(states.start, states.start + len(states.states_TX))


class DraftHead:
    """Implements `DraftProposer`. Owns the head's pages and the entries of each sequence."""

    reads_states = True

    def __init__(self, runner: HeadRunner, kind: ProposalKind, clock: Callable[[], float] = time.monotonic) -> None:
        self.kind = kind
        self._runner = runner
        self._pool = PagePool(runner.num_pages)
        self._clock = clock
        self._drafts: dict[Sequence, _HeadDraft] = {}
        self._costs = StepCostTable()  # time of a drafting step by number of sequences

    @classmethod
    def load(cls, folder: str, target_folder: str, engine: Engine) -> DraftHead:
        """Loads a head of an engine's model, or with `MTP` its own, with as many pages, and taps the engine's hidden
        states. Call it before graphs are captured. Blocks. Raises CheckpointError or ConfigError."""
        if folder == MTP:
            runner, kind = load_mtp(engine, target_folder, engine.pool.num_pages), ProposalKind.MTP
            log.info("loaded the layer of %s that predicts further tokens (MTP)", target_folder)
        else:
            runner, kind = load_head(folder, engine, target_folder, engine.pool.num_pages), ProposalKind.EAGLE3
            log.info("loaded the EAGLE-3 head %s", folder)
        return cls(runner, kind)

    def observe(self, sequence: Sequence, states: HiddenStates) -> None:
        """Takes the hidden states of tokens that a step has computed for a sequence, once the step is recorded."""
        if sequence.sampling.grammar is not None or sequence.sampling.no_speculation:
            return
        draft = self._drafts.get(sequence)
        if draft is None:
            draft = self._drafts[sequence] = _HeadDraft(sequence.sampling)
        draft.observe(states, len(sequence.token_ids))

    def is_ready(self, sequence: Sequence) -> bool:
        draft = self._drafts.get(sequence)
        return draft is not None and draft.is_ready(len(sequence.token_ids))

    def predict_s(self, num_sequences: int) -> float | None:
        return None if self._costs.is_empty else self._costs.predict(num_sequences)

    def has_room(self, sequence: Sequence, count: int) -> bool:
        draft = self._drafts.get(sequence)
        if draft is None:
            return True
        num_entries = draft.num_stored + draft.num_pending + count
        return num_missing_pages(num_entries, draft.pages, self._runner.page_size) <= self._pool.num_available

    def propose(self, counts: Mapping[Sequence, int]) -> Mapping[Sequence, Proposal]:
        """Returns the head's next tokens; none for a sequence without the hidden state before its last token, and none
        for those beyond the entries of one call."""
        ready = self._open(counts)
        if not ready:
            return {}
        try:
            drafted = self._draft(ready, counts)
        except PenstockError as error:
            log.warning("the head failed, so its %d sequences start over: %s", len(ready), error)
            for sequence in ready:
                self.forget(sequence)
            return {}
        return {sequence: Proposal(tuple(token_ids), self.kind) for sequence, token_ids in drafted.items()}

    def _open(self, counts: Mapping[Sequence, int]) -> dict[Sequence, _HeadDraft]:
        """Returns the drafts that can be made, with pages for their entries."""
        budget = _CATCH_UP_TOKENS
        ready: dict[Sequence, _HeadDraft] = {}
        for sequence, count in counts.items():
            draft = self._drafts.get(sequence)
            if draft is None or not draft.is_ready(len(sequence.token_ids)) or draft.num_pending > budget:
                continue
            num_entries = draft.num_stored + draft.num_pending + count - 1
            num_missing = num_missing_pages(num_entries, draft.pages, self._runner.page_size)
            try:
                draft.pages += self._pool.allocate(max(0, num_missing))
            except OutOfPages:
                continue
            budget -= draft.num_pending
            ready[sequence] = draft
        return ready

    def _draft(self, ready: Mapping[Sequence, _HeadDraft], counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Stores the pending entries and returns the tokens that follow."""
        sequences = [*ready]
        taken = [ready[sequence].take_pending(sequence.token_ids) for sequence in sequences]
        entries = [each for each, _ in taken]
        hidden_TD = self._runner.combine(torch.cat([part for _, parts in taken for part in parts]))
        token_ids, hidden_RD = self._compute(sequences, entries, hidden_TD)
        drafted = {sequence: [token_id] for sequence, token_id in zip(sequences, token_ids, strict=True)}
        for num_drafted in range(1, max(counts[sequence] for sequence in sequences)):
            kept = [place for place, sequence in enumerate(sequences) if counts[sequence] > num_drafted]
            if len(kept) < len(sequences):
                sequences, hidden_RD = [sequences[place] for place in kept], hidden_RD[kept]
            started_s = self._clock()
            entries = [
                NewTokens(
                    [drafted[sequence][-1]],
                    [len(sequence.token_ids) - 2 + num_drafted],
                    ready[sequence].num_stored + num_drafted - 1,
                    ready[sequence].pages,
                )
                for sequence in sequences
            ]
            token_ids, hidden_RD = self._compute(sequences, entries, hidden_RD)
            for sequence, token_id in zip(sequences, token_ids, strict=True):
                drafted[sequence].append(token_id)
            self._costs.observe(len(sequences), max(self._clock() - started_s, 1e-9))
        return drafted

    def _compute(
        self, sequences: list[Sequence], entries: list[NewTokens], hidden_TD: torch.Tensor
    ) -> tuple[list[int], torch.Tensor]:
        """Returns the token that follows the last entry of each sequence, sampled with its seed and position, and that
        entry's hidden state. Raises InternalError if a distribution was not finite."""
        host = lay_out(entries, self._runner.page_size)
        logits_RV, hidden_RD = self._runner.run(to_device(host, self._runner.device), hidden_TD)
        records = np.concatenate([self._drafts[sequence].record for sequence in sequences])
        # An entry at position p predicts the token at p + 2.
        token_ids_R, valid_R = sample_rows(logits_RV, SamplingRows(records, host.positions_T[host.logit_rows_R] + 2))
        if not bool(valid_R.all()):
            raise InternalError("the head's logits are not finite")
        return token_ids_R.tolist(), hidden_RD

    def forget(self, sequence: Sequence) -> None:
        draft = self._drafts.pop(sequence, None)
        if draft is not None:
            self._pool.release(draft.pages)

    @property
    def num_held_pages(self) -> int:
        """The number of the head's pages that sequences hold."""
        return self._pool.num_pages - self._pool.num_available

    def close(self) -> None:
        """Lets the target's steps hand out no more hidden states."""
        self._runner.close()
