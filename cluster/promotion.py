"""Whether new workers do as well as those that they are to replace. Pure.

Both sides are measured at the same time and on a share of the same traffic, so a busy hour is held against neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from penstock.v1 import worker_pb2

_PATIENCE = 3  # windows, after which it is asked why there are so few requests
_LAST = 10  # windows, after which what there is must do
_FEW = 4  # times fewer requests than new workers' share: routers do not send them there
_PLAIN_FAILURES = 3  # of new workers that wait for no sample
_SLACK_S = 0.010  # by which a mean may be longer whatever the ratio: noise of short times


@dataclass(frozen=True, slots=True)
class Gate:
    """What must hold before the old workers go."""

    window_s: float = 60.0
    min_requests: int = 20
    max_error_rate: float = 0.01
    max_slowdown: float = 1.5  # of a mean time at new workers against the old ones
    ttft_s: float | None = None  # means that must hold whatever the old workers do
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """What became of requests at some workers."""

    ended: int = 0
    failed: int = 0
    first_token_s: float = 0.0  # sum
    decode_s: float = 0.0  # sum
    decode_tokens: int = 0

    @property
    def num_requests(self) -> int:
        return self.ended + self.failed

    @property
    def error_rate(self) -> float:
        return self.failed / self.num_requests if self.num_requests else 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s / self.ended if self.ended else 0.0

    @property
    def itl_s(self) -> float:
        return self.decode_s / self.decode_tokens if self.decode_tokens else 0.0

    def since(self, before: Sample) -> Sample:
        return Sample(
            self.ended - before.ended,
            self.failed - before.failed,
            self.first_token_s - before.first_token_s,
            self.decode_s - before.decode_s,
            self.decode_tokens - before.decode_tokens,
        )


def add_up(totals: Iterable[worker_pb2.RequestTotals]) -> Sample:
    every = list(totals)
    return Sample(
        sum(one.ended for one in every),
        sum(one.failed for one in every),
        sum(one.first_token_s for one in every),
        sum(one.decode_s for one in every),
        sum(one.decode_tokens for one in every),
    )


class Decision(StrEnum):
    WAIT = "wait"
    PASS = "pass"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Verdict:
    decision: Decision
    reason: str


def judge(gate: Gate, share: float, old: Sample, new: Sample, elapsed_s: float) -> Verdict:
    """Of what happened since both sides serve, new workers their share."""
    counts = f"{new.num_requests} requests at new workers, {old.num_requests} at old ones, in {elapsed_s:.0f} s"
    if problem := errors(gate, old, new):
        return Verdict(Decision.FAIL, problem)
    if elapsed_s < gate.window_s:
        return Verdict(Decision.WAIT, counts)
    if new.num_requests < gate.min_requests and elapsed_s < _LAST * gate.window_s:
        total = old.num_requests + new.num_requests
        if elapsed_s >= _PATIENCE * gate.window_s:
            if total * share > _FEW * (new.num_requests + 1):
                return Verdict(Decision.FAIL, f"new workers are hardly asked: {counts}")
            if total < gate.min_requests:
                return Verdict(Decision.PASS, f"no traffic to judge by, and no error: {counts}")
        return Verdict(Decision.WAIT, f"{counts}; {gate.min_requests} are wanted")
    for name, mean_s, old_mean_s, limit_s in (
        ("first token", new.ttft_s, old.ttft_s, gate.ttft_s),
        ("token", new.itl_s, old.itl_s, gate.itl_s),
    ):
        if limit_s is not None and mean_s > limit_s:
            return Verdict(Decision.FAIL, f"a {name} takes {mean_s * 1e3:.1f} ms, more than {limit_s * 1e3:.1f}")
        compared = old.ended >= gate.min_requests
        if limit_s is None and compared and mean_s > old_mean_s * gate.max_slowdown + _SLACK_S:
            told = f"a {name} takes {mean_s * 1e3:.1f} ms at new workers, {old_mean_s * 1e3:.1f} at old ones"
            return Verdict(Decision.FAIL, f"{told}: more than {gate.max_slowdown:g} times as long")
    return Verdict(Decision.PASS, counts)


def errors(gate: Gate, old: Sample, new: Sample) -> str:
    """Why new workers fail too often, at any moment; "" where they do not."""
    enough = new.num_requests >= gate.min_requests or new.failed >= _PLAIN_FAILURES
    if enough and new.error_rate > max(gate.max_error_rate, 2 * old.error_rate):
        told = f"{new.failed} of {new.num_requests} requests failed at new workers"
        return f"{told}, {old.failed} of {old.num_requests} at old ones"
    return ""
