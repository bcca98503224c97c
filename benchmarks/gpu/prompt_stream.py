"""Compares prompts on a share of the multiprocessors, beside decode steps, with chunks within decode steps.

A colocated worker decodes streams while prompts arrive one after another. A stream's longest pauses are what a prompt
costs it, a prompt's TTFT is what sparing the streams costs the prompt, and all tokens should be the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from benchmarks.common.report import Row
from benchmarks.common.shapes import QWEN3_600M, TOY, random_llama
from benchmarks.gpu.bench_device import BenchDevice
from benchmarks.serving.deployments import serving_router
from penstock.client.async_client import AsyncClient
from penstock.config import DecodeConfig

_TIMEOUT_S = 120.0
_SHARES = (0.0, 0.25, 0.5)  # 0: chunks within decode steps


@dataclass(frozen=True, slots=True)
class BesideLoad:
    """Streams that decode all the time, and prompts that arrive meanwhile, one after another."""

    num_streams: int
    stream_tokens: int
    num_prompts: int
    prompt_tokens: int


@dataclass(slots=True)
class StreamRun:
    """An answer as its client saw it."""

    token_ids: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    pauses_s: list[float] = field(default_factory=list)  # between its tokens


def prompt_stream_rows(bench: BenchDevice) -> Iterator[Row]:
    """Yields the p99 of streams' ITL, the prompts' median TTFT and the share of equal answers, for each share of the
    multiprocessors."""
    shape, load = bench.pick((QWEN3_600M, BesideLoad(32, 1024, 16, 4096)), (TOY, BesideLoad(2, 8, 1, 20)))
    context, num_pages = bench.pick((8192, 32 * 80 + 16 * 260), (64, 32))
    model = random_llama(shape, context=context, family="qwen3")
    engine = {"device": bench.device.type, "num_pages": num_pages, "share_weights": False, "prefix_caching": False}
    at = f"0.6B, {load.num_streams} streams, prompts of {load.prompt_tokens}"
    chunked: list[StreamRun] = []
    for share in bench.pick(_SHARES, _SHARES[:2]):
        decode = DecodeConfig.model_validate({"placement": "local", "prompt_sm_share": share})
        with serving_router(model, decode, engine, "auto", is_colocated=True) as router:
            runs = asyncio.run(_serve(router.address, load, shape["vocab_size"]))
        chunked = chunked or runs
        if runs is chunked:
            continue
        on = f"on {share:.0%} of the SMs, {at}"
        for what, read in (("ITL p99", _itl_p99_s), ("TTFT", _ttft_s)):
            yield Row(f"{what} with prompts {on}", read(runs, load) * 1e3, "ms", "chunks", read(chunked, load) * 1e3)
        num_equal = sum(run.token_ids == other.token_ids for run, other in zip(runs, chunked, strict=True))
        yield Row(f"check: equal answers {on}", num_equal / len(runs), "of them", "wanted at least", 1.0)


def _itl_p99_s(runs: list[StreamRun], load: BesideLoad) -> float:
    pauses_s = sorted(pause for run in runs[: load.num_streams] for pause in run.pauses_s)
    return pauses_s[int(0.99 * (len(pauses_s) - 1))]


def _ttft_s(runs: list[StreamRun], load: BesideLoad) -> float:
    return median(run.ttft_s for run in runs[load.num_streams :])


async def _serve(address: str, load: BesideLoad, vocab_size: int) -> list[StreamRun]:
    """Returns the streams' runs, then those of the prompts."""
    async with AsyncClient(address) as client:
        await _answer(client, _prompt(load.prompt_tokens, load.num_prompts, vocab_size), 4)
        prompts = [_prompt(16, 1000 + number, vocab_size) for number in range(load.num_streams)]
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(_answer(client, prompt, load.stream_tokens)) for prompt in prompts]
            late = []
            for number in range(load.num_prompts):
                late.append(await _answer(client, _prompt(load.prompt_tokens, number, vocab_size), 4))
        return [*(stream.result() for stream in streams), *late]


def _prompt(num_tokens: int, number: int, vocab_size: int) -> list[int]:
    return [3 + (number * 7919 + place * 31) % (vocab_size - 3) for place in range(num_tokens)]


async def _answer(client: AsyncClient, prompt: list[int], max_tokens: int) -> StreamRun:
    run, last_s = StreamRun(), time.monotonic()
    answer = client.generate(prompt, timeout_s=_TIMEOUT_S, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    async for chunk in answer:
        if chunk.token_ids:
            now_s = time.monotonic()
            if run.token_ids:
                run.pauses_s.append(now_s - last_s)
            else:
                run.ttft_s = now_s - last_s
            run.token_ids += chunk.token_ids
            last_s = now_s
    return run
