"""Decides whether the deployment withstood an attack, by what the witness and the router showed before and during it.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MIB = 1 << 20


class Breach(Exception):
    """The deployment did not withstand an attack."""


@dataclass(frozen=True, slots=True)
class Window:
    """The witness's observations in one stretch of time."""

    pause_s: float  # longest time to the answer of a probe, minus the witness's own delays
    itl_s: float  # mean time between two tokens of a stream, open gaps included
    worst_gap_s: float
    num_tokens: int
    num_probes: int
    failures: tuple[str, ...] = ()  # failures of its streams and probes
    idle_pause_s: float = 0.0  # `pause_s` of a separate server that does nothing else


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of a router's process."""

    before: int
    peak: int
    after: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits within which an attack counts as withstood.

    Two of them are relative to the machine, which has other work and is shared with the attacker: a router may take
    twice as long as an idle server on the same machine, and the ITL may rise as other work leaves fewer cores. If an
    attack differs from ordinary use in one thing, the ITL may also be a little above that during such use.
    """

    pause_s: float = 0.25  # the router's; a healthy one takes 10 to 50 ms
    itl_ratio: float = 2.0
    ordinary_itl_ratio: float = 1.25  # multiple of the ITL during ordinary use
    peak_bytes: int = 384 * MIB  # above what the router held before
    kept_bytes: int = 96 * MIB


@dataclass(frozen=True, slots=True)
class AttackOutcome:
    """An attack and its effects."""

    name: str
    took_s: float
    before: Window
    during: Window
    memory: Memory
    breach: str = ""
    replaced: tuple[str, ...] = ()  # processes that ended during the attack
    cores_before: float = 1.0  # cores that the machine's other work left, before and during the attack
    cores_during: float = 1.0
    ordinary: Window | None = None  # during ordinary use of the same size, if the attack has any

    @property
    def itl_ratio(self) -> float:
        return self.during.itl_s / self.before.itl_s if self.before.itl_s else 0.0

    def _longest_itl_s(self, bounds: Bounds) -> float:
        slowed = self.before.itl_s * bounds.itl_ratio * max(1.0, self.cores_before / self.cores_during)
        return max(slowed, self.ordinary.itl_s * bounds.ordinary_itl_ratio if self.ordinary else 0.0)

    def faults(self, bounds: Bounds) -> list[str]:
        """Lists why the deployment did not withstand the attack; empty if it did."""
        found = []
        if self.breach:
            found.append(self.breach)
        if self.replaced:
            found.append(f"ended: {', '.join(self.replaced)}")
        if self.during.failures:
            found.append(f"{len(self.during.failures)} requests of others failed, such as: {self.during.failures[0]}")
        if not self.during.num_tokens:
            found.append("other streams got no token")
        elif self.during.itl_s > self._longest_itl_s(bounds):
            cores = f"{self.cores_before:.1f} cores before, {self.cores_during:.1f} during it"
            found.append(f"ITL during it {self.itl_ratio:.1f} times as long ({cores})")
        pause_limit_s = max(bounds.pause_s, 2 * self.before.pause_s, 2 * self.during.idle_pause_s)
        if self.during.pause_s > pause_limit_s:
            found.append(f"router silent for {self.during.pause_s:.2f} s")
        if self.memory.peak - self.memory.before > bounds.peak_bytes:
            found.append(f"router's memory grew by {(self.memory.peak - self.memory.before) // MIB} MiB")
        elif self.memory.after - self.memory.before > bounds.kept_bytes:
            found.append(f"router kept {(self.memory.after - self.memory.before) // MIB} MiB")
        return found


@dataclass(slots=True)
class StreamGaps:
    """Collects the gaps between the tokens of one stream, in seconds of any clock."""

    last_s: float | None = None
    total_s: float = 0.0
    worst_s: float = 0.0
    num_tokens: int = 0

    def on_tokens(self, count: int, now_s: float) -> None:
        """Counts tokens that arrived together; the first tokens of a stream begin its first gap."""
        if self.last_s is not None:
            self._add(now_s - self.last_s)
            self.num_tokens += count
        self.last_s = now_s

    def on_end(self) -> None:
        self.last_s = None

    def cut(self, now_s: float) -> None:
        """Ends the window: an open gap counts up to now."""
        if self.last_s is not None:
            self._add(now_s - self.last_s)
            self.last_s = now_s

    def _add(self, gap_s: float) -> None:
        self.total_s += gap_s
        self.worst_s = max(self.worst_s, gap_s)


@dataclass(slots=True)
class WindowSums:
    """Builds a window from several streams and the probes."""

    gaps: list[StreamGaps]
    pause_s: float = 0.0
    idle_pause_s: float = 0.0
    num_probes: int = 0
    failures: list[str] = field(default_factory=list)

    def close(self, now_s: float) -> Window:
        """Returns the window up to now and begins the next one."""
        for each in self.gaps:
            each.cut(now_s)
        total_s, num_tokens = sum(each.total_s for each in self.gaps), sum(each.num_tokens for each in self.gaps)
        window = Window(
            pause_s=self.pause_s,
            itl_s=total_s / num_tokens if num_tokens else 0.0,
            worst_gap_s=max((each.worst_s for each in self.gaps), default=0.0),
            num_tokens=num_tokens,
            num_probes=self.num_probes,
            failures=tuple(self.failures),
            idle_pause_s=self.idle_pause_s,
        )
        for each in self.gaps:
            each.total_s, each.worst_s, each.num_tokens = 0.0, 0.0, 0
        self.pause_s, self.idle_pause_s, self.num_probes, self.failures = 0.0, 0.0, 0, []
        return window


def are_withstood(outcomes: Sequence[AttackOutcome], bounds: Bounds) -> bool:
    return not any(outcome.faults(bounds) for outcome in outcomes)
