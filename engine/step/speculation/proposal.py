"""Defines proposals and the interfaces of their proposers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from engine.step.sequence import Sequence


class ProposalKind(Enum):
    """Proposals of one kind hold about equally often. The value names the proposer, for metrics."""

    LONG_MATCH = "prompt_lookup_long"
    SHORT_MATCH = "prompt_lookup_short"
    DRAFT = "draft_model"
    EAGLE3 = "eagle3"
    MTP = "mtp"


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a text."""

    token_ids: tuple[int, ...]
    kind: ProposalKind


class Proposer(Protocol):
    """Proposes tokens for many sequences, each of which only grows."""

    def propose(self, counts: Mapping[Sequence, int]) -> Mapping[Sequence, Proposal]:
        """Returns up to that many tokens that may follow each text, for the sequences for which it finds any."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drops what is kept for a sequence, if anything is."""
        ...


class DraftProposer(Proposer, Protocol):
    """Computes its proposals token by token, so their cost can be predicted."""

    @property
    def kind(self) -> ProposalKind:
        """The kind of all its proposals."""
        ...

    @property
    def reads_states(self) -> bool:
        """Returns whether it drafts from the target's hidden states, which steps then hand out."""
        ...

    def is_ready(self, sequence: Sequence) -> bool:
        """Returns whether `propose` can draft for the sequence now."""
        ...

    def predict_s(self, num_sequences: int) -> float | None:
        """Returns the seconds that one more token for each of that many sequences takes; None if never measured."""
        ...

    def has_room(self, sequence: Sequence, count: int) -> bool:
        """Returns whether `count` tokens of a sequence can be drafted now. Drops the state of a sequence that
        has outgrown the proposer."""
        ...
