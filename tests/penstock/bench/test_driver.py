"""Tests the load loops with an endpoint that answers at once, and the HTTP endpoint with servers that fail in every
way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from penstock.bench.driver.deployment_grpc import GrpcEndpoint
from penstock.bench.driver.endpoint import StreamLog
from penstock.bench.driver.openai_http import LANE_HEADER, OpenAiEndpoint, RequestForm, base_url, find_model
from penstock.bench.driver.progress import ShownProgress
from penstock.bench.driver.run import LiveCounts, run_plan
from penstock.bench.measure import SweepSpec, make_result, measure, words_per_token
from penstock.bench.results.record import Ending
from penstock.bench.results.slo import parse_slo
from penstock.bench.workloads.mixes import MixSizes, mix_source
from penstock.bench.workloads.plan import Chain, LoadPlan, LoadRequest, PromptBlocks, PromptMessages
from penstock.bench.workloads.prompts import PromptWriter
from penstock.bench.workloads.schedule import Arrivals, Extras
from penstock.errors import DeadlineExceeded, InternalError, InvalidInput, Overloaded, Unavailable
from penstock.types import Lane
from penstock.v1 import common_pb2
from tests.support.router.fake_inference import FakeInference, FakeServer, say

BLOCK = PromptBlocks(((1, 1),), 16, 16)
WRITER = PromptWriter("tests")
PATIENCE_S = 30.0


class InstantEndpoint:
    """Answers once it is allowed to, and records what it got and when."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.in_flight = self.most_in_flight = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def encode(self, request: LoadRequest, writer: PromptWriter) -> LoadRequest:
        return request

    async def send(self, encoded: LoadRequest, log: StreamLog) -> None:
        self.sent.append(encoded.number)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0)
            await self.may_answer.wait()
        finally:
            self.in_flight -= 1
        log.finish_reason, log.is_closed, log.completion_tokens = "length", True, encoded.num_output_tokens
        for number in range(encoded.num_output_tokens):
            if log.add_piece(log.sent_s + 0.01 * (number + 1)):
                break
        log.finish(encoded.num_output_tokens)

    async def close(self) -> None: ...


def request(number: int, **more: Any) -> LoadRequest:
    return LoadRequest(number, BLOCK, 5, **more)


def singles(count: int, gap_s: float = 0.0) -> LoadPlan:
    return LoadPlan(tuple(Chain(number * gap_s, (request(number),)) for number in range(count)))


async def test_the_open_loop_does_not_wait_for_answers() -> None:
    endpoint, counts = InstantEndpoint(), LiveCounts(200)
    endpoint.may_answer.clear()
    running = asyncio.create_task(run_plan(singles(200), endpoint, WRITER, counts=counts))
    async with asyncio.timeout(PATIENCE_S):
        while endpoint.in_flight < 200:  # noqa: ASYNC110 - there is not an event to wait for
            await asyncio.sleep(0.001)
        endpoint.may_answer.set()
        run = await running
    assert [each.number for each in run.requests] == list(range(200))
    assert {each.ending for each in run.requests} == {Ending.COMPLETE}
    assert (counts.sent, counts.done, counts.failed, counts.tokens) == (200, 200, 0, 1000)
    assert run.requests[0].gaps_s == pytest.approx([0.01] * 4)
    assert run.requests[0].ttft_s == pytest.approx(0.01)
    assert run.lags_s or run.elapsed_s < 0.1


async def test_requests_are_sent_when_due_and_never_earlier() -> None:
    run = await run_plan(singles(20, gap_s=0.01), InstantEndpoint(), WRITER)
    assert all(each.late_s >= -0.0005 for each in run.requests)
    assert [each.due_s for each in run.requests] == pytest.approx([0.01 * number for number in range(20)])


async def test_the_closed_loop_keeps_a_fixed_number_in_flight() -> None:
    endpoint = InstantEndpoint()
    run = await run_plan(singles(30), endpoint, WRITER, concurrency=4)
    assert endpoint.most_in_flight == 4
    assert sorted(endpoint.sent) == list(range(30))
    assert len(run.requests) == 30


async def test_a_conversation_waits_for_its_answers_and_pauses() -> None:
    endpoint = InstantEndpoint()
    chain = Chain(0.0, (request(0), request(1, gap_s=0.05), request(2, pause_s=0.05)))
    run = await run_plan(LoadPlan((chain,)), endpoint, WRITER)
    first, second, third = run.requests
    assert endpoint.most_in_flight == 1
    assert second.due_s - first.sent_s >= 0.05
    assert third.due_s - (second.sent_s + second.e2e_s) >= 0.05


async def test_clients_leave_after_their_tokens() -> None:
    run = await run_plan(LoadPlan((Chain(0.0, (request(0, cancel_after=2),)),)), InstantEndpoint(), WRITER)
    assert run.requests[0].ending is Ending.CANCELLED
    assert len(run.requests[0].gaps_s) == 1


async def test_an_interrupted_run_keeps_its_ended_requests() -> None:
    endpoint = InstantEndpoint()
    endpoint.may_answer.clear()
    running = asyncio.create_task(run_plan(singles(3), endpoint, WRITER))
    async with asyncio.timeout(PATIENCE_S):
        while endpoint.in_flight < 3:  # noqa: ASYNC110 - there is not an event to wait for
            await asyncio.sleep(0.001)
    running.cancel()
    run = await running
    assert run.is_interrupted
    assert {each.ending for each in run.requests} == {Ending.CANCELLED}


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OpenAiServer:
    """Runs a server whose answers the test chooses."""

    def __init__(self, handler: Handler) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        app.router.add_post("/v1/chat/completions", handler)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "it"}]})

    async def __aenter__(self) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


async def stream(request: web.Request, *events: object, ends: bool = True) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_type = "text/event-stream"
    await response.prepare(request)
    for event in events:
        data = event if isinstance(event, str) else json.dumps(event)
        await response.write(f"data: {data}\n\n".encode())
    if ends:
        await response.write_eof()
    else:
        assert request.transport is not None
        request.transport.close()
    return response


def piece(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 16, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}},
}
WHOLE = (piece("a"), piece("b", "length"), USAGE, "[DONE]")


async def ask(handler: Handler, form: RequestForm | None = None, **more: Any) -> StreamLog:
    """Sends one request of two tokens to a server with this handler."""
    asked = LoadRequest(0, BLOCK, 2, lane=Lane.BULK, cancel_after=more.pop("cancel_after", None))
    async with OpenAiServer(handler) as url:
        endpoint = OpenAiEndpoint(url, form or RequestForm("it"), timeout_s=more.pop("timeout_s", PATIENCE_S), **more)
        log = StreamLog(asked.cancel_after)
        await endpoint.send(endpoint.encode(asked, WRITER), log)
        await endpoint.close()
    return log


async def test_a_whole_stream_is_complete_and_its_body_is_as_planned() -> None:
    bodies: list[dict[str, Any]] = []
    lanes: list[str | None] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        lanes.append(request.headers.get(LANE_HEADER))
        return await stream(request, *WHOLE)

    log = await ask(handler)
    assert (log.ending, log.detail) == (Ending.COMPLETE, "")
    assert (log.prompt_tokens, log.cached_tokens, log.completion_tokens, len(log.piece_times_s)) == (16, 8, 2, 2)
    assert bodies[0]["prompt"] == WRITER.token_ids(BLOCK)
    assert bodies[0]["ignore_eos"] is True
    assert bodies[0]["max_tokens"] == 2
    assert lanes == ["bulk"]

    async def chat(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        deltas = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in ("a", "", "b")]
        return await stream(request, *deltas, piece("", "stop"), USAGE, "[DONE]")

    log = await ask(chat, RequestForm("it", "chat", ignore_eos=False, body={"top_k": 3}))
    assert (log.ending, len(log.piece_times_s)) == (Ending.COMPLETE, 2)
    assert bodies[1]["messages"] == [{"role": "user", "content": WRITER.text(BLOCK)}]
    assert "ignore_eos" not in bodies[1]
    assert bodies[1]["top_k"] == 3


async def _refuse(_: web.Request) -> web.Response:
    return web.json_response({"error": "too many"}, status=429)


async def _fail(_: web.Request) -> web.Response:
    return web.Response(status=503, text="no worker")


async def _reject(_: web.Request) -> web.Response:
    return web.Response(status=400, text="bad field")


async def _break_off(request: web.Request) -> web.StreamResponse:
    return await stream(request, piece("a"), ends=False)


async def _end_without_done(request: web.Request) -> web.StreamResponse:
    return await stream(request, piece("a"), piece("b", "length"))


async def _end_without_reason(request: web.Request) -> web.StreamResponse:
    return await stream(request, piece("a"), "[DONE]")


async def _be_short(request: web.Request) -> web.StreamResponse:
    usage = {"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 1}}
    return await stream(request, piece("a", "stop"), usage, "[DONE]")


async def _report_error(request: web.Request) -> web.StreamResponse:
    return await stream(request, piece("a"), {"error": {"message": "worker lost", "code": 503}})


async def _talk_nonsense(request: web.Request) -> web.StreamResponse:
    return await stream(request, "{nonsense")


@pytest.mark.parametrize(
    ("handler", "ending", "detail"),
    [
        (_refuse, Ending.REFUSED, "too many"),
        (_fail, Ending.SERVER_ERROR, "503: no worker"),
        (_reject, Ending.CLIENT_ERROR, "400: bad field"),
        (_break_off, Ending.TRUNCATED, ""),
        (_end_without_done, Ending.TRUNCATED, "the end of the stream never came"),
        (_end_without_reason, Ending.TRUNCATED, "a finish reason never came"),
        (_be_short, Ending.SHORT, "1 tokens instead of 2, finish reason stop"),
        (_report_error, Ending.SERVER_ERROR, "worker lost"),
        (_talk_nonsense, Ending.TRUNCATED, "malformed"),
    ],
)
async def test_every_failure_has_its_kind(handler: Handler, ending: Ending, detail: str) -> None:
    log = await ask(handler)
    assert log.ending is ending
    assert detail in log.detail


async def test_leaving_and_timeouts_end_the_connection() -> None:
    gone = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(f"data: {json.dumps(piece('a'))}\n\n".encode())
        try:
            while True:
                await asyncio.sleep(0.01)
                await response.write(b": still here\n\n")
        except ConnectionError:
            gone.set()
            raise

    async with OpenAiServer(hang) as url:
        endpoint = OpenAiEndpoint(url, RequestForm("it"), timeout_s=PATIENCE_S)
        leaving = LoadRequest(0, BLOCK, 2, cancel_after=1)
        log = StreamLog(1)
        await endpoint.send(endpoint.encode(leaving, WRITER), log)
        assert log.ending is Ending.CANCELLED
        async with asyncio.timeout(PATIENCE_S):
            await gone.wait()
        await endpoint.close()
        impatient = OpenAiEndpoint(url, RequestForm("it"), timeout_s=0.1)
        log = StreamLog()
        await impatient.send(impatient.encode(request(0), WRITER), log)
        assert (log.ending, log.detail) == (Ending.TIMEOUT, "no end within 0.1 s")
        await impatient.close()


async def test_an_address_without_a_server_is_a_failed_connection() -> None:
    endpoint = OpenAiEndpoint("127.0.0.1:1", RequestForm("it"))
    log = StreamLog()
    await endpoint.send(endpoint.encode(request(0), WRITER), log)
    assert log.ending is Ending.CONNECTION
    await endpoint.close()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1/v1/models does not answer: nothing listens there"):
        await find_model("127.0.0.1:1", None)
    grpc_endpoint = GrpcEndpoint("127.0.0.1:1", timeout_s=PATIENCE_S)
    log = StreamLog()
    await grpc_endpoint.send(grpc_endpoint.encode(request(0), WRITER), log)
    assert log.ending is Ending.CONNECTION
    await grpc_endpoint.close()


@pytest.mark.parametrize(
    ("script", "ending", "num_pieces"),
    [
        (say("a", "b"), Ending.COMPLETE, 2),
        (say("a"), Ending.SHORT, 1),
        (say("a", "b", last=False), Ending.TRUNCATED, 2),
        ([Overloaded("full")], Ending.REFUSED, 0),
        ([say("a", "b")[0], InternalError("broken")], Ending.SERVER_ERROR, 1),
        ([InvalidInput("prompt", "is wrong")], Ending.CLIENT_ERROR, 0),
        ([Unavailable("no worker")], Ending.SERVER_ERROR, 0),
        ([DeadlineExceeded("too late")], Ending.TIMEOUT, 0),
    ],
)
async def test_streams_of_our_own_api_are_judged_equally(script: list[object], ending: Ending, num_pieces: int) -> None:
    with FakeServer(FakeInference(script)) as server:
        endpoint = GrpcEndpoint(server.address, timeout_s=PATIENCE_S)
        log = StreamLog()
        asked = LoadRequest(0, BLOCK, 2, lane=Lane.BULK)
        await endpoint.send(endpoint.encode(asked, WRITER), log)
        await endpoint.close()
        (received,) = server.service.requests
    assert (log.ending, log.num_pieces) == (ending, num_pieces)
    assert list(received.token_ids) == WRITER.token_ids(BLOCK)
    assert received.lane == common_pb2.LANE_BULK
    if ending is Ending.COMPLETE:
        assert (log.prompt_tokens, log.cached_tokens, log.completion_tokens) == (4, 2, 2)


def test_urls_are_completed() -> None:
    assert base_url("localhost:8000") == "http://localhost:8000/v1"
    assert base_url("https://here/api/v3/") == "https://here/api/v3"
    with pytest.raises(InvalidInput, match="url: is ftp://here; give http"):
        base_url("ftp://here")


async def test_messages_become_one_text_without_a_chat() -> None:
    prompt = PromptMessages(({"role": "system", "content": "s"}, {"role": "user", "content": "q"}))
    endpoint = OpenAiEndpoint("http://nowhere", RequestForm("it"))
    data, _, _ = endpoint.encode(LoadRequest(0, prompt, 2), WRITER)
    assert json.loads(data)["prompt"] == "s\n\nq"
    await endpoint.close()


async def test_each_point_of_a_sweep_has_its_own_prompts() -> None:
    prompts: list[str] = []

    async def count_words(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompts.append(body["prompt"])
        usage = {"prompt_tokens": 10 + 2 * len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
        return await stream(request, piece("a", "length"), {"choices": [], "usage": usage}, "[DONE]")

    async with OpenAiServer(count_words) as url:
        assert await find_model(url, None) == "it"
        endpoint = OpenAiEndpoint(url, RequestForm("it", as_text=True), timeout_s=PATIENCE_S)
        ratio = await words_per_token(endpoint, 0)
        assert ratio == pytest.approx(0.5)
        prompts.clear()
        source = mix_source({"random": 1.0}, MixSizes(50, 5), 12, 0)
        points = [Arrivals(rate=1000.0), Arrivals(concurrency=3)]
        slos = [parse_slo("ttft=30")]
        spec = SweepSpec(source, points, slos, Extras(), warm_up=2, words_per_token=ratio, is_quiet=True)
        found = await measure(spec, endpoint)
        await endpoint.close()
    result = make_result(spec, found, target=url, settings={})
    assert [point.name for point in result.points] == ["1000 requests/s", "concurrency 3"]
    assert [point.figures.endings for point in result.points] == [{"complete": 12}] * 2
    assert [point.figures.slos[0].num_met for point in result.points] == [12, 12]
    assert len(prompts) == len(set(prompts)) == 2 * (12 + 2)
    assert result.points[0].figures.length_ratio == pytest.approx(1.0, abs=0.5)


async def test_a_server_that_refuses_the_first_request_is_reported_at_once() -> None:
    async with OpenAiServer(_reject) as url:
        endpoint = OpenAiEndpoint(url, RequestForm("it"), timeout_s=PATIENCE_S)
        spec = SweepSpec(mix_source({"random": 1.0}, MixSizes(), 3, 0), [Arrivals(rate=100.0)], is_quiet=True)
        with pytest.raises(Unavailable, match=r"the first request failed: .* status 400: bad field"):
            await measure(spec, endpoint)
        await endpoint.close()


async def test_progress_is_a_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    counts = LiveCounts(10, sent=4, done=3, failed=1, tokens=50)
    async with ShownProgress("2 requests/s", counts) as shown:
        assert shown.line().startswith("2 requests/s: 3 of 10 done, 1 in flight, 1 failed, ")
    assert capsys.readouterr().out == "", "standard output is for the report"
