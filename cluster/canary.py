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
# differently. Wrong KV or weights move it by whole units.
TOLERANCE = 0.25
PROMPT = tuple(5 + (number * 37) % 240 for number in range(256))  # token ids that every vocabulary has
NUM_TOKENS = 8  # of an answer


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, each with its log-probability."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def disagreement(answer: Answer, right: Answer) -> str:
    """What is wrong with the answer; "" where nothing is.

    Tokens may part where two were about as likely; what follows then has nothing to be compared with.
    """
    if len(answer.token_ids) != len(right.token_ids):
        return f"{len(answer.token_ids)} tokens instead of {len(right.token_ids)}"
    pairs = zip(answer.token_ids, right.token_ids, answer.logprobs, right.logprobs, strict=True)
    for position, (token, right_token, logprob, right_logprob) in enumerate(pairs):
        if not math.isfinite(logprob) or abs(logprob - right_logprob) > TOLERANCE:
            return (
                f"token {position} is {token} with log-probability {logprob:.3f}, "
                f"not {right_token} with {right_logprob:.3f}"
            )
        if token != right_token:
            return ""
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
        for revision, answers in (json.loads(kept) if kept else {}).items():
            self._opinions[revision] = [
                _Opinion(Answer(tuple(one["token_ids"]), tuple(one["logprobs"])), set(one["voters"])) for one in answers
            ]

    def hear(self, worker_id: WorkerId, question: str, answer: Answer) -> str:
        """What is wrong with it; "" where nothing is. A worker has one vote: its last."""
        opinions = self._opinions.setdefault(question, [])
        for one in opinions:
            one.voters.discard(worker_id)
        own = next((one for one in opinions if not disagreement(answer, one.answer)), None)
        if own is None:
            own = _Opinion(answer)
            if all(map(math.isfinite, answer.logprobs)):
                opinions.append(own)
        own.voters.add(worker_id)
        right = max(opinions, key=lambda one: len(one.voters), default=None)  # the first of equals
        return disagreement(answer, right.answer) if right else "log-probabilities that are no numbers"

    def to_json(self) -> str:
        def plain(one: _Opinion) -> Mapping[str, object]:
            answer = one.answer
            return {"token_ids": answer.token_ids, "logprobs": answer.logprobs, "voters": sorted(one.voters)}

        return json.dumps({revision: [plain(one) for one in many] for revision, many in self._opinions.items()})
