"""Computes the figures of one run: latencies, rates, SLOs, and tables by prompt length and lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.bench.results.quantiles import Quantiles
from penstock.bench.results.record import Ending, RequestRecord, RunRecord
from penstock.bench.results.slo import SloSet

LATENCIES: Mapping[str, Callable[[RequestRecord], Iterable[float]]] = {
    "TTFT": lambda request: () if request.ttft_s is None else (request.ttft_s,),
    "ITL": lambda request: request.gaps_s,
    "TPOT": lambda request: () if request.tpot_s is None else (request.tpot_s,),
    "E2E": lambda request: (request.e2e_s,) if request.ending is Ending.COMPLETE else (),
}
_CLASS_BOUNDS = (256, 1024, 4096, 16384, 65536)
_MAX_LATE_S, _MAX_LATE_SHARE = 0.005, 0.05  # latest acceptable sends, absolute and as a share of the median TTFT
_MAX_LAG_S, _MAX_LAG_SHARE = 0.003, 0.1  # largest acceptable lag of the loop, absolute and as a share of the median ITL


@dataclass(frozen=True, slots=True)
class SloFigures:
    """The number of requests that met an SLO. Failures and refusals count as misses; requests that the generator
    cancelled do not count.
    """

    slo: str
    num_met: int
    num_judged: int
    goodput: float  # requests/s that met the SLO

    @property
    def attainment(self) -> float:
        return self.num_met / self.num_judged if self.num_judged else 0.0


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """Latencies of a named group of a run's requests."""

    name: str
    num_requests: int
    num_failed: int
    latencies: Mapping[str, Quantiles | None]
    attainments: Sequence[float]  # one for each SLO


@dataclass(frozen=True, slots=True)
class GeneratorError:
    """The generator's own error."""

    late: Quantiles | None  # how late requests were sent
    lag: Quantiles | None  # how late its event loop was
    warnings: Sequence[str]


@dataclass(frozen=True, slots=True)
class RunFigures:
    """All reported figures of one run."""

    num_requests: int
    endings: Mapping[str, int]  # numbers by kind; kinds that did not occur are left out
    errors: Mapping[str, str]  # an example of each kind of failure
    elapsed_s: float
    offered_per_s: float  # requests sent, divided by the time that sending took
    completed_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    hit_rate: float | None  # cached share of the prompt tokens; None: not reported
    length_ratio: float | None  # prompt tokens that the server counted, divided by those planned
    latencies: Mapping[str, Quantiles | None]
    slos: Sequence[SloFigures]
    by_length: Sequence[GroupFigures]
    by_lane: Sequence[GroupFigures]
    generator: GeneratorError


def figures_of(run: RunRecord, slos: Sequence[SloSet]) -> RunFigures:
    """Returns the figures of a run."""
    requests = run.requests
    elapsed_s = max(run.elapsed_s, 1e-9)
    complete = [request for request in requests if request.ending is Ending.COMPLETE]
    counted = [request for request in requests if request.prompt_tokens is not None]
    prompt_tokens = sum(request.prompt_tokens or 0 for request in counted)
    informed = [request for request in counted if request.cached_tokens is not None]
    planned = sum(request.planned_input_tokens or 0 for request in counted)
    latencies = _latencies(requests)
    return RunFigures(
        num_requests=len(requests),
        endings=dict(Counter(request.ending.value for request in requests).most_common()),
        errors={request.ending.value: request.detail for request in reversed(requests) if request.ending.is_failure},
        elapsed_s=run.elapsed_s,
        offered_per_s=_offered_per_s(requests),
        completed_per_s=len(complete) / elapsed_s,
        output_tokens_per_s=sum(request.output_tokens for request in requests) / elapsed_s,
        prompt_tokens_per_s=prompt_tokens / elapsed_s,
        hit_rate=sum(each.cached_tokens or 0 for each in informed)
        / max(1, sum(each.prompt_tokens or 0 for each in informed))
        if informed
        else None,
        length_ratio=prompt_tokens / planned
        if planned and all(each.planned_input_tokens for each in counted)
        else None,
        latencies=latencies,
        slos=[_judged(requests, slo, elapsed_s) for slo in slos],
        by_length=_groups(requests, length_class, slos),
        by_lane=_groups(requests, lambda request: request.lane or None, slos),
        generator=_own_error(run, latencies),
    )


def _latencies(requests: Sequence[RequestRecord]) -> dict[str, Quantiles | None]:
    return {
        name: Quantiles.of(value for request in requests for value in values(request))
        for name, values in LATENCIES.items()
    }


def _offered_per_s(requests: Sequence[RequestRecord]) -> float:
    sent = sorted(request.sent_s for request in requests)
    return (len(sent) - 1) / (sent[-1] - sent[0]) if len(sent) > 1 and sent[-1] > sent[0] else 0.0


def _judged(requests: Sequence[RequestRecord], slo: SloSet, elapsed_s: float) -> SloFigures:
    judged = [request for request in requests if request.ending is not Ending.CANCELLED]
    num_met = sum(map(slo.is_met, judged))
    return SloFigures(slo.text, num_met, len(judged), num_met / elapsed_s)


def length_class(request: RequestRecord) -> str | None:
    """Returns the class of a prompt by length, such as `256-1023`; None if the length is unknown."""
    length = request.input_tokens
    if length is None:
        return None
    low = max((bound for bound in _CLASS_BOUNDS if bound <= length), default=0)
    high = min((bound for bound in _CLASS_BOUNDS if bound > length), default=None)
    return f"{low}-{high - 1}" if high else f"{low}+"


def _groups(
    requests: Sequence[RequestRecord], key: Callable[[RequestRecord], str | None], slos: Sequence[SloSet]
) -> list[GroupFigures]:
    """Returns the figures of each group of requests with the same key, groups of short prompts first."""
    groups: dict[str, list[RequestRecord]] = {}
    for request in sorted(requests, key=lambda request: request.input_tokens or 0):
        name = key(request)
        if name is not None:
            groups.setdefault(name, []).append(request)
    return [
        GroupFigures(
            name=name,
            num_requests=len(members),
            num_failed=sum(member.ending.is_failure for member in members),
            latencies=_latencies(members),
            attainments=[_judged(members, slo, 1.0).attainment for slo in slos],
        )
        for name, members in groups.items()
    ]


def _own_error(run: RunRecord, latencies: Mapping[str, Quantiles | None]) -> GeneratorError:
    late, lag = Quantiles.of(max(0.0, request.late_s) for request in run.requests), Quantiles.of(run.lags_s)
    ttft, itl = latencies["TTFT"], latencies["ITL"]
    warnings = []
    if late is not None and late.p99_s > max(_MAX_LATE_S, _MAX_LATE_SHARE * (ttft.p50_s if ttft else 0.0)):
        warnings.append(
            f"1 % of the requests were sent at least {late.p99_s * 1e3:.1f} ms late: the generator did not offer the "
            "planned load; give it a core of its own, or send less"
        )
    if lag is not None and lag.p99_s > max(_MAX_LAG_S, _MAX_LAG_SHARE * (itl.p50_s if itl else 0.0)):
        warnings.append(
            f"the generator's event loop was {lag.p99_s * 1e3:.1f} ms late (p99): latencies of this size are its own "
            "error; give it a core of its own"
        )
    return GeneratorError(late, lag, warnings)
