"""Runs the requests of all features at once, over gRPC or HTTP, and tracks how far each has come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from penstock import AsyncClient
from penstock.client.results import Logprob, ResultBuilder, Timing
from penstock.kv.kv_hints import Hint
from tests.support.router.parsed_outputs import ParsedCall, parse_whole
from tests.system.matrix.batch_lines import answer_of, timings_of
from tests.system.matrix.features import CHAT, TOOL, Feature, parser_choice, spelling
from tests.system.matrix.reference import Answered, options_of, single_process

_TIMEOUT_S = 60.0


@dataclass
class Stream:
    """Holds a feature's request and its answer so far."""

    feature: Feature
    answers: list[Answered] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)  # of requests over gRPC
    spelt: list[tuple[str, float | None]] = field(default_factory=list)  # over HTTP: tokens and log-probabilities
    calls: list[ParsedCall] = field(default_factory=list)  # of a chat
    request_id: str = ""  # known once the answer is complete, or over HTTP once it has started
    begun: set[int] = field(default_factory=set)  # completions that have a token
    is_over: bool = False
    is_broken: bool = False  # the connection ended before the answer did

    @property
    def is_in_flight(self) -> bool:
        """Returns whether every completion has begun and the answer is not complete."""
        return len(self.begun) == options_of(self.feature).get("n", 1) and not self.is_over

    def check(self) -> None:
        """Raises AssertionError unless the answer equals a single process's."""
        wanted = single_process(self.feature)
        if not self.feature.over_http:
            for found, expected in zip(self.answers, wanted, strict=True):
                found.check(expected)
            if self.feature.kv_hints:
                self._check_hints()
            return
        [found], [expected] = self.answers, wanted
        if self.feature.is_chat:
            parsed = parse_whole(parser_choice(), expected.text, [TOOL])
            assert found.token_ids == expected.token_ids
            assert (found.text, self.calls) == (parsed.text, list(parsed.tool_calls))
            assert (found.finish_reason, expected.finish_reason) == ("tool_calls", "stop")
            return
        assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
        scored = [(token, value) for token, value, _ in (*expected.prompt_logprobs, *expected.logprobs)]
        text_of = spelling().token_text
        assert self.spelt[0] == (text_of(self.feature.prompt[0]), None)
        assert [text for text, _ in self.spelt[1:]] == [text_of(token) for token, _ in scored]
        for (_, value), (_, expected_value) in zip(self.spelt[1:], scored, strict=True):
            assert value is not None
            assert abs(value - expected_value) < 1e-3

    def _check_hints(self) -> None:
        """Raises AssertionError unless the worker at which the answer ended has answered every hint."""
        [timing] = self.timings
        answered = {answer.hint for answer in timing.hints if answer.worker_id == timing.decode_worker}
        assert answered == {Hint.SESSION, Hint.PIN, Hint.PRIORITY, Hint.PREFETCH}

    async def run_grpc(self, client: AsyncClient) -> None:
        builder = ResultBuilder()
        async with client.generate(
            self.feature.prompt,
            model=self.feature.adapter,
            lane=self.feature.lane,
            timeout_s=_TIMEOUT_S,
            kv_hints=self.feature.kv_hints,
            **options_of(self.feature),
        ) as chunks:
            async for chunk in chunks:
                builder.add(chunk)
                self.begun.add(chunk.index)
        self.is_over = True
        self.request_id = builder.result().request_id
        for completion in builder.result().completions:
            self.timings.append(completion.timing)
            self.answers.append(
                Answered(
                    completion.text,
                    list(completion.token_ids),
                    completion.finish_reason.value,
                    [_scored(each) for each in completion.logprobs],
                    [_scored(each) for each in completion.prompt_logprobs],
                )
            )

    async def run_batch(self, addresses: list[str]) -> None:
        with timings_of(self.feature.num_prompt_tokens, self.timings):
            body = {**options_of(self.feature), "prompt": self.feature.prompt, "return_token_ids": True}
            found = await answer_of(addresses, body, _TIMEOUT_S, lambda: self.begun.add(0))
        self.is_over = True
        self.request_id, choice = found
        self.answers.append(Answered(choice["text"], choice["token_ids"], choice["finish_reason"]))

    async def run_http(self, address: str) -> None:
        options = options_of(self.feature)
        body: dict[str, Any] = {name: options[name] for name in options if name != "prompt_logprobs"}
        if self.feature.is_chat:
            path, more = "chat/completions", CHAT | {"return_token_ids": True}
        else:
            path, more = "completions", {"prompt": self.feature.prompt, "echo": True}
        body |= {"stream": True, **more}
        answer = Answered()
        self.is_broken = True
        try:
            async with (
                httpx.AsyncClient(timeout=_TIMEOUT_S) as client,
                client.stream("POST", f"http://{address}/v1/{path}", json=body) as response,
            ):
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    self._read(line, answer)
        except httpx.TransportError:
            assert self.is_broken, "it broke after its end"
        self.is_over = True
        self.answers.append(answer)

    def _read(self, line: str, answer: Answered) -> None:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.is_broken = False
        elif data.startswith("{"):
            chunk = json.loads(data)
            self.request_id, [choice] = chunk["id"], chunk["choices"]
            answer.finish_reason = choice["finish_reason"] or ""
            if self.feature.is_chat:
                self._read_delta(choice, answer)
                return
            self.begun.add(choice["index"])
            answer.text += choice["text"]
            logprobs = choice["logprobs"]
            self.spelt += zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)

    def _read_delta(self, choice: dict[str, Any], answer: Answered) -> None:
        delta = choice["delta"]
        answer.token_ids += choice["token_ids"] or ()
        answer.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            self.begun.add(choice["index"])
            function = call["function"]
            if call.get("id"):
                self.calls.append(ParsedCall(function["name"], ""))
            so_far = self.calls[call["index"]]
            self.calls[call["index"]] = replace(so_far, arguments=so_far.arguments + function["arguments"])


def _scored(logprob: Logprob) -> tuple[int, float, dict[int, float]]:
    return logprob.token_id, logprob.logprob, {top.token_id: top.logprob for top in logprob.top}


class Streams:
    """Holds all features' requests in flight together. Use as a context manager, then `results`."""

    def __init__(
        self, features: Iterable[Feature], grpc: list[str], http: list[str], *, lookaside: bool = False
    ) -> None:
        self.streams = [Stream(feature) for feature in features]
        self._client = AsyncClient(grpc, lookaside=lookaside)
        self._http = http

    async def __aenter__(self) -> Streams:
        self._tasks = [asyncio.create_task(self._run(stream)) for stream in self.streams]
        return self

    async def _run(self, stream: Stream) -> None:
        if stream.feature.is_batched:
            await stream.run_batch(self._http)
        elif stream.feature.over_http:
            await stream.run_http(self._http[0])
        else:
            await stream.run_grpc(self._client)

    @property
    def all_in_flight(self) -> bool:
        return all(stream.is_in_flight for stream in self.streams)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the condition, and fails as soon as a stream has failed."""
        async with asyncio.timeout(_TIMEOUT_S):
            while not condition():
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.005)

    async def results(self) -> dict[str, Stream]:
        await asyncio.gather(*self._tasks)
        return {stream.feature.name: stream for stream in self.streams}

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()
