"""Proposes tokens for the sequences of a step if that pays, and learns from the outcomes.

The decode scheduler owns it, on the step loop. Its state for a sequence is rebuilt from the tokens wherever the
sequence goes, so none of it is sent in a hand-off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.step.sequence import Sequence
from engine.step.speculation.acceptance import AcceptanceRate, num_accepted
from engine.step.speculation.prompt_lookup import PromptLookups
from engine.step.speculation.proposal import DraftProposer, Proposal, ProposalKind, Proposer
from engine.step.speculation.speculation_policy import (
    Candidate,
    choose_draft_length,
    choose_lengths,
    could_pay,
)
from engine.step.speculation.step_cost_table import SpeculationCosts
from engine.step.speculation.turns import SpeculationMode, SpeculationTurns

# The rate assumed for each kind until one was observed.
_FIRST_RATES = {
    ProposalKind.LONG_MATCH: 0.8,
    ProposalKind.SHORT_MATCH: 0.5,
    ProposalKind.DRAFT: 0.7,
    ProposalKind.EAGLE3: 0.7,
    ProposalKind.MTP: 0.7,
}
_FLEET_DECAY = 0.98  # factor by which earlier observations of all sequences shrink with each proposal
_OPEN_STEPS = 16  # for this many steps, the answer that proposals could pay is reused
_CLOSED_STEPS = 64  # and the answer that they could not
_IDLE_STEPS = 16  # while nothing may be proposed, one in this many steps is measured
_DRAFT_PROBE_STEPS = 128  # after that many steps a few tokens are drafted even if it should not pay, as texts change
_PROBE_TOKENS = 2  # tokens drafted, or verified for each sequence, to learn what that costs
_AWAKE_STEPS = 16  # for this many steps after drafts have paid, hidden states are handed out


@dataclass(slots=True)
class _State:
    """The knowledge about one sequence."""

    rates: dict[ProposalKind, AcceptanceRate] = field(
        default_factory=lambda: {kind: AcceptanceRate() for kind in ProposalKind}
    )
    kind: ProposalKind = ProposalKind.LONG_MATCH  # of the proposal that is verified
    # A proposal that was not verified, and the length of its text: the tokens sampled later show whether it was right.
    unverified: Proposal | None = None
    unverified_at: int = 0


class _Gate(NamedTuple):
    pays: bool
    until_step: int


def may_speculate(sequence: Sequence) -> bool:
    """Returns whether tokens are ever proposed for the sequence.

    None are proposed if the request forbids it; for a sequence with a grammar, whose mask follows from the text and
    whose forced tokens are already appended unsampled; and while log-probabilities of the prompt are due, which are
    sent with the first token.
    """
    sampling = sequence.sampling
    return sampling.grammar is None and not sampling.no_speculation and sequence.num_output_tokens > 0


class Speculator:
    def __init__(
        self,
        num_tokens: int,
        clock: Callable[[], float],
        always: bool = False,
        lookups: Proposer | None = None,
        draft: DraftProposer | None = None,
    ) -> None:
        """`num_tokens` bounds a proposal. `clock` returns seconds and times the search for proposals. With `always`,
        every proposal is verified, whether or not it pays. `draft` proposes for sequences for which `lookups` find
        nothing; by default these look into the text itself.
        """
        self._num_tokens = num_tokens
        self._clock = clock
        self._always = always
        self._lookups = PromptLookups() if lookups is None else lookups
        self._draft = draft
        self._states: dict[Sequence, _State] = {}
        self._costs = SpeculationCosts()
        self._turns = SpeculationTurns(
            [SpeculationMode.LOOKUPS] if draft is None else [SpeculationMode.LOOKUPS, SpeculationMode.DRAFTS]
        )
        self._rates = {kind: AcceptanceRate(decay=_FLEET_DECAY) for kind in ProposalKind}
        self._gates: dict[int, _Gate] = {}  # by number of sequences
        # Until that step, steps of this many sequences propose nothing, and next to nothing is computed for them.
        self._idle_size = self._idle_until = 0
        self._num_steps = 0
        self._num_unnoted = 0  # steps that have not been recorded yet
        self._drafted_at = 0  # the step for which tokens were drafted last
        self._rests_from = _DRAFT_PROBE_STEPS  # the step from which on no hidden states are handed out
        self._looked_s = 0.0  # seconds spent looking for proposals since the last step ended

    # Proposals.

    @property
    def reads_states(self) -> bool:
        """Returns whether drafts are made from hidden states, which steps then hand out."""
        return self._draft is not None and self._draft.reads_states

    def wants_states(self, num_sequences: int, has_chunks: bool) -> bool:
        """Returns whether a step of that many sequences should hand out its hidden states: because drafts paid a short
        time ago, or because the next step may try one. They cost time, so plain steps are measured without them.

        `has_chunks`: whether the step computes chunks of prompts.
        """
        if not self.reads_states or self._always:
            return True
        if self._is_idle(num_sequences):
            return False
        if self._turns.mode(num_sequences) is not SpeculationMode.DRAFTS:
            return False
        is_awake = self._num_steps < self._rests_from
        if has_chunks:
            return is_awake
        return (is_awake or self._is_probe_due(self._num_steps + 1)) and self.may_pay(num_sequences)

    def _is_probe_due(self, step: int) -> bool:
        return step >= self._drafted_at + _DRAFT_PROBE_STEPS

    def may_pay(self, num_sequences: int) -> bool:
        """Returns whether looking for proposals is worthwhile in a step of that many sequences."""
        if self._always:
            return True
        if self._is_idle(num_sequences):
            return False
        if self._turns.mode(num_sequences) is SpeculationMode.PLAIN or not self._costs.knows(num_sequences):
            return False
        gate = self._gates.get(num_sequences)
        if gate is None or gate.until_step <= self._num_steps:
            pays = could_pay(num_sequences, self._num_tokens, self._costs)
            if not pays:
                self._costs.doubt(num_sequences)
            until_step = self._num_steps + (_OPEN_STEPS if pays else _CLOSED_STEPS)
            gate = self._gates[num_sequences] = _Gate(pays, until_step)
        if not gate.pays and self._turns.is_settled:
            self._idle_size, self._idle_until = num_sequences, gate.until_step
        return gate.pays

    def _is_idle(self, num_sequences: int) -> bool:
        return num_sequences == self._idle_size and self._num_steps < self._idle_until

    def _may_draft(self, num_sequences: int) -> bool:
        return self._always or self._turns.mode(num_sequences) is SpeculationMode.DRAFTS

    def would_propose(self, sequences: Collection[Sequence], num_left: Callable[[Sequence], int]) -> bool:
        """Returns whether `propose` would find anything worthwhile; drafts nothing."""
        if self._propose(sequences, num_left, 1 << 30, drafts=False):
            return True
        if self._draft is None or not self._may_draft(len(sequences)):
            return False
        counts = self._most_tokens(sequences, num_left, 1 << 30)
        return bool(self._draft_counts(self._draft, len(sequences), counts))

    def propose(
        self, sequences: Collection[Sequence], num_left: Callable[[Sequence], int], limit: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """Returns the tokens to verify, `limit` at most; `sequences` are all that the step samples.

        `num_left` returns how many tokens a sequence may still get; the step samples one more than it verifies.
        """
        return self._propose(sequences, num_left, limit)

    def _propose(
        self, sequences: Collection[Sequence], num_left: Callable[[Sequence], int], limit: int, drafts: bool = True
    ) -> dict[Sequence, tuple[int, ...]]:
        started_s = self._clock()
        if not (self._always or self._costs.knows_verifying(len(sequences))):
            limit = min(limit, _PROBE_TOKENS * len(sequences))
        counts = self._most_tokens(sequences, num_left, limit)
        for sequence in counts:
            self._judge_unverified(sequence, self._states.setdefault(sequence, _State()))
        found = {
            sequence: proposal for sequence, proposal in self._lookups.propose(counts).items() if proposal.token_ids
        }
        if self._draft is not None and drafts and self._may_draft(len(sequences)):
            found |= self._drafted(
                self._draft,
                len(sequences),
                {sequence: counts[sequence] for sequence in counts if sequence not in found},
            )
        chosen: dict[Sequence, tuple[int, ...]] = {}
        for (sequence, proposal), count in zip(found.items(), self._lengths(len(sequences), found), strict=True):
            count = min(count, limit)
            state = self._states[sequence]
            if count:
                limit -= count
                state.kind, state.unverified = proposal.kind, None
                chosen[sequence] = proposal.token_ids[:count]
            elif state.unverified is None:
                state.unverified, state.unverified_at = proposal, len(sequence.token_ids)
        self._looked_s += self._clock() - started_s
        return chosen

    def _most_tokens(
        self, sequences: Collection[Sequence], num_left: Callable[[Sequence], int], limit: int
    ) -> dict[Sequence, int]:
        """Returns the most tokens that may be proposed for each sequence, without sequences that get no proposal."""
        return {
            sequence: count
            for sequence in sequences
            if may_speculate(sequence) and (count := min(self._num_tokens, limit, num_left(sequence) - 1)) > 0
        }

    def _judge_unverified(self, sequence: Sequence, state: _State) -> None:
        """Learns from a proposal that was not verified, once it is known how much of it was right."""
        if state.unverified is None:
            return
        proposed = state.unverified.token_ids
        sampled = sequence.token_ids[state.unverified_at : state.unverified_at + len(proposed)]
        num_held = num_accepted(proposed, sampled)
        if num_held < len(sampled) or len(sampled) == len(proposed):
            self._observe(state, state.unverified.kind, len(proposed), num_held)
            state.unverified = None

    def _drafted(
        self, draft: DraftProposer, num_sequences: int, counts: Mapping[Sequence, int]
    ) -> Mapping[Sequence, Proposal]:
        """Returns drafts, each as long as should pay."""
        chosen = self._draft_counts(draft, num_sequences, counts)
        if not chosen:
            return {}
        self._drafted_at = self._num_steps
        return draft.propose(chosen)

    def _draft_counts(
        self, draft: DraftProposer, num_sequences: int, counts: Mapping[Sequence, int]
    ) -> dict[Sequence, int]:
        """Returns how many tokens to draft for each sequence: as many as should pay, or now and then a few for one
        sequence.
        """
        counts = {sequence: count for sequence, count in counts.items() if draft.has_room(sequence, count)}
        if not counts:
            return {}
        length = self._draft_length(draft, num_sequences, [*counts])
        if length:
            self._rests_from = self._num_steps + _AWAKE_STEPS
        elif self._is_probe_due(self._num_steps):
            ready = next((sequence for sequence in counts if draft.is_ready(sequence)), None)
            if ready is not None:
                length, counts = _PROBE_TOKENS, {ready: counts[ready]}
        return {sequence: min(count, length) for sequence, count in counts.items()} if length else {}

    def _draft_length(self, draft: DraftProposer, num_sequences: int, sequences: Collection[Sequence]) -> int:
        draft_s = draft.predict_s(len(sequences))
        if self._always or draft_s is None:
            return self._num_tokens
        rates = [self._rate(self._states.get(sequence, _State()), draft.kind) for sequence in sequences]
        return choose_draft_length(num_sequences, rates, self._num_tokens, self._costs, draft_s)

    def _lengths(self, num_sequences: int, found: Mapping[Sequence, Proposal]) -> list[int]:
        if self._always:
            return [len(proposal.token_ids) for proposal in found.values()]
        candidates = [
            Candidate(len(proposal.token_ids), self._rate(self._states[sequence], proposal.kind))
            for sequence, proposal in found.items()
        ]
        return choose_lengths(num_sequences, candidates, self._costs)

    def _rate(self, state: _State, kind: ProposalKind) -> float:
        return state.rates[kind].given(self._rates[kind].given(_FIRST_RATES[kind]))

    # Outcomes.

    def on_verified(self, sequence: Sequence, num_proposed: int, num_held: int) -> ProposalKind:
        """Learns how much of a proposal was right, and returns its kind."""
        state = self._states[sequence]
        self._observe(state, state.kind, num_proposed, num_held)
        return state.kind

    def _observe(self, state: _State, kind: ProposalKind, num_proposed: int, num_held: int) -> None:
        for rate in (state.rates[kind], self._rates[kind]):
            rate.observe(num_proposed, num_held)

    def on_step(
        self, num_sequences: int, num_proposed: int, num_further: int, elapsed_s: float, tapped: bool = False
    ) -> None:
        """Learns from a step that has ended. It computed the last token of `num_sequences` sequences and `num_proposed`
        proposed tokens, no chunks of prompts, and yielded `num_further` tokens beyond one for each sequence. `tapped`:
        whether it handed out hidden states.

        `elapsed_s` is the whole time from the end of the step before, or from when there was something to do.
        """
        self._num_steps += 1
        if self._always:
            return
        self._num_unnoted += 1
        if self._num_unnoted < _IDLE_STEPS and self._is_idle(num_sequences):
            return
        turns, costs = self._turns, self._costs
        taps = tapped and self.reads_states
        looked_s, self._looked_s = self._looked_s, 0.0
        computed_s = max(elapsed_s - looked_s, 1e-9)
        is_measured = turns.is_settled and not (num_proposed or looked_s or taps)
        if num_proposed:
            costs.observe(num_sequences, num_proposed, computed_s)
        elif is_measured or costs.is_empty:
            costs.observe(num_sequences, 0, computed_s)
        plain_s = costs.predict(num_sequences)
        if num_proposed:
            num_plain, width = 1 + num_further / num_sequences, 1 + num_proposed / num_sequences
            turns.on_verified(num_sequences, computed_s, looked_s, num_plain, width, plain_s)
        else:
            turns.on_plain(num_sequences, computed_s, looked_s, plain_s, tapped=taps)
        turns.on_steps(num_sequences, self._num_unnoted, plain_s, measured=is_measured)
        self._num_unnoted = 0
        if turns.is_resting(num_sequences) and costs.knows(num_sequences):
            self._idle_size, self._idle_until = num_sequences, self._num_steps + _IDLE_STEPS

    def forget(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)
        self._lookups.forget(sequence)
        if self._draft is not None:
            self._draft.forget(sequence)
