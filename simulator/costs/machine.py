"""Describes what a machine does to the steps of its workers: it shares cores between them, and times spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import InvalidInput


class StepKind(StrEnum):
    """Kinds of steps whose times spread differently."""

    DECODE = "decode"
    PREFILL = "prefill"  # of a prefill worker
    CHUNK = "chunk"  # of a decode worker, with prompts


@dataclass(frozen=True, slots=True)
class FrontThread:
    """Processor time of the one thread in which a router, or a client, does its work."""

    request_s: float = 0.0  # for a request until it is placed
    frame_s: float = 0.0  # for a message of a worker
    token_s: float = 0.0  # for each sequence in the message


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Cores that all workers share with routers and clients.

    While more threads compute than there are cores, all of them take longer by the same factor, threads / cores.
    """

    num_cores: int
    decode_threads: float = 1.0  # mean number of a worker's busy threads in a decode step
    prompt_threads: float = 1.0  # in a step with prompts
    router: FrontThread = FrontThread()
    client: FrontThread = FrontThread()

    def __post_init__(self) -> None:
        if self.num_cores < 1 or not min(self.decode_threads, self.prompt_threads) > 0:
            raise InvalidInput(
                "cores",
                f"{self.num_cores} cores, {self.decode_threads} and {self.prompt_threads} threads; "
                "give at least one core and more than no thread",
            )

    def step_threads(self, kind: StepKind) -> float:
        """Returns the mean number of busy threads of a worker during such a step."""
        return self.decode_threads if kind is StepKind.DECODE else self.prompt_threads

    def slowness(self, num_threads: float) -> float:
        """Returns the time of work relative to that on a core of its own."""
        return max(1.0, num_threads / self.num_cores)


@dataclass(frozen=True, slots=True)
class StepSpread:
    """Measured times over costs: `quantiles` at even distances from the least to the largest, by kind of step.

    A worker stays as slow or as fast for `spell_s`.
    """

    quantiles: Mapping[str, Sequence[float]]
    spell_s: float

    def __post_init__(self) -> None:
        if not self.spell_s > 0:
            raise InvalidInput("spread", f"spell_s = {self.spell_s}; give a time above 0")
        for kind in StepKind:
            if len(self.quantiles.get(kind, ())) < 2:
                raise InvalidInput(
                    "spread", f"fewer than two quantiles of {kind} steps; write the file with `penstock fit`"
                )

    def slowness(self, kind: StepKind, share: float) -> float:
        """Returns the quantile of that share, between 0 and 1."""
        values = self.quantiles[kind]
        place = share * (len(values) - 1)
        low = min(int(place), len(values) - 2)
        return values[low] + (values[low + 1] - values[low]) * (place - low)
