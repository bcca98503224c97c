"""Makes runs of random numbers for tests of figures and reports."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from penstock.bench.results.record import Ending, RequestRecord, RunRecord
from penstock.bench.results.result_file import BenchResult, make_point
from penstock.bench.results.slo import parse_slo


@st.composite
def request_records(draw: st.DrawFn) -> RequestRecord:
    ending = draw(st.sampled_from(Ending))
    times = st.integers(0, 10_000_000).map(lambda ticks: ticks / 1e6)  # whole microseconds, as in the file
    has_begun = ending in (Ending.COMPLETE, Ending.SHORT) or draw(st.booleans())
    gaps = tuple(draw(st.lists(times, max_size=5))) if has_begun else ()
    prompt = draw(st.none() | st.integers(1, 5000))
    return RequestRecord(
        number=0,
        lane=draw(st.sampled_from(["", "bulk"])),
        due_s=draw(times),
        sent_s=draw(times),
        ending=ending,
        detail="" if not ending.is_failure else draw(st.text(max_size=10)),
        ttft_s=draw(times) if has_begun else None,
        e2e_s=draw(times),
        gaps_s=gaps,
        planned_input_tokens=draw(st.none() | st.integers(1, 5000)),
        planned_output_tokens=draw(st.integers(1, 100)),
        prompt_tokens=prompt,
        cached_tokens=None if prompt is None else draw(st.none() | st.integers(0, prompt)),
        output_tokens=len(gaps) + has_begun,
    )


def run_records() -> st.SearchStrategy[RunRecord]:
    return st.builds(
        RunRecord,
        st.lists(request_records(), max_size=8).map(tuple),
        st.integers(1, 10_000_000).map(lambda ticks: ticks / 1e6),
        st.lists(st.integers(0, 100_000).map(lambda ticks: ticks / 1e6), max_size=3).map(tuple),
        st.booleans(),
    )


def steady_result(ttft_s: float, itl_s: float, seed: int, *, count: int = 200, noise: float = 0.2) -> BenchResult:
    """Returns a result with one point whose latencies vary around the given ones."""
    rng = random.Random(seed)

    def vary(value_s: float) -> float:
        return max(1e-6, rng.gauss(value_s, noise * value_s))

    requests = []
    for number in range(count):
        gaps = tuple(vary(itl_s) for _ in range(9))
        first_s = vary(ttft_s)
        e2e_s, sent_s = first_s + sum(gaps), number * 0.1
        lengths = (100, 10, 100, 50, 10)  # planned prompt and answer; actual prompt, cached tokens, answer
        requests.append(RequestRecord(number, "", sent_s, sent_s, Ending.COMPLETE, "", first_s, e2e_s, gaps, *lengths))
    slos = [parse_slo("ttft=1,tpot=0.1")]
    run = RunRecord(tuple(requests), count * 0.1 + 1, (0.0001,) * 50)
    point = make_point("10 requests/s", {"rate": 10.0}, run, slos)
    return BenchResult("it", "2026-01-01T00:00:00+00:00", "nowhere", "made", [], {"seed": seed}, {}, slos, [point])
