"""Judges whether new workers do as well as those that they replace. Pure.

Both sides are measured at the same time on shares of the same traffic, so a busy hour counts against neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from penstock.v1 import worker_pb2

_PATIENCE = 3  # windows, after which too few requests are a finding
_LAST = 10  # windows, after which the available sample decides; one without a request that was served decides nothing
WITHOUT_EVIDENCE = "without evidence"  # part of the reason if the gate opened without any
_FEW = 4  # times fewer requests than the new workers' share: routers do not send them there
_MIN_FAILURES = 3  # at new workers, that count before the sample is large enough
_SLACK_S = 0.010  # by which a mean may always be longer: noise of short times


@dataclass(frozen=True, slots=True)
class UpgradeGate:
    """Conditions for removing the old workers."""

    window_s: float = 60.0
    min_requests: int = 20
    max_error_rate: float = 0.01
    max_slowdown: float = 1.5  # ratio of mean times, new workers to old ones
    ttft_s: float | None = None  # absolute bound on the mean, instead of the ratio
    itl_s: float | None = None
    without_evidence: bool = False  # open although new workers served no request


@dataclass(frozen=True, slots=True)
class RequestSample:
    """Outcomes of requests at some workers."""

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

    def since(self, before: RequestSample) -> RequestSample:
        return RequestSample(
            self.ended - before.ended,
            self.failed - before.failed,
            self.first_token_s - before.first_token_s,
            self.decode_s - before.decode_s,
            self.decode_tokens - before.decode_tokens,
        )


def sum_totals(totals: Iterable[worker_pb2.RequestTotals]) -> RequestSample:
    """Sums the totals of several workers."""
    workers = list(totals)
    return RequestSample(
        sum(worker.ended for worker in workers),
        sum(worker.failed for worker in workers),
        sum(worker.first_token_s for worker in workers),
        sum(worker.decode_s for worker in workers),
        sum(worker.decode_tokens for worker in workers),
    )


class GateDecision(StrEnum):
    """The gate's decision."""

    WAIT = "wait"
    PASS = "pass"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """A decision and its reason."""

    decision: GateDecision
    reason: str


def judge_upgrade(
    gate: UpgradeGate, share: float, old: RequestSample, new: RequestSample, elapsed_s: float
) -> GateVerdict:
    """Judges requests since both cohorts serve, the new one its `share`, `elapsed_s` ago."""
    counts = f"{new.num_requests} requests at new workers, {old.num_requests} at old ones, in {elapsed_s:.0f} s"
    if problem := excess_errors(gate, old, new):
        return GateVerdict(GateDecision.FAIL, problem)
    if elapsed_s < gate.window_s:
        return GateVerdict(GateDecision.WAIT, counts)
    if new.num_requests < max(1, gate.min_requests):
        if elapsed_s >= _PATIENCE * gate.window_s:
            total = old.num_requests + new.num_requests
            if total * share > _FEW * (new.num_requests + 1):
                return GateVerdict(GateDecision.FAIL, f"new workers receive hardly any requests: {counts}")
            if total < gate.min_requests and new.ended and not new.failed:
                return GateVerdict(GateDecision.PASS, f"little traffic to judge by and no error: {counts}")
            if not new.num_requests and gate.without_evidence:
                return GateVerdict(GateDecision.PASS, f"{WITHOUT_EVIDENCE}: {counts}")
        if elapsed_s < _LAST * gate.window_s:
            return GateVerdict(GateDecision.WAIT, f"{counts}; {gate.min_requests} are required")
        if not new.ended:
            return GateVerdict(
                GateDecision.FAIL,
                f"no evidence: new workers served no request ({counts}); upgrade while there is traffic, "
                "or give --without-evidence",
            )
        if new.error_rate > _allowed_errors(gate, old):
            return GateVerdict(GateDecision.FAIL, _describe_errors(old, new))
    for name, mean_s, old_mean_s, limit_s in (
        ("first token", new.ttft_s, old.ttft_s, gate.ttft_s),
        ("token", new.itl_s, old.itl_s, gate.itl_s),
    ):
        if limit_s is not None and mean_s > limit_s:
            return GateVerdict(
                GateDecision.FAIL, f"a {name} takes {mean_s * 1e3:.1f} ms, more than {limit_s * 1e3:.1f}"
            )
        compared = old.ended >= gate.min_requests
        if limit_s is None and compared and mean_s > old_mean_s * gate.max_slowdown + _SLACK_S:
            means = f"a {name} takes {mean_s * 1e3:.1f} ms at new workers, {old_mean_s * 1e3:.1f} at old ones"
            return GateVerdict(GateDecision.FAIL, f"{means}: more than {gate.max_slowdown:g} times as long")
    return GateVerdict(GateDecision.PASS, counts)


def excess_errors(gate: UpgradeGate, old: RequestSample, new: RequestSample) -> str:
    """Returns why new workers fail too often, or ""."""
    enough = new.num_requests >= gate.min_requests or new.failed >= _MIN_FAILURES
    return _describe_errors(old, new) if enough and new.error_rate > _allowed_errors(gate, old) else ""


def _allowed_errors(gate: UpgradeGate, old: RequestSample) -> float:
    return max(gate.max_error_rate, 2 * old.error_rate)


def _describe_errors(old: RequestSample, new: RequestSample) -> str:
    failures = f"{new.failed} of {new.num_requests} requests failed at new workers"
    return f"{failures}, {old.failed} of {old.num_requests} at old ones"
