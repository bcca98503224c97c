"""Tests what `penstock trace` shows of a request before its workers have it, and which of several requests."""

from __future__ import annotations

from types import SimpleNamespace

from penstock.types import RequestId, SamplingParams
from router.dispatch.running_requests import RunningRequest, RunningRequests
from router.prepared_request import PreparedRequest


def running(request_id: str, call_id: str = "call", admitted_s: float = 0.0) -> RunningRequest:
    request = PreparedRequest(
        RequestId(request_id),
        [1, 2, 3],
        SamplingParams(max_tokens=4, n=2),
        "r1",
        1.0,
        60.0,
        prepared_s=2.0,
        call_id=call_id,
    )
    return RunningRequest(request, SimpleNamespace(admitted_s=admitted_s))  # type: ignore[arg-type]


def stages(found: dict[str, object] | None) -> list[list[str]]:
    assert found is not None
    completions = found["completions"]
    assert isinstance(completions, list)
    return [[stage["name"] for stage in completion["stages"]] for completion in completions]


def test_a_request_that_waits_is_in_admission_until_it_is_admitted() -> None:
    requests = RunningRequests()
    waiting, admitted = running("waits"), running("admitted", admitted_s=3.0)
    requests.add(waiting)
    requests.add(admitted)
    found = requests.waterfall("waits", "kv-aware")
    assert stages(found) == [["tokenize", "admission"]] * 2
    assert found is not None
    assert found["running"] is True
    tokenize = found["completions"][0]["stages"][0]
    assert (tokenize["start_ms"], tokenize["end_ms"]) == (0.0, 1000.0)
    assert stages(requests.waterfall("admitted", "kv-aware")) == [["tokenize", "admission", "placement"]] * 2


def test_a_call_names_its_oldest_request_and_a_request_only_itself() -> None:
    requests = RunningRequests()
    first, second, other = running("first"), running("second"), running("other", "another call")
    for each in (first, second, other):
        requests.add(each)

    def named(name: str) -> str | None:
        found = requests.waterfall(name, "kv-aware")
        return None if found is None else found["request_id"]

    assert (named("call"), named("second"), named("another call"), named("no call")) == (
        "first",
        "second",
        "other",
        None,
    )
    requests.remove(first)
    assert named("call") == "second"
    again = running("second")  # two requests with the same id run at once
    requests.add(again)
    requests.remove(second)
    assert named("second") == "second"
    requests.remove(again)
    assert named("second") is None
