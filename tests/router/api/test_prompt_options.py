"""Tests the fields of OpenAI's calls that shape a prompt, its cached pages, its lane, and how tokens are shown."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from penstock.types import Lane
from penstock.v1 import inference_pb2
from penstock.wire import lane_to_wire
from router.api.openai.requests import ChatBody
from router.api.prompts import read_conversation
from router.text.chat_template import ChatTemplate
from tests.router.api.test_grpc_service import TOKENIZER, collect, failure, saying, text_tokens
from tests.support.router.router_fakes import EOS, FakeWorker, expected_tokens, running_router

END = TOKENIZER.special_tokens["<|end|>"]
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(name="worker")
async def _worker():
    return await FakeWorker().start()


@pytest.fixture(name="router")
async def _router(worker):
    async with running_router(worker) as router:
        yield router


@pytest.fixture(name="http")
async def _http(router):
    async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as client:
        yield client


async def post(http, path="completions", **fields):
    default = {"prompt": "a b c"} if path == "completions" else CHAT
    answer = await http.post(f"/v1/{path}", json={"max_tokens": 4, **default, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def chunks_of(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_cache_salt_changes_the_pages_salt(http, worker, path):
    for salt in ({}, {"cache_salt": "one"}, {"cache_salt": "two"}, {"cache_salt": "one"}, {"cache_salt": ""}):
        await post(http, path, **salt)
    bare, first, second, again, empty = (submit.salt for submit in worker.submits)
    assert len({bare, first, second}) == 3
    assert (again, empty) == (first, bare)


async def test_a_priority_selects_the_lane(http, worker):
    for priority, lane in ((-3, Lane.INTERACTIVE), (0, Lane.STANDARD), (2, Lane.BULK)):
        await post(http, priority=priority)
        assert worker.submits[-1].lane == lane_to_wire(lane)
    await post(http, priority=1, service_tier="flex")
    answer = await http.post(
        "/v1/completions", json={"prompt": "a", "priority": 1}, headers={"x-penstock-lane": "interactive"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-penstock-lane")


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_truncated_prompt_keeps_its_last_tokens(http, worker, path):
    await post(http, path)
    await post(http, path, truncate_prompt_tokens=2)
    await post(http, path, truncate_prompt_tokens=500)
    whole, cut, uncut = (list(submit.token_ids) for submit in worker.submits)
    assert (cut, uncut) == (whole[-2:], whole)
    await post(http, prompt=[300] * 3000 + [301] * 3, truncate_prompt_tokens=3)  # longer than the context
    assert list(worker.submits[-1].token_ids) == [301] * 3


async def test_special_tokens_around_a_prompt_are_optional(http, worker):
    for added in (None, True, False):
        await post(http, add_special_tokens=added)
        await post(http, "chat/completions", add_special_tokens=added)
    plain = TOKENIZER._encode(["a b c"], False)[0]
    bos = TOKENIZER._encode(["a b c"], True)[0][:1]
    chat = TOKENIZER._encode(["<|bos|><|user|>Hi<|end|><|assistant|>"], False)[0]
    prompts = [list(submit.token_ids) for submit in worker.submits]
    assert prompts == [bos + plain, chat, bos + plain, bos + chat, plain, chat]


async def test_token_ids_are_returned_whole_and_streamed(http, worker):
    prompts = [[300, 301], [302]]
    fields = {"prompt": prompts, "n": 2, "return_token_ids": True, "seed": 3}
    whole = (await post(http, **fields)).json()["choices"]
    chunks = chunks_of(await post(http, **fields, stream=True))
    for choice in whole:
        index = choice["index"]
        assert choice["prompt_token_ids"] == prompts[index // 2]
        submit = next(
            submit
            for submit in worker.submits
            if list(submit.token_ids) == prompts[index // 2] and submit.sampling.seed == 3 + index % 2
        )
        assert choice["token_ids"] == expected_tokens(submit, 4)
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
        assert [part.get("prompt_token_ids") for part in own] == [prompts[index // 2], *[None] * (len(own) - 1)]
    chat = (await post(http, "chat/completions", return_token_ids=True, seed=3)).json()
    chunks = chunks_of(await post(http, "chat/completions", return_token_ids=True, seed=3, stream=True))
    assert chat["prompt_token_ids"] == list(worker.submits[-1].token_ids)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [
        chat["prompt_token_ids"],
        *[None] * (len(chunks) - 1),
    ]
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert streamed == chat["choices"][0]["token_ids"] == expected_tokens(worker.submits[-1], 4)
    assert "token_ids" not in (await post(http)).json()["choices"][0]


async def test_log_probabilities_can_identify_tokens_by_id(http, worker):
    logprobs = (await post(http, logprobs=1, return_tokens_as_token_ids=True)).json()["choices"][0]["logprobs"]
    expected = [f"token_id:{token}" for token in expected_tokens(worker.submits[0], 4)]
    assert logprobs["tokens"] == expected
    assert list(logprobs["top_logprobs"][0]) == ["token_id:300"]
    fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    content = (await post(http, "chat/completions", **fields)).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == f"token_id:{expected_tokens(worker.submits[1], 1)[0]}"
    assert content[0]["top_logprobs"][0]["token"] == "token_id:300"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "yes and no"),
        ({"stop": ["s an", " no"]}, "ye"),
        ({"stop": ["s an", " no"], "include_stop_str_in_output": True}, "yes an"),
        ({"skip_special_tokens": False}, "yes<|end|> and no"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "yes<|end|> and no<|eos|>"),
        ({"skip_special_tokens": False, "stop": ["<|end|>"]}, "yes"),
        ({"stop_token_ids": [END], "include_stop_str_in_output": True}, "yes and no"),
    ],
)
async def test_stop_strings_and_special_tokens_can_be_part_of_the_text(stream, fields, text):
    said = [*text_tokens("yes"), END, *text_tokens(" and no"), EOS]
    worker = await FakeWorker(next_token=saying(said)).start()
    async with running_router(worker) as router, httpx.AsyncClient(base_url=router.http_url) as http:
        answer = await post(http, prompt=[300], max_tokens=40, stream=stream, **fields)
        found = chunks_of(answer) if stream else [answer.json()]
        assert "".join(part["choices"][0]["text"] for part in found) == text
        assert found[-1]["choices"][0]["finish_reason"] == "stop"


def test_arguments_of_the_template_reach_it():
    source = "{{ enable_thinking }} {{ reasoning_effort }} {{ style | default('-') }} {{ tools is none }}"
    template = ChatTemplate(source, {}, "test")
    for fields, rendered in (
        ({}, "  - True"),
        ({"reasoning_effort": "none"}, "False none - True"),
        ({"reasoning_effort": "high"}, "True high - True"),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": 3, "style": "{{ 1 }}"}},
            "3 high {{ 1 }} True",
        ),
    ):
        [request] = ChatBody.model_validate({**CHAT, **fields}).requests("id")
        assert template.render(read_conversation(request)) == rendered
    template.close()


async def test_the_grpc_api_takes_the_same_options(router, worker):
    message = inference_pb2.ChatMessage(role="user", content="Hi")
    tool = inference_pb2.Tool(name="now", parameters='{"type": "object"}')
    request = inference_pb2.GenerateRequest(
        messages=[message], chat=inference_pb2.ChatOptions(tools=[tool]), truncate_prompt_tokens=9, cache_salt="s"
    )
    request.sampling.max_tokens = 1
    await collect(router.stub.Generate(request))
    assert len(worker.submits[0].token_ids) == 9
    for chat, problem in (
        ({"tools": [inference_pb2.Tool(name="a", parameters="[1]")]}, "parameters: is not a JSON object"),
        ({"tools": [inference_pb2.Tool(name="a b")]}, r"tools\[0\].function.name: is 'a b'"),
        ({"template_arguments": "{"}, "is not valid JSON"),
        ({"template_arguments": '{"tools": []}'}, "has 'tools'"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "set one of them to false"),
    ):
        options = inference_pb2.ChatOptions(**chat)
        error = await failure(router.stub.Generate(inference_pb2.GenerateRequest(messages=[message], chat=options)))
        assert error.reason == "INVALID_INPUT", error
        assert re.search(problem, error.message), error
    for chat, added in ((inference_pb2.ChatOptions(tools=[tool]), True), (inference_pb2.ChatOptions(), False)):
        body = inference_pb2.GenerateRequest(messages=[message], chat=chat, add_special_tokens=added)
        body.sampling.max_tokens = 1
        await collect(router.stub.Generate(body))
        wire = inference_pb2.TokenizeRequest(messages=[message], chat=chat, add_special_tokens=added)
        assert (await router.stub.Tokenize(wire)).token_ids == worker.submits[-1].token_ids
    text = inference_pb2.GenerateRequest(text="a", chat=inference_pb2.ChatOptions(template_arguments="{}"))
    assert "is given without messages" in (await failure(router.stub.Generate(text))).message


async def test_texts_and_chats_can_be_tokenized(http, router, worker):
    plain, bos = TOKENIZER._encode(["a b"], False)[0], TOKENIZER._encode(["a b"], True)[0]
    answer = (await http.post("/tokenize", json={"model": "penstock-tiny", "prompt": "a b"})).json()
    assert answer == {"count": len(bos), "max_model_len": 2048, "tokens": bos, "token_strs": None}
    body = {"prompt": "a b", "add_special_tokens": False, "return_token_strs": True}
    answer = (await http.post("/tokenize", json=body)).json()
    assert (answer["tokens"], answer["token_strs"]) == (plain, [TOKENIZER.spelling.token_text(i) for i in plain])
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    for fields in ({}, {"tools": tools}, {"add_generation_prompt": False}, {"add_special_tokens": True}):
        answer = (await http.post("/tokenize", json={**CHAT, **fields})).json()
        await post(http, "chat/completions", **fields)
        assert answer["tokens"] == list(worker.submits[-1].token_ids)
        assert answer["count"] == len(answer["tokens"])
    text = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert text == {"prompt": "<|bos|><|bos|><|user|>Hi<|end|><|assistant|>"}
    many = (await http.post("/detokenize", json={"tokens": plain * 2000})).json()["prompt"]
    assert many == "a b" * 2000


async def test_bad_calls_of_tokenize_are_refused_by_field(http):
    for path, body, param, problem in (
        ("tokenize", {}, "prompt", "exactly one of prompt and messages"),
        ("tokenize", {"prompt": "a", **CHAT}, "prompt", "exactly one of prompt and messages"),
        ("tokenize", {"prompt": [1]}, "prompt", "give text"),
        ("tokenize", {"prompt": "a", "model": "b"}, "model", "is not served here"),
        ("tokenize", {"prompt": "a", "pace": 1}, "pace", "is not a field"),
        ("tokenize", {**CHAT, "chat_template": "x"}, "chat_template", "is not supported"),
        ("tokenize", {"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood", "is not a field"),
        ("tokenize", {"messages": []}, "messages", "is empty"),
        ("detokenize", {}, "tokens", "is missing"),
        ("detokenize", {"tokens": [2048]}, "tokens", "hold 2048; give 0 to 2047"),
        ("detokenize", {"tokens": [-1]}, "tokens", "hold -1"),
        ("detokenize", {"tokens": [1], "x": 1}, "x", "is not a field"),
    ):
        answer = await http.post(f"/{path}", json=body)
        assert answer.status_code in (400, 404), (body, answer.text)
        error = answer.json()["error"]
        assert error["param"] == param, (body, error)
        assert problem in error["message"], (body, error)


async def test_hints_and_the_header_session_reach_only_the_first_completions_worker(http, worker):
    hints = {"pin_s": 30, "priority": 2, "fork_of": "parent"}
    answer = await http.post(
        "/v1/completions",
        json={"prompt": "a b c", "max_tokens": 4, "n": 2, "kv_hints": hints},
        headers={"X-Session-Id": "child"},
    )
    assert answer.status_code == 200, answer.text
    first, second = sorted(worker.submits, key=lambda submit: submit.request_id)
    assert (first.kv_hints.session, first.kv_hints.fork_of, first.kv_hints.pin_s) == ("child", "parent", 30.0)
    assert not second.HasField("kv_hints")
    refused = await http.post("/v1/completions", json={"prompt": "a", "kv_hints": {"fork_of": "parent"}})
    assert (refused.status_code, "kv_hints.fork_of" in refused.text) == (400, True)


async def test_a_request_for_hints_alone_asks_for_one_completion_of_one_token(http, worker):
    await post(http, n=3, max_tokens=64, kv_hints={"session": "s", "end_session": True, "only": True})
    [submit] = worker.submits
    assert (submit.kv_hints.only, submit.kv_hints.end_session, submit.sampling.max_tokens) == (True, True, 1)
