"""Tests harmful and endless chat templates: each ends with a clear error, and the next chat is served."""

from __future__ import annotations

import asyncio
import os
import signal
import tracemalloc
from dataclasses import replace

import psutil
import pytest

from penstock.errors import CheckpointError, InternalError, InvalidInput
from router.text.chat_template import ChatTemplate, TemplateLimits
from router.text.conversation import Conversation
from router.text.tokenizer import Tokenizer
from tests.support.router.router_fakes import MODEL

CHAT = [{"role": "user", "content": "Hello"}]
_LIMITS = TemplateLimits(max_s=60.0, max_characters=10_000, max_memory_bytes=64 << 20)
_GOOD = "{% else %}{{ messages[0].content }}{% endif %}"
_WHEN_BAD = "{% if messages[0].content == 'bad' %}"


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
            "{% endfor %}",
            "took more than 1 s",
        ),
        ("{{ 'x' * 20000 }}", "it renders them to 20000 characters; the limit is 10000"),
        ("{{ 'x' * 1000000000 }}", "it takes more than 64 MiB of memory"),
        ("{{ '%1000000000d' | format(1) }}", "it takes more than 64 MiB of memory"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('no such role') }}", "no such role"),
    ],
)
def test_a_rendering_ends_within_its_limits_and_the_next_is_served(bad, problem):
    limits = replace(_LIMITS, max_s=1.0) if problem.endswith("1 s") else _LIMITS
    template = ChatTemplate(_WHEN_BAD + bad + _GOOD, {}, "test", limits)
    try:
        with pytest.raises(InvalidInput, match=problem) as caught:
            template.render([{"role": "user", "content": "bad"}])
        assert caught.value.field == "messages"
        assert template.render(CHAT) == "Hello"
    finally:
        template.close()


def test_the_router_process_evaluates_no_template():
    tracemalloc.start()
    try:
        template = ChatTemplate("{{ 'x' * 100000000 }}{{ tools }}", {}, "test")
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert template.takes_tools
    assert most_bytes < 100_000_000


def test_a_template_cannot_see_the_environment():
    os.environ["PENSTOCK_TEST_SECRET"] = "hush"
    try:
        template = ChatTemplate("x", {}, "test")
        process = template.start()
        template.render(CHAT)
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            assert b"hush" not in file.read()
        template.close()
    finally:
        del os.environ["PENSTOCK_TEST_SECRET"]


def test_a_template_that_does_not_compile_is_reported_at_start():
    with pytest.raises(CheckpointError, match="folder: line 2 of the chat template"):
        ChatTemplate("one\n{% for %}", {}, "folder")


def test_special_tokens_are_variables_and_text_is_returned_unchanged():
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"}, "test")
    assert template.render([{"role": "user", "content": "日本 🙂\n"}]) == "<s>日本 🙂\n"
    template.close()


def test_chats_with_tools_use_the_tool_template_and_training_marks_show_nothing():
    tool_source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% generation %} tools{% endgeneration %}"
    template = ChatTemplate("plain {{ tools }}", {}, "test", tool_source=tool_source)
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert template.takes_tools
    assert template.render(Conversation(CHAT)) == "plain None"
    assert template.render(Conversation(CHAT, tools)) == "now tools"
    template.close()


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (Conversation(CHAT, [{"type": "function", "function": {"name": "now"}}]), "tools"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], r"messages\[0\].tool_calls"),
        ([*CHAT, {"role": "tool", "content": "noon"}], r"messages\[1\].role"),
    ],
)
async def test_options_that_a_template_does_not_use_are_refused(chat, field):
    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {}, "test")
    tokenizer = Tokenizer(Tokenizer.load(MODEL)._tokenizer, template)
    with pytest.raises(InvalidInput, match=f"^{field}: "):
        await tokenizer.encode_chat(chat)
    tokenizer.close()


async def test_a_dead_process_is_replaced_but_a_closed_one_is_not():
    tokenizer = Tokenizer.load(MODEL)
    expected = await tokenizer.encode_chat(CHAT)
    os.kill(tokenizer.template.start().pid, signal.SIGKILL)
    with pytest.raises(InternalError, match="status -9"):
        await tokenizer.encode_chat(CHAT)
    assert await tokenizer.encode_chat(CHAT) == expected
    process = tokenizer.template.start()
    tokenizer.close()
    assert process.wait(60) == -signal.SIGKILL


def test_a_closed_template_leaves_no_descriptor():
    before = psutil.Process().num_fds()
    template = ChatTemplate("{{ messages[0]['content'] }}", {}, "test")
    assert template.render([{"role": "user", "content": "Hi"}]) == "Hi"
    assert psutil.Process().num_fds() > before
    template.close()
    assert psutil.Process().num_fds() == before


async def test_a_cancelled_chat_does_not_disturb_others():
    tokenizer = Tokenizer.load(MODEL)
    chats = [[{"role": "user", "content": f"chat {number}"}] for number in range(20)]
    expected = [await tokenizer.encode_chat(chat) for chat in chats]
    tasks = [asyncio.create_task(tokenizer.encode_chat(chat)) for chat in chats]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for number, result in enumerate(results):
        assert isinstance(result, asyncio.CancelledError) if number % 3 == 0 else result == expected[number]
    tokenizer.close()


async def test_streams_continue_while_a_template_loops():
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(endless, {}, "test", TemplateLimits(max_s=2.0))
    tokenizer = Tokenizer(Tokenizer.load(MODEL)._tokenizer, template)
    chat = asyncio.create_task(tokenizer.encode_chat(CHAT))
    for _ in range(11):
        await asyncio.sleep(0.001)
    assert not chat.done()
    with pytest.raises(InvalidInput, match=r"2 s"):
        await chat
    tokenizer.close()
