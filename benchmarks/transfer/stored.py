"""Measures the prefix lengths and storages for which reading a prefix from the shared store beats computing it.

`make bench-store` runs two colocated workers of the 135M shape (bf16) with one thread each over one store in a folder:
the first has computed prompts and written them, the second is asked for its first token with its own cache cleared. It
computes the prompt, always reads it, or decides by what it has learned; the three take turns on the same prompt. The
files are in the machine's page cache, so the folder shows the cost of Penstock's own work; the other storages are
emulated below it by a wait for each object, of which four are read at once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from benchmarks.common.report import Curves, Row, publish
from benchmarks.common.shapes import LLAMA_135M, random_llama
from benchmarks.transfer.pulls import Pair
from decode_worker.server import DecodeServer
from penstock.config import KvStoreConfig, WorkerConfig
from penstock.metrics.worker_metrics import STORE_WRITE_SECONDS, STORE_WRITES, STORE_WRITTEN_BYTES
from penstock.types import Role
from tests.support.serving import caller, until, worker_config, workers
from worker.pull.policy import PullCosts, PullPlan
from worker.pull.store.backends.folder_store import FolderStore
from worker.pull.store.read_costs import ReadCosts
from worker.pull.store.shared_pages import SharedPages

RUN_TOKENS = 256  # of one object of this shape
LENGTHS = (256, 512, 1024, 2048, 3584)  # tokens; the last one of each prompt is always computed
STORAGES = {  # seconds for each object, and its bytes a second
    "folder": None,
    "10 ms, 500 MB/s a call": (0.010, 5e8),
    "50 ms, 100 MB/s a call": (0.050, 1e8),
    "50 ms, 10 MB/s a call": (0.050, 1e7),
}
WAYS = ("compute", "read", "decide")
_PATIENCE_S = 60.0


@contextmanager
def storage(delay: tuple[float, float] | None) -> Iterator[None]:
    """Delays each read of an object."""
    get = FolderStore.get

    def late(self: FolderStore, name: str, max_bytes: int) -> memoryview | None:
        content = get(self, name, max_bytes)
        if delay is not None and content is not None:
            time.sleep(delay[0] + len(content) / delay[1])
        return content

    with mock.patch.object(FolderStore, "get", late):
        yield


async def first_token_s(pair: Pair, prompt: Sequence[int], way: str) -> float:
    if way == "compute":
        with mock.patch.object(SharedPages, "source", return_value=None):
            return await pair.first_token_s(prompt, may_pull=False)
    if way == "read":
        with mock.patch.object(PullCosts, "plan", return_value=PullPlan(0.0, _PATIENCE_S, _PATIENCE_S)):
            return await pair.first_token_s(prompt, may_pull=False)
    return await pair.first_token_s(prompt, may_pull=False)


async def over_storage(pair: Pair, prompts: Sequence[Sequence[int]], rounds: int) -> dict[tuple[str, int], float]:
    """Returns the median milliseconds to the first token by way and length."""
    shared, costs = pair.puller.shell._shared, pair.puller.shell.pulls.costs
    assert shared is not None
    shared._costs = ReadCosts()
    costs._sources.clear()
    times: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds):
        for prompt in prompts:
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                for known in costs._sources.values():
                    known.avoided_until_s = 0.0  # lets learned costs decide, not a read that has just failed
                times.setdefault((way, len(prompt)), []).append(await first_token_s(pair, prompt, way))
    return {key: median(found) * 1e3 for key, found in times.items()}


def config(folder: Path, name: str, **settings: Any) -> WorkerConfig:
    store = KvStoreConfig.model_validate({"url": f"file://{folder}", "listing_s": 0.5, **settings})
    made = worker_config(
        Role.DECODE,
        random_llama(),
        name,
        engine={"num_pages": 1200, "dtype": "bfloat16"},
        decode={"placement": "local"},
        transfer={"min_pull_tokens": 64},
    )
    return made.model_copy(update={"kv_store": store})


async def measure(folder: Path, rounds: int, lengths: Sequence[int]) -> tuple[list[Row], list[Curves]]:
    rng = random.Random(0)
    prompts = [rng.choices(range(3, LLAMA_135M["vocab_size"]), k=length + 1) for length in lengths]
    num_objects = sum(length // RUN_TOKENS for length in lengths)
    rows: list[Row] = []
    curves: list[Curves] = []
    async with workers(config(folder, "writer", write="computed"), config(folder, "reader", write="never")) as servers:
        writer, reader = servers
        assert isinstance(writer, DecodeServer)
        assert isinstance(reader, DecodeServer)
        async with caller(writer) as ask_writer, caller(reader) as ask_reader:
            pair = Pair(writer, reader, ask_writer, ask_reader)
            for prompt in prompts:
                await pair.cache(prompt)
                with mock.patch.object(SharedPages, "source", return_value=None):
                    await pair.first_token_s(prompt, may_pull=False)  # it learns the time of its steps
            metrics = lambda: writer.shell._load().metrics  # noqa: E731
            await until(lambda: metrics()[STORE_WRITES.name] >= num_objects)
            await until(lambda: len(reader.shell._shared._known._listed) >= num_objects)  # type: ignore[union-attr]
            rate = metrics()[STORE_WRITTEN_BYTES.name] / metrics()[STORE_WRITE_SECONDS.name]
            rows.append(Row("folder: objects written, by one thread", rate / 1e9, "GB/s"))
            for name, delay in STORAGES.items():
                with storage(delay):
                    found = await over_storage(pair, prompts, rounds)
                for length in lengths:
                    for way in WAYS[1:]:
                        label = f"{name}: first token after {length} tokens, {way}"
                        base = found["compute", length + 1]
                        rows.append(Row(label, found[way, length + 1], "ms", "compute", base))
                series = {way: [(float(length), found[way, length + 1]) for length in lengths] for way in WAYS}
                curves.append(Curves(f"First token, {name}", "prefix, tokens", "ms", series, log_x=True))
    return rows, curves


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer.stored",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-store-") as folder:
        rows, curves = asyncio.run(measure(Path(folder), options.rounds, options.lengths))
    publish(
        "store",
        f"one prompt at a time, median of {options.rounds} alternating rounds; 135M Llama, bf16, a thread a worker",
        rows,
        curves=curves,
    )


if __name__ == "__main__":
    main()
