"""Defines the whole-loop workloads of `benchmarks.engine`. vLLM's process imports it, too, so it uses only the standard
library.

The time of a decode step is a sixteenth of that of sixteen more tokens of a batch, because no engine exposes a single
step to its caller. Prompts of decode workloads are computed before, so that all but their last token is cached and all
sequences decode from the first step on. Prompts whose own time is measured are new each time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

BATCHES, CONTEXT, PROMPTS, MORE_TOKENS = (1, 16, 64), 512, (512, 2048), 16
REQUESTS, REQUEST_TOKENS, NEW_TOKENS = 16, 256, 32
# Tokens of one step, and of the KV that exists at once, with room for cached prompts.
BATCH_TOKENS, KV_TOKENS = 4096, 80_000
VOCAB_SIZE = 32000


@dataclass(frozen=True, slots=True)
class RequestBurst:
    """Requests that arrive all at once."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    seed: int

    def prompts(self) -> list[list[int]]:
        """Returns prompts that begin differently for another batch size, length or seed, so that none shares a page."""
        rng = random.Random(f"{self.batch} {self.prompt_tokens} {self.seed}")
        return [rng.choices(range(3, VOCAB_SIZE), k=self.prompt_tokens) for _ in range(self.batch)]

    def to_json(self) -> dict[str, int]:
        return asdict(self)


Answer = Callable[[RequestBurst], float]  # seconds


@dataclass(frozen=True, slots=True)
class LoopWorkload:
    """Requests to time: the time of `more` minus that of `less`, or all of `more`."""

    name: str
    more: tuple[int, int, int]  # requests, tokens in, tokens out
    less: tuple[int, int, int] | None = None
    steps: int = 1  # steps by which `more` exceeds `less`
    is_cached: bool = False

    def time_round(self, answer: Answer, number: int) -> tuple[float, float]:
        """Returns the seconds of `more` and of `less` in round `number`."""
        seed = 0 if self.is_cached else number + 1
        answer(RequestBurst(*self.more, -seed))  # not timed: fills the prefix cache, or the CPU cache
        less_s = answer(RequestBurst(*self.less, seed)) if self.less is not None else 0.0
        return answer(RequestBurst(*self.more, seed)), less_s


def loop_workloads() -> list[LoopWorkload]:
    decodes = [
        LoopWorkload(
            f"decode step, {batch} at {CONTEXT}, whole loop",
            (batch, CONTEXT + 1, 1 + MORE_TOKENS),
            (batch, CONTEXT + 1, 1),
            MORE_TOKENS,
            is_cached=True,
        )
        for batch in BATCHES
    ]
    prompts = [LoopWorkload(f"prompt of {count}, whole loop", (1, count, 1)) for count in PROMPTS]
    return [*decodes, *prompts, LoopWorkload(REQUESTS_NAME, (REQUESTS, REQUEST_TOKENS, NEW_TOKENS))]


REQUESTS_NAME = f"{REQUESTS} requests, {REQUEST_TOKENS} in, {NEW_TOKENS} out"


def time_in_turns(workload: LoopWorkload, subjects: Mapping[str, Answer], rounds: int) -> dict[str, float]:
    """Returns the seconds of each subject by its quickest answers, since other work on the machine only adds time."""
    most, least = dict.fromkeys(subjects, float("inf")), dict.fromkeys(subjects, float("inf"))
    for number in range(rounds):
        for name, answer in subjects.items():
            more_s, less_s = workload.time_round(answer, number)
            most[name], least[name] = min(most[name], more_s), min(least[name], less_s)
    return {name: (most[name] - least[name]) / workload.steps for name in subjects}
