"""Measures the prefix lengths and links for which pulling a prefix beats computing it (`make bench-pull`).

Two colocated workers of the 135M shape (bf16) with one thread each: the first has cached a prompt, the second is asked
for its first token, with its own cache cleared. It computes the prompt, waits until all of it is pulled, or decides by
what it has learned, which includes computing the beginning while the rest is pulled; the three take turns on the same
prompt. A slower link is emulated at the source, which holds each batch back for as long as its bytes would take; the
transport is shared memory. The last row of each link shows the first decision of a worker that has not yet learned how
slow that link is.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

from benchmarks.common.report import Curves, Row, publish
from benchmarks.common.shapes import LLAMA_135M, random_llama
from decode_worker.server import DecodeServer
from penstock.types import Role, SamplingParams
from penstock.v1 import worker_pb2
from tests.support.serving import Caller, caller, worker_config, workers
from worker.handover.source import PageSource
from worker.pull.policy import PullCosts, PullPlan

LINKS = {"shared memory": None, "1 GB/s": 1e9, "100 MB/s": 1e8, "30 MB/s": 3e7}  # bytes a second; None: as it is
LENGTHS = (128, 256, 512, 1024, 2048, 3584)  # tokens
FIRST_TOKENS = 2048  # prompt length of a worker's decision before it has learned anything
_ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_PATIENCE_S = 60.0


class Pair:
    """A worker that holds prompts, and one that may pull them."""

    def __init__(self, holder: DecodeServer, puller: DecodeServer, ask_holder: Caller, ask_puller: Caller) -> None:
        self.puller = puller
        self._ask_holder = ask_holder
        self._ask_puller = ask_puller
        self._source = worker_pb2.PrefixSource(
            worker_id="holder", epoch=holder.epoch, address=holder.address, own_address=puller.address
        )

    async def cache(self, prompt: Sequence[int]) -> None:
        """Lets the holder compute a prompt."""
        await self._ask_holder.answer(self._ask_holder.submit(prompt, _ONE))

    async def first_token_s(self, prompt: Sequence[int], *, may_pull: bool) -> float:
        """Clears the puller's cache and returns the seconds to its first token."""
        await self._on_loop(self.puller.shell._engine.prefix_cache.clear)
        self._source.cached_tokens = len(prompt)
        started_s = time.perf_counter()
        stream = self._ask_puller.submit(prompt, _ONE, source=self._source if may_pull else None)
        answer = await self._ask_puller.answer(stream)
        if answer.error is not None:
            raise answer.error
        return time.perf_counter() - started_s

    async def _on_loop(self, call: Callable[[], None]) -> None:
        done, running = asyncio.Event(), asyncio.get_running_loop()

        def run() -> None:
            call()
            running.call_soon_threadsafe(done.set)

        self.puller.shell.loop.post(run)
        await asyncio.wait_for(done.wait(), _PATIENCE_S)


@contextmanager
def link(holder: DecodeServer, bytes_s: float | None) -> Iterator[None]:
    """Delays each push of the holder by the time that its bytes would take over a link of `bytes_s`."""
    push = PageSource.push

    def late(self: PageSource, key: Any, offer: Any, pages: Any, *rest: Any) -> None:
        assert bytes_s is not None
        wait_s = len(pages) * self.page_bytes / bytes_s
        go_on = lambda: holder.shell.loop.post(lambda: push(self, key, offer, pages, *rest))  # noqa: E731
        timer = threading.Timer(wait_s, go_on)
        timer.daemon = True
        timer.start()

    with mock.patch.object(PageSource, "push", push if bytes_s is None else late):
        yield


def _always(*_: Any) -> PullPlan:
    return PullPlan(0.0, _PATIENCE_S, _PATIENCE_S)


async def _turn(pair: Pair, prompt: Sequence[int], way: str) -> float:
    if way == "pull":
        with mock.patch.object(PullCosts, "plan", _always):
            return await pair.first_token_s(prompt, may_pull=True)
    return await pair.first_token_s(prompt, may_pull=way == "decide")


async def measure(rounds: int, lengths: Sequence[int]) -> tuple[list[Row], list[Curves]]:
    rng, folder = random.Random(0), random_llama()
    configs = [
        worker_config(
            Role.DECODE,
            folder,
            name,
            engine={"num_pages": 1200, "dtype": "bfloat16"},
            decode={"placement": "local"},
            transfer={"min_pull_tokens": 64},
        )
        for name in ("holder", "puller")
    ]
    prompts = [rng.choices(range(3, LLAMA_135M["vocab_size"]), k=length) for length in lengths]
    first = rng.choices(range(3, LLAMA_135M["vocab_size"]), k=FIRST_TOKENS)
    rows: list[Row] = []
    curves: list[Curves] = []
    async with workers(*configs) as (holder, puller):
        assert isinstance(holder, DecodeServer)
        assert isinstance(puller, DecodeServer)
        async with caller(holder) as ask_holder, caller(puller) as ask_puller:
            pair = Pair(holder, puller, ask_holder, ask_puller)
            for prompt in [*prompts, first]:
                await pair.cache(prompt)
                await pair.first_token_s(prompt, may_pull=False)  # it learns the time of its steps
            for name, bytes_s in LINKS.items():
                with link(holder, bytes_s):
                    found = await _over_link(name, pair, prompts, first, rounds)
                rows += found[0]
                curves.append(found[1])
    return rows, curves


async def _over_link(
    name: str, pair: Pair, prompts: Sequence[Sequence[int]], first: Sequence[int], rounds: int
) -> tuple[list[Row], Curves]:
    costs = pair.puller.shell.pulls.costs
    costs._sources.clear()
    unlearned_s, computed_s = await _turn(pair, first, "decide"), await _turn(pair, first, "compute")
    ways = ["compute", "pull", "decide"]
    times: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds):
        for prompt in prompts:
            for way in ways[number % 3 :] + ways[: number % 3]:
                for known in costs._sources.values():
                    known.avoided_until_s = 0.0  # lets learned costs decide, not a pull that has just failed
                times.setdefault((way, len(prompt)), []).append(await _turn(pair, prompt, way))
    middle = {key: median(found) * 1e3 for key, found in times.items()}
    rows = []
    for prompt in prompts:
        length = len(prompt)
        for way in ways[1:]:
            label = f"{name}: first token after {length} tokens, {way}"
            rows.append(Row(label, middle[way, length], "ms", "compute", middle["compute", length]))
    label = f"{name}: first token after {len(first)} tokens, decide, nothing learned of the link"
    rows.append(Row(label, unlearned_s * 1e3, "ms", "compute", computed_s * 1e3))
    series = {way: [(float(len(prompt)), middle[way, len(prompt)]) for prompt in prompts] for way in ways}
    return rows, Curves(f"First token, {name}", "prefix, tokens", "ms", series, log_x=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer.pulls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    options = parser.parse_args()
    rows, curves = asyncio.run(measure(options.rounds, options.lengths))
    publish(
        "pull",
        f"one prompt at a time, median of {options.rounds} alternating rounds; 135M Llama, bf16, a thread a worker",
        rows,
        curves=curves,
    )


if __name__ == "__main__":
    main()
