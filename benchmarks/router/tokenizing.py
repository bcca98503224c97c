"""Measures what prompts cost before they are routed, as a part of `benchmarks.router`.

It covers encoding, the next turn of a conversation, the chat template's process, and the pauses of the event loop.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import tokenizers

from benchmarks.common.report import Row, percentile
from benchmarks.common.timing import Stopwatch
from benchmarks.router.load import make_text
from router.text.chat_template import ChatTemplate
from router.text.template_functions import compile_template
from router.text.tokenizer import Tokenizer

_TICK_S = 0.001
_TURN_CHARACTERS = 870  # about 400 tokens
_NUM_TURNS = 40


async def tokenizing_rows(model: Path) -> list[Row]:
    tokenizer = Tokenizer.load(model)
    try:
        return [
            *await _pause_rows(tokenizer, model),
            await _conversation_row(tokenizer),
            _template_row(json.loads((model / "tokenizer_config.json").read_text())["chat_template"]),
        ]
    finally:
        tokenizer.close()


async def _pause_rows(tokenizer: Tokenizer, model: Path) -> list[Row]:
    """Measures the event loop's pauses while 16k-token texts are encoded one after another in a thread."""
    library = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [make_text(random.Random(seed), 35_000) for seed in range(40)]
    plain = await _pauses(lambda text: asyncio.to_thread(library.encode, text), texts)
    ours = await _pauses(tokenizer.encode, texts)
    baseline = "library's encode in a thread"
    return [
        Row("loop pause p95 while 16k-token texts are encoded", ours[0], "ms", baseline, plain[0]),
        Row("longest loop pause while 16k-token texts are encoded", ours[1], "ms", baseline, plain[1]),
    ]


async def _pauses(encode: Callable[[str], Awaitable[object]], texts: list[str]) -> tuple[float, float]:
    """Returns the 95th percentile and the longest of the loop's pauses in ms."""
    late_ms: list[float] = []

    async def tick() -> None:
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            late_ms.append((time.perf_counter() - began_s - _TICK_S) * 1e3)

    ticking = asyncio.create_task(tick())
    for text in texts:
        await encode(text)
    ticking.cancel()
    return percentile(late_ms, 0.95), max(late_ms)


async def _conversation_row(tokenizer: Tokenizer) -> Row:
    """Measures one more turn after 16k tokens, with encoding the conversation for the first time as baseline."""
    rng = random.Random(1)
    chat = [
        {"role": ("user", "assistant")[turn % 2], "content": make_text(rng, _TURN_CHARACTERS)}
        for turn in range(_NUM_TURNS)
    ]
    first, again = [], []
    for number in range(20):
        with Stopwatch() as watch:
            await tokenizer.encode_chat(chat, str(number))
        first.append(watch.seconds)
        grown = [*chat, {"role": "user", "content": "And then?"}]
        with Stopwatch() as watch:
            await tokenizer.encode_chat(grown, str(number))
        again.append(watch.seconds)
    median = statistics.median
    return Row("next turn of a 16k-token conversation", median(again) * 1e3, "ms", "first time", median(first) * 1e3)


def _template_row(source: str) -> Row:
    """Measures a chat of two messages through the template's process, with rendering it in this process as baseline."""
    chat = [{"role": "user", "content": "Hello there, friend. " * 10}] * 2
    template, here = ChatTemplate(source, {"bos_token": "<|bos|>"}, "benchmark"), compile_template(source)
    template.render(chat)
    apart_s, here_s = [], []
    for _ in range(500):
        with Stopwatch() as watch:
            template.render(chat)
        apart_s.append(watch.seconds)
        with Stopwatch() as watch:
            here.render(messages=chat, add_generation_prompt=True, bos_token="<|bos|>")
        here_s.append(watch.seconds)
    template.close()
    apart_us, here_us = statistics.median(apart_s) * 1e6, statistics.median(here_s) * 1e6
    return Row("chat template in its own process", apart_us, "us", "in this process", here_us)
