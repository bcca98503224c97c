"""Tests decision records, sessions, and predictions compared with outcomes, both pure and over fake workers."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.commands.calling.generate import format_decision
from penstock import AsyncClient, Client
from penstock.errors import InvalidInput
from penstock.kv.events import KvEventLog
from penstock.kv.page_hash import hash_pages, make_salt
from penstock.rpc.hints import read_hints
from penstock.types import WorkerId
from penstock.v1 import common_pb2
from router.routing.costs.predictions import Predictions
from router.routing.decision_record import MAX_BYTES, completion_record, decision_record, to_json
from router.routing.policy.interface import PairChoice, PairScore, PrefillEstimate
from tests.router.api.test_grpc_service import collect, request
from tests.support.router.router_fakes import FakeWorker, running_router, until
from tests.support.suite.examples import examples

EXPLAIN = (("x-penstock-explain", "1"),)
WORKER = WorkerId("w")


def choice(number, names):
    scores = [PairScore(WorkerId(f"p{n}"), WorkerId(names), *[n / 7] * 8, 12345, 678) for n in range(number)]
    fallbacks = tuple(PrefillEstimate(WorkerId(names), 0.1, 0.2) for _ in range(3))
    return PairChoice(WorkerId(names), fallbacks, 5, scores[0], tuple(scores))


@given(count=st.integers(1, 40), attempts=st.integers(1, 4), considered=st.integers(1, 8), name=st.text(max_size=60))
@examples(60)
def test_a_record_is_bounded_and_keeps_its_core(count, attempts, considered, name):
    made = [completion_record(at, [choice(considered, name)] * attempts, common_pb2.Timing()) for at in range(count)]
    whole = decision_record("r", "kv-aware", made)
    text = to_json(whole)
    assert len(text) <= MAX_BYTES
    assert text.isascii()
    assert whole["completions"][0]["attempts"][0]["predicted"]["decode"] == name
    assert whole.get("truncated", False) or len(whole["completions"]) == count
    assert "actual" in whole["completions"][0]


class TestPredictions:
    def test_an_index_that_stays_wrong_raises_an_alarm_at_intervals(self):
        predictions = Predictions()
        alarms = [at for at in range(120) if predictions.on_cache(WORKER, 160, 0, now_s=float(at))]
        assert len(alarms) == 4  # 30 s apart
        assert alarms[0] >= 10
        assert predictions.workers[WORKER].num_alarms == 4

    @given(st.lists(st.booleans(), max_size=60))
    def test_occasional_evictions_raise_no_alarm(self, kept):
        predictions = Predictions()
        for at, is_kept in enumerate(kept):
            predictions.on_cache(WORKER, 160, 160, now_s=float(at))
            predictions.on_cache(WORKER, 160, 160, now_s=float(at))
            assert not predictions.on_cache(WORKER, 160, 160 if is_kept else 100, now_s=float(at))

    def test_more_cached_tokens_than_promised_are_no_error(self):
        predictions = Predictions()
        assert not any(predictions.on_cache(WORKER, 16, 400, now_s=100.0 * at) for at in range(50))
        assert predictions.workers[WORKER].shortfall == 0.0

    @given(st.lists(st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)), max_size=30))
    def test_a_time_ratio_is_finite(self, times):
        predictions = Predictions()
        for predicted_s, actual_s in times:
            predictions.on_time(WORKER, predicted_s, actual_s)
        assert all(0 <= worker.time_ratio <= 100 for worker in predictions.workers.values())

    def test_a_time_ratio_follows_a_slow_worker(self):
        predictions = Predictions()
        for _ in range(50):
            predictions.on_time(WORKER, 0.1, 0.3)
        assert predictions.workers[WORKER].time_ratio == pytest.approx(3.0, rel=0.05)
        predictions.keep({WorkerId("other")})
        assert not predictions.workers


async def test_grpc_trailers_explain_the_decision_on_request():
    decode = await FakeWorker("decode-0", epoch=1).start()
    prefill = await FakeWorker("prefill-0", epoch=2, role="prefill").start()
    async with running_router(decode, prefill) as router:
        call = router.stub.Generate(request(token_ids=range(300, 400), n=2), metadata=EXPLAIN)
        await collect(call)
        trailers = dict(await call.trailing_metadata())
        whole = json.loads(trailers["x-penstock-decision"])
        assert [completion["index"] for completion in whole["completions"]] == [0, 1]
        attempt, actual = whole["completions"][0]["attempts"][0], whole["completions"][0]["actual"]
        pairs = {(pair["prefill"], pair["decode"]) for pair in attempt["considered"]}
        assert pairs == {("prefill-0", "decode-0"), ("decode-0", "decode-0")}
        assert attempt["predicted"] in attempt["considered"]
        stages = ("tokenize_ms", "admission_ms", "placement_ms", "queue_ms", "prefill_ms", "decode_ms")
        assert [name for name in actual if name in stages] == [*stages]
        assert "* " in format_decision(whole)
        call = router.stub.Generate(request(token_ids=range(300, 400)))
        await collect(call)
        assert "x-penstock-decision" not in dict(await call.trailing_metadata())


async def test_a_lost_worker_adds_an_attempt():
    first = await FakeWorker("decode-0", epoch=1, pause_at=2).start()
    async with running_router(first, wait=True) as router:
        call = router.stub.Generate(request(token_ids=range(300, 310)), metadata=EXPLAIN)
        await first.until(lambda fake: len(fake.submits) == 1)
        port = int(first.address.rsplit(":", 1)[1])
        await first.stop()
        second = await FakeWorker("decode-0", epoch=2).start(port)
        await collect(call)
        whole = json.loads(dict(await call.trailing_metadata())["x-penstock-decision"])
        assert len(whole["completions"][0]["attempts"]) == 2
        await second.stop()


async def test_decision_records_can_be_turned_off():
    async with running_router(await FakeWorker().start(), explain=False) as router:
        call = router.stub.Generate(request("hello"), metadata=EXPLAIN)
        await collect(call)
        assert "x-penstock-decision" not in dict(await call.trailing_metadata())


async def test_the_async_client_reads_decisions_and_names_sessions():
    workers = [await FakeWorker(f"decode-{at}", epoch=at + 1).start() for at in range(3)]
    async with running_router(*workers) as router:
        async with AsyncClient(router.grpc_address) as client:
            results = [await client.complete("hi", max_tokens=2, session="s1", explain=True) for _ in range(6)]
            assert (await client.complete("hi", max_tokens=2)).decision is None
        served = {result.decision["completions"][0]["actual"]["decode_worker"] for result in results}
        assert len(served) == 1
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
            for body, headers in (({"user": "s1"}, {}), ({}, {"x-penstock-session": "s1"})):
                answer = await http.post(
                    "/v1/completions",
                    json={"prompt": "hi", "max_tokens": 2, **body},
                    headers={"x-penstock-explain": "1", **headers},
                )
                decision = answer.json()["penstock"]["decisions"][0]
                assert decision["completions"][0]["actual"]["decode_worker"] in served
            assert "penstock" not in (await http.post("/v1/completions", json={"prompt": "hi"})).json()


async def test_an_http_stream_ends_with_its_decision():
    async with running_router(await FakeWorker().start()) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60, headers={"x-penstock-explain": "1"}) as http:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
            lines = (await http.post("/v1/chat/completions", json=body)).text.strip().split("\n\n")
        assert lines[-1] == "data: [DONE]"
        last = json.loads(lines[-2].removeprefix("data: "))
        assert last["choices"] == []
        assert last["penstock"]["decisions"][0]["completions"][0]["attempts"]


def test_session_names_are_bounded_and_printable():
    assert read_hints({}, user="u" * 999).session == "u" * 256
    with pytest.raises(InvalidInput, match="256 or fewer"):
        read_hints({"x-penstock-session": "s" * 257})
    with Client("localhost:1") as client, pytest.raises(InvalidInput, match="printable ASCII"):
        client.generate("hi", session="\u2603")


class LyingLog(KvEventLog):
    """Sends events that list pages, but snapshots that are empty."""

    def read(self, next_seq):
        batch = super().read(next_seq)
        return batch if next_seq else replace(KvEventLog().read(0), first_seq=self.next_seq)


async def test_a_worker_with_wrong_events_is_asked_for_a_snapshot():
    prompt = list(range(300, 420))
    worker = FakeWorker("decode-0", epoch=1)
    worker.log = LyingLog()
    await worker.start()
    async with running_router(worker) as router:
        index = router.server.fleet.index
        worker.log.stored(hash_pages(prompt, 16, make_salt("r1")))
        worker.service.notify()
        await until(lambda: index.pages_of(WorkerId("decode-0")) == 7)
        for _ in range(11):
            await collect(router.stub.Generate(request(token_ids=prompt, max_tokens=2)))
        assert index.pages_of(WorkerId("decode-0")) == 7
        await collect(router.stub.Generate(request(token_ids=prompt, max_tokens=2)))
        worker.service.notify()
        await until(lambda: index.pages_of(WorkerId("decode-0")) == 0)
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
            text = (await http.get("/metrics")).text
        assert 'penstock:lying_index_total{model_name="penstock-tiny",worker="decode-0"} 1.0' in text
        assert 'penstock:worker_cache_shortfall{model_name="penstock-tiny",worker="decode-0"} 1.0' in text
        assert 'penstock:prediction_error_seconds_count{model_name="penstock-tiny",stage="prefill"} 12.0' in text
