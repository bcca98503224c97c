"""Judges whether a worker computes correctly: every worker answers one fixed prompt, and all answers must agree.

Pure. The right answer is the one that most workers gave, and among equals the one given first. A lone first worker is
therefore believed until two others contradict it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.types import WorkerId

# Allowed difference of a log-probability between two workers with the same weights: batches, kernels and devices round
# differently, and with experts a rounding may choose another expert. Wrong KV or weights move it by whole units.
TOLERANCE = 0.5
PROMPT = tuple(5 + (number * 37) % 240 for number in range(256))  # token ids that every vocabulary has
NUM_TOKENS = 8  # of an answer
NUM_ALTERNATIVES = 4  # returned with each token


@dataclass(frozen=True, slots=True)
class CanaryToken:
    """A greedy token, and the log-probabilities of the likeliest tokens at its position, itself included."""

    token_id: int
    likeliest: Mapping[int, float]

    @property
    def logprob(self) -> float:
        return self.likeliest[self.token_id]


Answer = tuple[CanaryToken, ...]


def disagreement(answer: Answer, right: Answer) -> str:
    """Returns what is wrong with the answer, or "".

    Two correct answers may diverge where two tokens are about equally likely; what follows then cannot be compared.
    """
    if len(answer) != len(right):
        return f"{len(answer)} tokens instead of {len(right)}"
    for position, (said, known) in enumerate(zip(answer, right, strict=True)):
        expected = known.likeliest.get(said.token_id, -math.inf)
        if not abs(said.logprob - expected) <= TOLERANCE:  # not `>`, which is false for a NaN
            return (
                f"token {position} is {said.token_id} with log-probability {said.logprob:.3f}, "
                f"not {known.token_id} with {known.logprob:.3f}"
            )
        if said.token_id != known.token_id:
            return "" if known.logprob - expected <= TOLERANCE else f"token {position} is an unlikely {said.token_id}"
    return ""


@dataclass(slots=True)
class _Opinion:
    answer: Answer
    voters: set[WorkerId] = field(default_factory=set)


class CanaryJudge:
    """Remembers which worker gave which answer to each question; a question is a prompt to a revision of the model."""

    def __init__(self, kept: str = "") -> None:
        """`kept` is the `to_json` of an earlier judge."""
        self._opinions: dict[str, list[_Opinion]] = {}
        for question, opinions in (json.loads(kept) if kept else {}).items():
            self._opinions[question] = [
                _Opinion(
                    tuple(CanaryToken(token, dict(pairs)) for token, pairs in opinion["said"]), set(opinion["voters"])
                )
                for opinion in opinions
            ]

    def hear(self, worker_id: WorkerId, question: str, answer: Answer) -> str:
        """Counts the answer and returns what is wrong with it, or "". A worker has one vote: its last answer."""
        opinions = self._opinions.setdefault(question, [])
        for opinion in opinions:
            opinion.voters.discard(worker_id)
        own = next((opinion for opinion in opinions if not disagreement(answer, opinion.answer)), None)
        if own is None:
            own = _Opinion(answer)
            if all(math.isfinite(said.logprob) for said in answer):
                opinions.append(own)
        own.voters.add(worker_id)
        right = max(opinions, key=lambda opinion: len(opinion.voters), default=None)  # the first of equals
        return disagreement(answer, right.answer) if right else "log-probabilities that are not numbers"

    def to_json(self) -> str:
        def plain(opinion: _Opinion) -> Mapping[str, object]:
            said = [(token.token_id, list(token.likeliest.items())) for token in opinion.answer]
            return {"said": said, "voters": sorted(opinion.voters)}

        return json.dumps({question: list(map(plain, opinions)) for question, opinions in self._opinions.items()})
