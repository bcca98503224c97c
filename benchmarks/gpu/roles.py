"""Compares a prefill and a decode worker, plain processes that share the device, with one colocated worker.

All tokens should be the same. TTFT and ITL are those of a client of the router; the exposed part of a transfer is what
the workers report as not hidden behind the prefill.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from benchmarks.common.report import Row
from benchmarks.common.shapes import QWEN3_600M, TOY, random_llama
from benchmarks.gpu.bench_device import BenchDevice
from benchmarks.serving.deployments import serving_router
from penstock.client.async_client import AsyncClient
from penstock.config import DecodeConfig

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """Requests that are sent at once, after one that does not count."""

    count: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """An answer as its client saw it."""

    token_ids: tuple[int, ...]
    ttft_s: float
    itl_s: float  # mean time of a token after the first
    exposed_s: float


def role_rows(bench: BenchDevice) -> Iterator[Row]:
    """Yields the share of equal answers, TTFT, ITL and the exposed part of transfers."""
    shape, load = bench.pick((QWEN3_600M, RoleLoad(16, 2048, 64)), (TOY, RoleLoad(2, 40, 4)))
    context, num_pages = bench.pick((8192, 16 * 160), (64, 32))
    model = random_llama(shape, context=context, family="qwen3")
    engine = {"device": bench.device.type, "num_pages": num_pages, "share_weights": False}
    found = {}
    for name, placement in (("two processes", "remote"), ("colocated", "local")):
        decode = DecodeConfig.model_validate({"placement": placement})
        transport = bench.pick("cuda_ipc", "auto")
        with serving_router(model, decode, engine, transport, is_colocated=name == "colocated") as router:
            found[name] = asyncio.run(_serve(router.address, load, shape["vocab_size"]))
    apart, together = found["two processes"], found["colocated"]
    num_equal = sum(run.token_ids == other.token_ids for run, other in zip(apart, together, strict=True))
    at = f"0.6B, {load.count} prompts of {load.prompt_tokens} at once"
    share = num_equal / load.count
    yield Row(f"check: equal answers of both, {at}", share, "of them", "wanted at least", 1.0)
    for what, read in (("TTFT", lambda run: run.ttft_s), ("ITL", lambda run: run.itl_s)):
        values = [median(map(read, served)) * 1e3 for served in (apart, together)]
        yield Row(f"{what} of two processes, {at}", values[0], "ms", "colocated", values[1])
    exposed_s, ttft_s = (median(values) for values in zip(*((run.exposed_s, run.ttft_s) for run in apart), strict=True))
    yield Row(f"exposed transfer of two processes, {at}", exposed_s * 1e3, "ms", "TTFT", ttft_s * 1e3)


async def _serve(address: str, load: RoleLoad, vocab_size: int) -> list[Served]:
    async with AsyncClient(address) as client:
        await _answer(client, load, vocab_size, load.count)
        return await asyncio.gather(*(_answer(client, load, vocab_size, number) for number in range(load.count)))


async def _answer(client: AsyncClient, load: RoleLoad, vocab_size: int, number: int) -> Served:
    prompt = [3 + (number * 7919 + place * 31) % (vocab_size - 3) for place in range(load.prompt_tokens)]
    started_s, first_s, exposed_ms = time.monotonic(), 0.0, 0.0
    token_ids: list[int] = []
    answer = client.generate(
        prompt, timeout_s=_TIMEOUT_S, max_tokens=load.output_tokens, temperature=0.0, ignore_eos=True
    )
    async for chunk in answer:
        first_s = first_s or time.monotonic()
        token_ids += chunk.token_ids
        exposed_ms = chunk.timing.transfer_ms if chunk.timing is not None else exposed_ms
    itl_s = (time.monotonic() - first_s) / (len(token_ids) - 1)
    return Served(tuple(token_ids), first_s - started_s, itl_s, exposed_ms / 1e3)
