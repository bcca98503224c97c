"""Tests the blocking client against a scripted server: chunks, errors, retries, deadlines, cancellation."""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from penstock import Chat, Client
from penstock.client.channels import failure_of
from penstock.client.results import Usage
from penstock.client.retry import Attempts, Failure, RetryBudget, RetryPolicy
from penstock.errors import (
    STATUS_DETAILS,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from penstock.types import FinishReason, Grammar, GrammarKind, Lane
from penstock.v1 import common_pb2
from tests.support.router.fake_inference import FakeInference, FakeServer, say

QUICK = RetryPolicy(max_attempts=3, initial_s=0.01, max_s=0.02, connect_s=0.3)
HANG = FakeInference.HANG


def test_chunks_carry_text_and_tokens_and_the_last_one_usage_and_timing() -> None:
    with FakeServer(FakeInference(say("Once", " upon"))) as server, Client(server.address) as client:
        first, last = list(client.generate("Hello"))
    assert (first.text, first.token_ids, first.finish_reason, first.usage) == ("Once", (100,), None, None)
    assert (last.text, last.token_ids, last.finish_reason) == (" upon", (101,), FinishReason.STOP)
    assert last.usage == Usage(prompt_tokens=4, completion_tokens=2, cached_tokens=2)
    assert last.timing is not None
    assert (last.timing.prefill_ms, last.timing.decode_worker, last.timing.pages_moved) == (20.0, "decode-1", 3)


def test_complete_returns_every_completion() -> None:
    script = [*say("a", "b", last=False), *say("c", index=1)]
    with FakeServer(FakeInference(script)) as server, Client(server.address) as client:
        result = client.complete("Hello", n=2)
    assert [completion.text for completion in result.completions] == ["ab", "c"]
    assert (result.text, result.token_ids, result.finish_reason) == ("ab", (100, 101), FinishReason.STOP)
    assert (result.request_id, result.model) == ("r", "fake")


def test_only_the_given_options_are_sent() -> None:
    service = FakeInference(say("x"), say("x"), say("x"))
    with FakeServer(service) as server, Client(server.address) as client:
        client.complete("Hello", temperature=0, stop="end", logit_bias={5: -1.5})
        client.complete([1, 2, 3])
        client.complete([{"role": "user", "content": "hi"}], max_tokens=7, model="m", request_id="mine")
    text, tokens, chat = service.requests
    assert text.text == "Hello"
    assert text.sampling.HasField("temperature")
    assert not text.sampling.HasField("top_p")
    assert (list(text.sampling.stop), dict(text.sampling.logit_bias)) == (["end"], {5: -1.5})
    assert (list(tokens.token_ids), tokens.HasField("text")) == ([1, 2, 3], False)
    assert (chat.messages[0].role, chat.messages[0].content, chat.sampling.max_tokens) == ("user", "hi", 7)
    assert (chat.model, chat.request_id) == ("m", "mine")


def test_a_chat_is_sent_with_its_tools_and_template_arguments() -> None:
    function = {"name": "now", "description": "Returns the time.", "parameters": {"type": "object"}}
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What time is it?", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "A tool knows."},
        {"role": "tool", "content": "noon", "tool_call_id": "c1"},
    ]
    chat = Chat(messages, [{"type": "function", "function": function}], template_arguments={"enable_thinking": False})
    service = FakeInference(say("x"), say("x"))
    with FakeServer(service) as server, Client(server.address) as client:
        client.complete(chat, grammar=Grammar(GrammarKind.REGEX, "[a-z]+"))
        client.complete(Chat(messages[:1], continue_final_message=True))
    whole, continued = service.requests
    user, assistant, tool = whole.messages
    assert (user.name, tool.content, tool.tool_call_id) == ("Ann", "noon", "c1")
    assert (assistant.content, assistant.reasoning) == ("", "A tool knows.")
    [sent] = assistant.tool_calls
    assert (sent.id, sent.name, sent.arguments) == ("c1", "now", "{}")
    [offered] = whole.chat.tools
    assert (offered.name, offered.description) == ("now", "Returns the time.")
    assert json.loads(offered.parameters) == {"type": "object"}
    assert json.loads(whole.chat.template_arguments) == {"enable_thinking": False}
    assert not whole.chat.HasField("add_generation_prompt")
    assert whole.sampling.grammar.source == "[a-z]+"
    assert continued.chat.continue_final_message


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (Chat([]), {}, "messages: is empty"),
        (Chat([{"role": "user", "content": None}]), {}, r"messages\[0\].content: is None"),
        (Chat([{"role": "user", "content": "a", "tool": 1}]), {}, r"messages\[0\]: has the keys .*'tool'"),
        (
            Chat([{"role": "assistant", "tool_calls": [{"id": "a"}]}]),
            {},
            r"messages\[0\].tool_calls\[0\]: is {'id': 'a'}; give {'type': 'function'",
        ),
        (Chat([{"role": "user", "content": "a"}], [{"name": "f"}]), {}, r"tools\[0\]: is {'name': 'f'}; give"),
        (Chat([{"role": "user", "content": "a"}], template_arguments={"a": {1}}), {}, "template_arguments: cannot be"),
        ([], {}, "prompt: is empty"),
        ([-1], {}, "prompt: .*-1"),
        (["a", "b"], {}, "prompt: "),
        ([{"role": "user"}], {}, r"messages\[0\]: has the keys \['role'\]"),
        ([{"role": "user", "content": 3}], {}, r"messages\[0\].content: is 3"),
        ("bad \ud800", {}, "prompt: is not valid Unicode"),
        ("x", {"temprature": 1}, "temprature: is not a sampling option; use one of .*temperature"),
        ("x", {"max_tokens": -3}, "max_tokens = -3"),
        ("x", {"seed": "abc"}, "seed = 'abc'"),
        ("x", {"no_speculation": "off"}, "no_speculation: is 'off'; give True or False"),
    ],
)
def test_unencodable_arguments_are_refused_by_name(prompt: object, options: dict[str, object], message: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidInput, match=message):
        client.generate(prompt, **options)  # type: ignore[arg-type]


def test_errors_keep_their_type_across_the_wire() -> None:
    errors = [
        InvalidInput("temperature", "-1 is negative; give 0 or more"),
        ModelNotFound("no model 'x'"),
        InternalError("boom"),
    ]
    with FakeServer(FakeInference(*([error] for error in errors))) as server, Client(server.address) as client:
        for error in errors:
            with pytest.raises(type(error)) as caught:
                client.complete("Hello")
            assert caught.value.message == error.message
    assert isinstance(caught.value, InternalError)


def test_unavailable_before_the_first_token_is_retried_after_the_servers_delay() -> None:
    service = FakeInference([Unavailable("busy", retry_after_s=0.3)], [Unavailable("busy")], say("ok"))
    with FakeServer(service) as server, Client(server.address, retry=QUICK) as client:
        started_s = time.monotonic()
        assert client.complete("Hello").text == "ok"
    assert time.monotonic() - started_s >= 0.3
    assert len(service.requests) == 3


def test_unavailable_after_the_first_token_continues_after_it_with_the_same_seed() -> None:
    first, second = say("a", "b")
    service = FakeInference([first, Unavailable("gone")], [second])
    with FakeServer(service) as server, Client(server.address, retry=QUICK) as client:
        assert [chunk.text for chunk in client.generate("Hello", max_tokens=9)] == ["a", "b"]
    before, after = service.requests
    assert before.sampling.seed == after.sampling.seed
    assert not before.emitted
    assert [(completion.index, list(completion.token_ids), completion.finished) for completion in after.emitted] == [
        (0, list(first.token_ids), False)
    ]


def test_an_ended_stream_is_not_restarted() -> None:
    whole = say("a", "b")
    service = FakeInference([*whole, Unavailable("gone")], say("never"))
    with FakeServer(service) as server, Client(server.address, retry=QUICK) as client:
        stream = client.generate("Hello")
        assert [next(stream).text, next(stream).text] == ["a", "b"]
        with pytest.raises(Unavailable, match="gone"):
            next(stream)
    assert len(service.requests) == 1


def test_calls_continue_at_the_next_router_and_stay_there() -> None:
    first, second = say("a", "b")
    dead, alive = FakeInference([first, Unavailable("gone")]), FakeInference([second], say("ok"))
    with FakeServer(dead) as first, FakeServer(alive) as second:
        with Client([first.address, second.address], retry=QUICK) as client:
            assert client.complete("Hello").text == "ab"
            assert client.complete("Hello").text == "ok"
    assert (len(dead.requests), len(alive.requests)) == (1, 2)


def test_a_client_without_a_router_is_refused() -> None:
    with pytest.raises(InvalidInput, match="target"):
        Client([])


def test_attempts_are_bounded_and_overload_is_not_retried() -> None:
    service = FakeInference(
        *([Unavailable("busy")] for _ in range(3)), [Overloaded("full", retry_after_s=0.01)], say("x")
    )
    with FakeServer(service) as server, Client(server.address, retry=QUICK) as client:
        with pytest.raises(Unavailable, match="busy"):
            client.complete("Hello")
        assert len(service.requests) == 3
        with pytest.raises(Overloaded, match="full"):
            client.complete("Hello")
    assert len(service.requests) == 4


def test_a_client_whose_calls_all_fail_soon_stops_retrying() -> None:
    """Ten retries in ten seconds are always allowed; beyond that, only successes earn more."""
    service = FakeInference(*[[Unavailable("down")] for _ in range(30)])
    with FakeServer(service) as server, Client(server.address, retry=QUICK) as client:
        for _ in range(8):
            with pytest.raises(Unavailable):
                client.complete("Hello")
    assert len(service.requests) == 8 + 10


def test_a_lane_is_sent_and_an_unknown_one_is_refused() -> None:
    service = FakeInference(say("x"), say("x"), say("x"))
    with FakeServer(service) as server, Client(server.address) as client:
        client.complete("Hello", lane=Lane.BULK)
        client.complete("Hello", lane="interactive")
        client.complete("Hello")
        with pytest.raises(InvalidInput, match="lane: is 'fast'; give one of interactive, standard, bulk"):
            client.generate("Hello", lane="fast")
    assert [request.lane for request in service.requests] == [
        common_pb2.LANE_BULK,
        common_pb2.LANE_INTERACTIVE,
        common_pb2.LANE_UNSPECIFIED,
    ]


def test_an_address_without_a_server_is_unavailable() -> None:
    with Client("127.0.0.1:1", retry=QUICK) as client:
        with pytest.raises(Unavailable, match="refused"):
            client.complete("Hello", timeout_s=1.5)
        with pytest.raises(Unavailable, match="refused"):
            client.complete("Hello")  # without a deadline, connect_s bounds it


def test_a_refused_connection_is_retried_until_a_server_listens() -> None:
    """Refusals count neither as attempts nor against the budget, and there are far more than both would allow."""
    service = FakeInference(say("ok"))
    with socket.socket() as reserved:  # bound but not listening, so connections are refused and nobody takes the port
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        refused = threading.Event()

        class Watched(RetryPolicy):
            def connect_delay_s(self, refusals: int, draw: Callable[[], float]) -> float:
                if refusals == 50:
                    refused.set()
                return 0.001

        with Client(f"127.0.0.1:{port}", retry=Watched(max_attempts=2)) as client, ThreadPoolExecutor() as pool:
            answer = pool.submit(client.complete, "Hello", timeout_s=60)
            assert refused.wait(60)
            with FakeServer(service, port):
                assert answer.result(60).text == "ok"
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("code", "details", "metadata", "failure"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; connect: Connection refused (111)", (), Failure.REFUSED),
        ("UNAVAILABLE", "failed to connect to all addresses; Ssl handshake failed", (), Failure.BROKEN),
        ("UNAVAILABLE", "Socket closed", (), Failure.BROKEN),
        ("UNAVAILABLE", "failed to connect to all addresses", ((STATUS_DETAILS, b""),), Failure.ANSWERED),
        ("INTERNAL", "Socket closed", (), Failure.ANSWERED),
    ],
)
def test_failures_are_classified(code: str, details: str, metadata: Any, failure: Failure) -> None:
    class Failed(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode[code]

        def details(self) -> str:
            return details

        def trailing_metadata(self) -> Any:
            return metadata

    assert failure_of(Failed()) is failure


def test_the_first_attempt_after_a_broken_connection_is_free_and_a_refused_one_lasts_to_the_deadline() -> None:
    budget = RetryBudget(reserve=0.0)
    broken = Attempts(QUICK, deadline_s=10.0, budget=budget)
    assert broken.next_delay_s(Unavailable("reset"), 0.0, lambda: 0.5, Failure.BROKEN) == 0.005
    with pytest.raises(Unavailable, match="again"):
        broken.next_delay_s(Unavailable("again"), 0.0, lambda: 0.5, Failure.BROKEN)
    refused = Attempts(QUICK, deadline_s=10.0, budget=budget)
    for _ in range(1000):
        assert refused.next_delay_s(Unavailable("refused"), 9.9, lambda: 0.5, Failure.REFUSED) <= 0.01
    with pytest.raises(Unavailable, match="late"):
        refused.next_delay_s(Unavailable("late"), 9.995, lambda: 0.5, Failure.REFUSED)
    once = Attempts(RetryPolicy(max_attempts=1), deadline_s=10.0)
    with pytest.raises(Unavailable, match="refused"):
        once.next_delay_s(Unavailable("refused"), 0.0, lambda: 0.5, Failure.REFUSED)


def test_one_deadline_bounds_the_call_and_its_retries() -> None:
    service = FakeInference([HANG], [Unavailable("later", retry_after_s=600.0)])
    with FakeServer(service) as server, Client(server.address, retry=QUICK) as client:
        with pytest.raises(DeadlineExceeded):
            client.complete("Hello", timeout_s=1.0)
        with pytest.raises(Unavailable, match="later"):  # it does not wait for a retry after the deadline
            client.complete("Hello", timeout_s=60)
    assert service.time_left_s[0] is not None
    assert service.time_left_s[0] <= 1.01  # the call's own deadline, which gRPC rounds up, not the default one


def test_leaving_the_block_cancels_the_call() -> None:
    service = FakeInference([say("a", "b")[0], HANG])
    with FakeServer(service) as server, Client(server.address) as client:
        with client.generate("Hello") as stream:
            assert next(stream).text == "a"
            assert not service.cancelled.is_set()
        assert service.cancelled.wait(60)
        assert list(stream) == []
        with pytest.raises(Cancelled):
            stream.complete()


def test_an_abandoned_stream_is_cancelled() -> None:
    service = FakeInference([say("a", "b")[0], HANG])
    with FakeServer(service) as server, Client(server.address) as client:
        for _chunk in client.generate("Hello"):
            break
        gc.collect()
        assert service.cancelled.wait(60)


def test_a_truncated_stream_is_an_error_and_not_a_short_answer() -> None:
    service = FakeInference(say("a", "b")[:1])
    with FakeServer(service) as server, Client(server.address) as client, pytest.raises(InternalError, match="finish"):
        client.complete("Hello")


def test_texts_are_tokenized_and_models_listed() -> None:
    with FakeServer(FakeInference([Unavailable("starting")])) as server, Client(server.address, retry=QUICK) as client:
        assert client.tokenize("two words").tokens == ("two", "words")
        assert client.tokenize([{"role": "user", "content": "hi"}]).token_ids == (0,)
        (model,) = client.list_models()
    assert (model.id, model.context_length) == ("fake", 64)


@pytest.mark.processes
def test_the_client_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from penstock import AsyncClient, Client; Client('x:1').close();"
        "print([m for m in ('torch', 'ray', 'uvloop', 'transformers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
