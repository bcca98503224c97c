"""Whether a worker's answers are right: every worker answers one fixed prompt, and all must agree.

Pure. What is right is what most workers say; between equals, what was said first. A lone first worker is therefore
believed, until two others say otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.types import WorkerId

# Of a log-probability, between one worker and another of the same weights: batches, kernels and devices round
# differently, and with experts a rounding may choose another one. Wrong KV or weights move it by whole units.
TOLERANCE = 0.5
PROMPT = tuple(5 + (number * 37) % 240 for number in range(256))  # token ids that every vocabulary has
NUM_TOKENS = 8  # of an answer
NUM_ALTERNATIVES = 4  # told with each token


@dataclass(frozen=True, slots=True)
class Said:
    """One greedy token, and the likeliest ones at its place, itself among them, with their log-probabilities."""

    token_id: int
    likeliest: Mapping[int, float]

    @property
    def logprob(self) -> float:
        return self.likeliest[self.token_id]


Answer = tuple[Said, ...]


def disagreement(answer: Answer, right: Answer) -> str:
    """What is wrong with the answer; "" where nothing is.

    Two may part where they find two tokens about as likely as each other; what follows then cannot be compared.
    """
    if len(answer) != len(right):
        return f"{len(answer)} tokens instead of {len(right)}"
    for position, (said, known) in enumerate(zip(answer, right, strict=True)):
        # "not <=": a NaN is near to nothing.
        expected = known.likeliest.get(said.token_id, -math.inf)
        if not abs(said.logprob - expected) <= TOLERANCE:
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


class Judge:
    """Remembers who said what to each question; a question is a prompt to a revision of the model."""

    def __init__(self, kept: str = "") -> None:
        """`kept` is what an earlier judge's `to_json` gave."""
        self._opinions: dict[str, list[_Opinion]] = {}
        for question, answers in (json.loads(kept) if kept else {}).items():
            self._opinions[question] = [
                _Opinion(tuple(Said(token, dict(pairs)) for token, pairs in one["said"]), set(one["voters"]))
                for one in answers
            ]

    def hear(self, worker_id: WorkerId, question: str, answer: Answer) -> str:
        """What is wrong with it; "" where nothing is. A worker has one vote: its last."""
        opinions = self._opinions.setdefault(question, [])
        for one in opinions:
            one.voters.discard(worker_id)
        own = next((one for one in opinions if not disagreement(answer, one.answer)), None)
        if own is None:
            own = _Opinion(answer)
            if all(math.isfinite(said.logprob) for said in answer):
                opinions.append(own)
        own.voters.add(worker_id)
        right = max(opinions, key=lambda one: len(one.voters), default=None)  # the first of equals
        return disagreement(answer, right.answer) if right else "log-probabilities that are no numbers"

    def to_json(self) -> str:
        def plain(one: _Opinion) -> Mapping[str, object]:
            said = [(said.token_id, list(said.likeliest.items())) for said in one.answer]
            return {"said": said, "voters": sorted(one.voters)}

        return json.dumps({question: [plain(one) for one in many] for question, many in self._opinions.items()})
