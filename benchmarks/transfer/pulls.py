"""Measures the prefix lengths and links for which pulling a prefix beats computing it (`make bench-pull`).

Workers of the 135M shape (bf16) with one thread each: the first has cached a prompt, the second is asked for its first
token, with its own cache cleared. It computes the prompt, waits until all of it is pulled, or decides by what it has
learned, which includes computing the beginning while the rest is pulled; the three take turns on the same prompt. Both
are colocated workers, or with `--role prefill` the second is a prefill worker, which pulls from another one and then
from a decode worker, and hands the prompt to a third worker, whose first token counts. A slower link is emulated at the
source, which holds each batch back for as long as its bytes would take; the transport is shared memory. The last row of
each link shows the first decision of a worker that has not yet learned how slow that link is.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

from benchmarks.common.report import Curves, Row, publish
from benchmarks.common.shapes import LLAMA_135M, random_llama
from decode_worker.server import DecodeServer
from penstock.config import WorkerConfig
from penstock.types import Role, SamplingParams
from penstock.v1 import worker_pb2
from prefill_worker.server import PrefillServer
from tests.support.serving import Caller, caller, worker_config, workers
from worker.handover.source import PageSource
from worker.pull.policy import PullCosts, PullPlan

LINKS = {"shared memory": None, "1 GB/s": 1e9, "100 MB/s": 1e8, "30 MB/s": 3e7}  # bytes a second; None: as it is
LENGTHS = {Role.DECODE: (128, 256, 512, 1024, 2048, 3584), Role.PREFILL: (256, 512, 1024, 2048)}  # tokens
FIRST_TOKENS = 2048  # prompt length of a worker's decision before it has learned anything
_ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_PATIENCE_S = 60.0


Server = PrefillServer | DecodeServer


class Pair:
    """A worker that holds prompts, and one that may pull them."""

    def __init__(
        self,
        holder: Server,
        puller: Server,
        ask_holder: Caller,
        ask_puller: Caller,
        target: DecodeServer | None = None,
    ) -> None:
        """`target` is the decode worker of prompts that a prefill worker computes, and the one that is called then."""
        self.puller = puller
        self._holder = holder
        self._ask_holder = ask_holder
        self._ask_puller = ask_puller
        self._target = target
        self._source = worker_pb2.PrefixSource(
            worker_id="holder", epoch=holder.epoch, address=holder.address, own_address=puller.address
        )

    async def cache(self, prompt: Sequence[int]) -> None:
        """Lets the holder compute a prompt."""
        await self._clear(self._target)
        await _first_token(self._ask_holder, self._holder, prompt, None)

    async def first_token_s(self, prompt: Sequence[int], *, may_pull: bool) -> float:
        """Clears the puller's cache and returns the seconds to its first token."""
        await self._clear(self.puller)
        await self._clear(self._target)
        self._source.cached_tokens = len(prompt)
        started_s = time.perf_counter()
        await _first_token(self._ask_puller, self.puller, prompt, self._source if may_pull else None)
        return time.perf_counter() - started_s

    async def _clear(self, server: Server | None) -> None:
        """Empties a worker's prefix cache."""
        if server is None:
            return
        done, running, cache = asyncio.Event(), asyncio.get_running_loop(), server.shell._engine.prefix_cache

        def clear() -> None:
            cache.clear()
            running.call_soon_threadsafe(done.set)

        server.shell.loop.post(clear)
        await asyncio.wait_for(done.wait(), _PATIENCE_S)


async def _first_token(
    caller: Caller, server: Server, prompt: Sequence[int], source: worker_pb2.PrefixSource | None
) -> None:
    """Lets a worker compute a prompt; `caller` calls that worker, or the target of a prefill worker."""
    if isinstance(server, DecodeServer):
        stream = caller.submit(prompt, _ONE, source=source)
    else:
        candidate = worker_pb2.PrefillCandidate(
            worker_id=server.shell.config.worker_id, epoch=server.epoch, address=server.address, prefix_source=source
        )
        stream = caller.submit(prompt, _ONE, [candidate])
    answer = await caller.answer(stream)
    if answer.error is not None:
        raise answer.error


@contextmanager
def link(holder: Server, bytes_s: float | None) -> Iterator[None]:
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


def _config(role: Role, name: str, placement: str = "local") -> WorkerConfig:
    return worker_config(
        role,
        random_llama(),
        name,
        engine={"num_pages": 1200, "dtype": "bfloat16"},
        decode={"placement": placement},
        transfer={"min_pull_tokens": 64},
    )


async def measure_decode(rounds: int, lengths: Sequence[int]) -> tuple[list[Row], list[Curves]]:
    configs = [_config(Role.DECODE, name) for name in ("holder", "puller")]
    async with workers(*configs) as (holder, puller):
        assert isinstance(holder, DecodeServer)
        assert isinstance(puller, DecodeServer)
        async with caller(holder) as ask_holder, caller(puller) as ask_puller:
            return await _over_links("", Pair(holder, puller, ask_holder, ask_puller), holder, rounds, lengths)


async def measure_prefill(rounds: int, lengths: Sequence[int]) -> tuple[list[Row], list[Curves]]:
    configs = [_config(Role.PREFILL, name) for name in ("prefill holder", "puller")]
    configs += [_config(Role.DECODE, "decode holder"), _config(Role.DECODE, "target", "remote")]
    rows: list[Row] = []
    curves: list[Curves] = []
    async with workers(*configs) as (prefill, puller, decode, target):
        assert isinstance(decode, DecodeServer)
        assert isinstance(target, DecodeServer)
        async with caller(decode) as ask_decode, caller(target) as ask_target:
            for name, holder, ask_holder in (("P to P", prefill, ask_target), ("D to P", decode, ask_decode)):
                pair = Pair(holder, puller, ask_holder, ask_target, target)
                found = await _over_links(f"{name}, ", pair, holder, rounds, lengths)
                rows += found[0]
                curves += found[1]
    return rows, curves


async def _over_links(
    route: str, pair: Pair, holder: Server, rounds: int, lengths: Sequence[int]
) -> tuple[list[Row], list[Curves]]:
    rng = random.Random(0)
    prompts = [rng.choices(range(3, LLAMA_135M["vocab_size"]), k=length) for length in lengths]
    first = rng.choices(range(3, LLAMA_135M["vocab_size"]), k=FIRST_TOKENS)
    for prompt in [*prompts, first]:
        await pair.cache(prompt)
        await pair.first_token_s(prompt, may_pull=False)  # the puller learns the time of its steps
    rows: list[Row] = []
    curves: list[Curves] = []
    for name, bytes_s in LINKS.items():
        with link(holder, bytes_s):
            found = await _over_link(route + name, pair, prompts, first, rounds)
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
    parser.add_argument("--role", choices=[role.value for role in Role], default=Role.DECODE.value)
    parser.add_argument("--lengths", nargs="+", type=int)
    options = parser.parse_args()
    role = Role(options.role)
    measure = measure_decode if role is Role.DECODE else measure_prefill
    rows, curves = asyncio.run(measure(options.rounds, options.lengths or LENGTHS[role]))
    publish(
        "pull" if role is Role.DECODE else "pull_prefill",
        f"one prompt at a time, median of {options.rounds} alternating rounds; 135M Llama, bf16, a thread a worker",
        rows,
        curves=curves,
    )


if __name__ == "__main__":
    main()
