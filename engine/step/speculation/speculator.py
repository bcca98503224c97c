"""Proposes tokens for the sequences of a step where that pays, and learns from their outcomes.

The decode scheduler owns it, on the step loop. What it knows of a sequence is rebuilt from its tokens wherever the
sequence goes: nothing of it crosses a hand-off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.step.sequence import Sequence
from engine.step.speculation.acceptance import AcceptanceRate, num_accepted
from engine.step.speculation.prompt_lookup import LENGTHS, PromptLookup, Proposal
from engine.step.speculation.speculation_policy import Candidate, SpeculationLedger, choose_lengths
from engine.step.speculation.step_cost_table import StepCostTable

_FIRST_RATES = (0.8, 0.5)  # of each kind, assumed until any was seen
_FLEET_DECAY = 0.98  # of what is known of all sequences, by each proposal after it
_HOPEFUL_RATE = 0.95  # if no sequence pays with this rate, none is looked at


class Proposer(Protocol):
    """Belongs to one sequence."""

    def propose(self, token_ids: list[int], count: int) -> Proposal | None:
        """Returns up to `count` tokens that may follow the text, if it has any idea."""
        ...


@dataclass(slots=True)
class _State:
    """What is known of one sequence."""

    proposer: Proposer
    rates: list[AcceptanceRate] = field(default_factory=lambda: [AcceptanceRate() for _ in LENGTHS])
    kind: int = 0  # of the proposal that is verified
    # A proposal that was not verified, and the length of its text: what is sampled says later whether it was right.
    unverified: Proposal | None = None
    unverified_at: int = 0


def may_speculate(sequence: Sequence) -> bool:
    """Returns whether the sequence's tokens are ever proposed.

    A grammar's are not: its mask follows from the text, and what it leaves no choice about follows unsampled already.
    Log-probabilities of the prompt go out with a first token of their own.
    """
    return sequence.sampling.grammar is None and sequence.num_output_tokens > 0


class Speculator:
    def __init__(
        self,
        num_tokens: int,
        clock: Callable[[], float],
        always: bool = False,
        make_proposer: Callable[[Sequence], Proposer] = lambda one: PromptLookup(
            one.num_prompt_tokens + one.sampling.max_tokens
        ),
    ) -> None:
        """`num_tokens`: at most so many are proposed to a sequence at a time. `clock` returns seconds, with which the
        search for proposals is charged. `always`: whatever is proposed is verified, whether or not it pays."""
        self._num_tokens = num_tokens
        self._clock = clock
        self._always = always
        self._make_proposer = make_proposer
        self._states: dict[Sequence, _State] = {}
        self._costs = StepCostTable()
        self._ledger = SpeculationLedger()
        self._rates = [AcceptanceRate(decay=_FLEET_DECAY) for _ in LENGTHS]
        self._looked_s = 0.0  # for proposals since the last step ended

    # Proposals.

    def may_pay(self, num_sequences: int) -> bool:
        """Returns whether looking for proposals is worth while in a step of so many sequences."""
        if self._always:
            return True
        if not self._ledger.is_open or not self._costs.knows(num_sequences):
            return False
        hopeful = [Candidate(self._num_tokens, _HOPEFUL_RATE)] * min(num_sequences, 32)
        return any(choose_lengths(num_sequences, hopeful, self._costs))

    def propose(
        self, sequences: Collection[Sequence], num_left: Callable[[Sequence], int], limit: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """Returns the tokens to verify, `limit` at most; `sequences` are all that the step samples.

        `num_left`: how many tokens a sequence may still get, of which the step samples one more than it verifies.
        """
        started_s = self._clock()
        found: dict[Sequence, Proposal] = {}
        for sequence in sequences:
            if may_speculate(sequence):
                proposal = self._look(sequence, min(self._num_tokens, limit, num_left(sequence) - 1))
                if proposal is not None:
                    found[sequence] = proposal
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

    def _look(self, sequence: Sequence, count: int) -> Proposal | None:
        if count <= 0:
            return None
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = _State(self._make_proposer(sequence))
        self._judge_unverified(sequence, state)
        proposal = state.proposer.propose(sequence.token_ids, count)
        return proposal if proposal is not None and proposal.token_ids else None

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

    def _lengths(self, num_sequences: int, found: Mapping[Sequence, Proposal]) -> list[int]:
        if self._always:
            return [len(proposal.token_ids) for proposal in found.values()]
        candidates = [
            Candidate(len(proposal.token_ids), self._rate(self._states[sequence], proposal.kind))
            for sequence, proposal in found.items()
        ]
        return choose_lengths(num_sequences, candidates, self._costs)

    def _rate(self, state: _State, kind: int) -> float:
        return state.rates[kind].given(self._rates[kind].given(_FIRST_RATES[kind]))

    # What becomes of them.

    def on_verified(self, sequence: Sequence, num_proposed: int, num_held: int) -> None:
        state = self._states.get(sequence)
        if state is not None:
            self._observe(state, state.kind, num_proposed, num_held)

    def _observe(self, state: _State, kind: int, num_proposed: int, num_held: int) -> None:
        for rate in (state.rates[kind], self._rates[kind]):
            rate.observe(num_proposed, num_held)

    def on_step(self, num_sequences: int, num_proposed: int, num_further: int, elapsed_s: float) -> None:
        """Notes that a step has ended which computed the last token of so many sequences, and these proposed tokens:
        it has yielded `num_further` tokens beyond one for each sequence. Chunks of prompts were not among its work."""
        looked_s, self._looked_s = self._looked_s, 0.0
        self._costs.observe(num_sequences + num_proposed, max(elapsed_s - looked_s, 1e-9))
        plain_s = self._costs.predict(num_sequences)
        self._ledger.on_step(elapsed_s, plain_s)
        if num_proposed:
            self._ledger.add((1 + num_further / num_sequences) * plain_s - elapsed_s, plain_s)
        else:
            self._ledger.add(-looked_s, plain_s)

    def forget(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)
