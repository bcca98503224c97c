"""Tests log-probabilities of prompts over HTTP, with real workers: what evaluation harnesses compute from them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock import AsyncClient
from penstock.config import RouterConfig
from penstock.types import Role, SamplingParams
from router.server import RouterServer
from router.text.tokenizer import Tokenizer
from tests.support.router.router_fakes import all_followed, until
from tests.support.serving import caller, wait_until_empty, worker_config, workers

pytestmark = pytest.mark.processes

MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
TEXTS = ["Once upon a time there was a little cat.", "The dog ran"]
# Longer than one step scores, and with repeating pages.
LONG = [(7 * i * i) % 900 + 20 for i in range(301)]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def logprobs_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def wanted(model: Any, token_ids: list[int]) -> list[float]:
    rows = logprobs_of(model, token_ids)
    return [float(rows[position, token]) for position, token in enumerate(token_ids[1:])]


class Deployment:
    def __init__(self, router: RouterServer) -> None:
        self.http = f"http://127.0.0.1:{router.ports.http}/v1"
        self.grpc = f"127.0.0.1:{router.ports.grpc}"

    async def post(self, path: str, **body: Any) -> Any:
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{self.http}/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def stream(self, path: str, **body: Any) -> list[Any]:
        """Returns the chunks of a streamed answer."""
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{self.http}/{path}", json=body | {"stream": True})
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    fp32 = {"dtype": "float32"}
    async with workers(
        worker_config(Role.PREFILL, MODEL, engine=fp32), worker_config(Role.DECODE, MODEL, engine=fp32)
    ) as servers:
        settings = {"model": str(MODEL), "grpc_port": 0, "http_port": 0}
        addresses = tuple(server.address for server in servers)
        router = RouterServer(RouterConfig.model_validate(settings | {"workers": addresses}))
        await router.start()
        try:
            await until(lambda: all_followed(router, len(servers)))
            yield Deployment(router)
        finally:
            await router.stop()
        await wait_until_empty(*servers)


def log_likelihood(choice: dict[str, Any], num_context_tokens: int) -> tuple[float, bool]:
    """Computes what lm-evaluation-harness does with an answer of its `local-completions` model, which requests one
    token that it ignores."""
    parts = choice["logprobs"]
    tokens, values, tops = (parts[name][num_context_tokens:-1] for name in ("tokens", "token_logprobs", "top_logprobs"))
    is_greedy = all(token == max(top, key=top.get) for token, top in zip(tokens, tops, strict=True))
    return sum(values), is_greedy


async def test_log_likelihoods_of_a_harness_equal_those_of_transformers(deployment: Deployment, model: Any) -> None:
    """A harness sends batches of token ids or text, greedy, as an echo with one alternative, and one token or none."""
    tokenizer = Tokenizer.load(MODEL)
    try:
        prompts = [await tokenizer.encode(text) for text in TEXTS] + [LONG]
    finally:
        tokenizer.close()
    shape = {"model": "penstock-tiny", "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    by_ids = await deployment.post("completions", prompt=prompts, max_tokens=1, **shape)
    choices = sorted(by_ids["choices"], key=itemgetter("index"))
    assert by_ids["usage"]["completion_tokens"] == len(prompts)
    for choice, prompt in zip(choices, prompts, strict=True):
        for num_context_tokens in (1, len(prompt) - 2):
            found, is_greedy = log_likelihood(choice, num_context_tokens)
            assert found == pytest.approx(sum(wanted(model, prompt)[num_context_tokens - 1 :]), abs=1e-3 * len(prompt))
            continuation = logprobs_of(model, prompt)[num_context_tokens - 1 : -1].argmax(-1).tolist()
            assert is_greedy == (continuation == prompt[num_context_tokens:])
    by_text = await deployment.post("completions", prompt=TEXTS, max_tokens=0, **shape)
    assert by_text["usage"]["completion_tokens"] == 0
    for choice, other, text in zip(by_text["choices"], choices, TEXTS, strict=False):
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert choice["logprobs"]["tokens"] == other["logprobs"]["tokens"][:-1]
        assert choice["logprobs"]["token_logprobs"][0] is choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
            other["logprobs"]["token_logprobs"][1:-1], abs=1e-4
        )


async def test_an_echo_streams_the_prompt_before_each_choice(deployment: Deployment) -> None:
    body = {"prompt": TEXTS, "n": 2, "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 0}
    whole = await deployment.post("completions", **body)
    texts, tokens = dict.fromkeys(range(4), ""), dict.fromkeys(range(4), 0)
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{deployment.http}/completions", json={**body, "stream": True}) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in httpx.Response(200, content=line.removeprefix("data: ")).json()["choices"]:
                    texts[choice["index"]] += choice["text"]
                    tokens[choice["index"]] += len(choice["logprobs"]["tokens"])
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["text"]
        assert choice["text"].startswith(TEXTS[choice["index"] // 2])
        assert tokens[choice["index"]] == len(choice["logprobs"]["tokens"])
        offsets, spelt = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
        assert offsets == [sum(map(len, spelt[:rank])) for rank in range(len(spelt))]


async def test_prompt_logprobs_have_vllms_format(deployment: Deployment, model: Any) -> None:
    for _ in range(2):  # the second time with cached pages
        answer = await deployment.post("completions", prompt=LONG, max_tokens=2, temperature=0, prompt_logprobs=2)
        [choice] = answer["choices"]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        rows = logprobs_of(model, LONG)
        for position, (entry, token) in enumerate(zip(others, LONG[1:], strict=True)):
            assert entry[str(token)]["logprob"] == pytest.approx(float(rows[position, token]), abs=1e-3)
            ranks = {number: each["rank"] for number, each in entry.items() if each["rank"]}
            assert ranks == {str(other): rank for rank, other in enumerate(rows[position].topk(2).indices.tolist(), 1)}
            assert all(isinstance(each["decoded_token"], str) for each in entry.values())
    assert "logprobs" in choice
    assert choice["logprobs"] is None
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "prompt_logprobs": 0}
    answer = await deployment.post("chat/completions", **chat)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


async def test_streams_have_prompt_logprobs_in_their_first_chunk(deployment: Deployment) -> None:
    for path, body in (
        ("completions", {"prompt": [LONG, LONG[:5]], "n": 2}),
        ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "n": 2}),
    ):
        body |= {"max_tokens": 3, "temperature": 0, "prompt_logprobs": 1, "ignore_eos": True}
        whole = await deployment.post(path, **body)
        chunks = await deployment.stream(path, **body)
        if path == "completions":
            choices = [choice for chunk in chunks for choice in chunk["choices"] if "prompt_logprobs" in choice]
            streamed = {choice["index"]: choice["prompt_logprobs"] for choice in choices}
            at_once = {choice["index"]: choice["prompt_logprobs"] for choice in whole["choices"]}
            assert len(choices) == 4
        else:
            streamed, at_once = {}, {0: whole["prompt_logprobs"]}
            [streamed[0]] = [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk]
        for index, scores in streamed.items():
            assert scores[0] is None
            assert [entry and list(entry) for entry in scores] == [entry and list(entry) for entry in at_once[index]]


async def test_clients_get_prompt_logprobs_with_the_first_tokens(deployment: Deployment, model: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "prompt_logprobs": 1}
    async with AsyncClient(deployment.grpc) as client:
        result = await client.complete(LONG, n=2, **options)
        plain = await client.complete(LONG, **options | {"prompt_logprobs": None})
        single = await client.complete(LONG[:1], **options)
    assert single.completions[0].prompt_logprobs == ()
    assert result.token_ids == plain.token_ids
    assert result.timing.prefill_worker == "decode"
    assert plain.timing.prefill_worker == "prefill"
    for completion in result.completions:
        assert [token.token_id for token in completion.prompt_logprobs] == LONG[1:]
        assert [token.logprob for token in completion.prompt_logprobs] == pytest.approx(wanted(model, LONG), abs=1e-3)
        assert all(len(token.top) == 1 and token.token for token in completion.prompt_logprobs)


async def test_prompts_that_preempt_each_other_keep_their_log_probabilities(model: Any) -> None:
    """There are pages for about two of five prompts, each of which is scored in many steps while others grow."""
    prompts = [[20 + number, *LONG[: 150 + 10 * number]] for number in range(5)]
    engine: dict[str, object] = {"dtype": "float32", "num_pages": 26, "prefix_caching": False}
    decode: dict[str, object] = {
        "placement": "local",
        "max_batch_tokens": 12,
        "max_batch_sequences": 8,
        "watermark": 0.0,
    }
    options = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    async with workers(worker_config(Role.DECODE, MODEL, engine=engine, decode=decode)) as servers:
        async with caller(servers[0].address) as router:
            streams = [router.submit(prompt, options) for prompt in prompts]
            answers = [await router.answer(stream) for stream in streams]
        await wait_until_empty(*servers)
    assert sum(answer.timing.num_preemptions for answer in answers if answer.timing) > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert [each.token_id for each in answer.prompt_logprobs] == prompt[1:]
        assert [each.logprob for each in answer.prompt_logprobs] == pytest.approx(wanted(model, prompt), abs=1e-3)


async def test_a_redispatched_request_is_scored_only_before_its_first_token() -> None:
    options = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    engine: dict[str, object] = {"dtype": "float32"}
    async with workers(worker_config(Role.DECODE, MODEL, engine=engine, decode={"placement": "local"})) as servers:
        async with caller(servers[0].address) as router:
            first = await router.answer(router.submit(LONG, options))
            again = await router.answer(router.submit(LONG, options))
            resumed = [*LONG, *first.token_ids[:1]]
            rest = await router.answer(router.submit(resumed, options, num_prompt_tokens=len(LONG)))
    assert len(first.prompt_logprobs) == len(again.prompt_logprobs) == len(LONG) - 1
    assert not rest.prompt_logprobs
    assert rest.token_ids == first.token_ids[1:]
