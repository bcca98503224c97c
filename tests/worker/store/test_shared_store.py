"""Tests workers that share a store: later ones use what earlier ones computed, and failures change no answer."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from decode_worker.server import DecodeServer
from penstock.config import KvStoreConfig, SecurityConfig, WorkerConfig
from penstock.kv.kv_hints import KvHints
from penstock.metrics.worker_metrics import (
    PULLS_CANCELLED,
    STORE_FAILURES,
    STORE_MISSED_PAGES,
    STORE_READ_PAGES,
    STORE_REFUSED,
    STORE_USABLE,
    STORE_WRITES,
)
from penstock.types import Role, SamplingParams
from prefill_worker.server import PrefillServer
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.serving import TIMEOUT_S, Answer, caller, until, wait_until_empty, worker_config, workers
from worker.pull.policy import PullCosts, PullPlan
from worker.pull.store.backends.folder_store import FolderStore

PAGE = 16
RUN = 16 * PAGE  # tokens in an object
PROMPT = [(7 * index) % 90 + 5 for index in range(3 * RUN + 40)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

Server = PrefillServer | DecodeServer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048)


@pytest.fixture(autouse=True)
def always() -> Iterator[None]:
    """Predicts that every pull pays, although these models compute a prompt in no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PullCosts, "plan", lambda self, source, missing, now_s: PullPlan(0.001, 20.0, 20.0))
        yield


def sharing(folder: Path, model: Path, name: str, role: Role = Role.DECODE, **settings: Any) -> WorkerConfig:
    placement = {"placement": "local" if settings.pop("local", True) else "remote"}
    security = settings.pop("security", SecurityConfig())
    config = worker_config(
        role, model, name, engine={"num_pages": 160}, decode=placement, transfer={"min_pull_tokens": PAGE}
    )
    store = KvStoreConfig.model_validate({"url": f"file://{folder}", "write": "computed", "listing_s": 0.05} | settings)
    return config.model_copy(update={"kv_store": store, "security": security})


@contextlib.asynccontextmanager
async def running(*configs: WorkerConfig) -> AsyncIterator[list[Any]]:
    """Starts workers, and checks at the end that none of them holds a page."""
    async with workers(*configs) as servers:
        yield servers
        await wait_until_empty(*servers)


async def ask(decode: DecodeServer, prompt: list[int] = PROMPT, **parts: Any) -> Answer:
    async with caller(decode) as to_it:
        answer = await to_it.answer(to_it.submit(prompt, GREEDY, **parts))
    assert answer.error is None
    assert answer.timing is not None
    return answer


def metric(server: Server, name: str) -> float:
    return server.shell._load().metrics.get(name, 0.0)


def objects(folder: Path) -> list[Path]:
    """Returns the files that are named by a hash, which excludes the lease and files that are being written."""
    return [path for path in folder.rglob("*") if path.is_file() and re.fullmatch("[0-9a-f]{32}", path.name)]


async def stored(server: Server, num_runs: int) -> None:
    await until(lambda: metric(server, STORE_WRITES.name) >= num_runs)


async def knows(server: Server, num_runs: int) -> None:
    """Waits for a listing with so many objects."""
    await until(lambda: len(server.shell._shared._known._listed) >= num_runs)  # type: ignore[union-attr]


async def fill(folder: Path, model: Path, **settings: Any) -> list[int]:
    """Returns the answer of a worker that has written what it computed, and has ended."""
    async with running(sharing(folder, model, "first", **settings)) as [first]:
        answer = await ask(first)
        await stored(first, 3)
    assert len(objects(folder)) == 3
    return answer.token_ids


async def test_a_later_worker_continues_with_what_an_earlier_one_computed(model: Path, tmp_path: Path) -> None:
    expected = await fill(tmp_path, model)
    async with running(sharing(tmp_path, model, "second")) as [second]:
        await knows(second, 3)
        answer = await ask(second)
        assert answer.token_ids == expected
        assert answer.timing is not None
        assert answer.timing.cached_tokens == 3 * RUN
        assert (answer.timing.pull.source, answer.timing.pull.pulled_tokens) == ("shared store", 3 * RUN)
        assert metric(second, STORE_READ_PAGES.name) == 3 * RUN / PAGE
        assert metric(second, STORE_MISSED_PAGES.name) == 2
        again = await ask(second)
        assert again.timing is not None
        assert not again.timing.pull.source  # the prompt is cached here now


@pytest.mark.parametrize("role", list(Role))
async def test_an_idle_worker_goes_on_as_soon_as_its_read_has_ended(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    await fill(tmp_path, model)
    monkeypatch.setattr(PullCosts, "plan", lambda *_: PullPlan(0.001, 3600.0, 3600.0))
    reader = sharing(tmp_path, model, "reader", role, listing_s=3600.0)  # so that no listing wakes it
    async with contextlib.AsyncExitStack() as stack:
        [server] = await stack.enter_async_context(running(reader))
        await knows(server, 3)
        others: list[PrefillServer] = []
        if role is Role.PREFILL:
            others = [server]
            [server] = await stack.enter_async_context(running(sharing(tmp_path / "none", model, "other", local=False)))
        answer = await ask(server, PROMPT[: RUN + 8], prefill=others)
    assert answer.timing is not None
    assert answer.timing.pull.pulled_tokens == RUN


async def test_prefill_workers_share_a_store(model: Path, tmp_path: Path) -> None:
    expected = await fill(tmp_path, model)
    prefill = sharing(tmp_path, model, "prefill", Role.PREFILL)
    async with running(prefill, sharing(tmp_path, model, "second", local=False)) as [server, decode]:
        await knows(server, 3)
        answer = await ask(decode, prefill=[server])
        assert answer.token_ids == expected
        assert answer.timing is not None
        assert answer.timing.prefill_cached_tokens == 3 * RUN
        assert answer.timing.pull.source == "shared store"


async def test_two_living_workers_share_what_one_has_computed(model: Path, tmp_path: Path) -> None:
    async with running(sharing(tmp_path, model, "a"), sharing(tmp_path, model, "b")) as [earlier, later]:
        first = await ask(earlier)
        await stored(earlier, 3)
        await knows(later, 3)
        second = await ask(later)
        assert second.token_ids == first.token_ids
        assert metric(later, STORE_READ_PAGES.name) == 3 * RUN / PAGE
        assert metric(later, STORE_WRITES.name) == 0  # all of it is stored


async def test_by_default_only_repeated_beginnings_and_pinned_prompts_are_written(model: Path, tmp_path: Path) -> None:
    async with running(sharing(tmp_path, model, "only", write="reused")) as [only]:
        await ask(only)
        await ask(only, [1, *PROMPT], kv_hints=KvHints(pin_s=60.0))
        await stored(only, 3)  # the pinned prompt
        await ask(only, [*PROMPT[: 2 * RUN + 8], 1, 2])
        await stored(only, 5)  # the part of the first prompt that was repeated
    assert len(objects(tmp_path)) == 5


async def test_a_read_only_worker_writes_nothing(model: Path, tmp_path: Path) -> None:
    expected = await fill(tmp_path, model)
    async with running(sharing(tmp_path, model, "reader", write="never")) as [reader]:
        await knows(reader, 3)
        assert (await ask(reader)).token_ids == expected
        await ask(reader, [1, *PROMPT])
        await ask(reader, [1, *PROMPT])
        assert metric(reader, STORE_WRITES.name) == 0
    assert len(objects(tmp_path)) == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap"])
async def test_a_damaged_object_is_refused_computed_and_written_again(model: Path, tmp_path: Path, damage: str) -> None:
    expected = await fill(tmp_path, model)
    paths = sorted(objects(tmp_path))
    contents = {path: path.read_bytes() for path in paths}
    for path, other in zip(paths, [*paths[1:], paths[0]], strict=True):
        content = bytearray(contents[path])
        content[len(content) // 2] ^= 1
        path.write_bytes(
            {"flip": bytes(content), "cut": bytes(content[:-1]), "empty": b"", "swap": contents[other]}[damage]
        )
    async with running(sharing(tmp_path, model, "second")) as [second]:
        await knows(second, 3)
        answer = await ask(second)
        assert answer.token_ids == expected
        assert answer.timing is not None
        assert answer.timing.cached_tokens == 0
        assert metric(second, STORE_REFUSED.name) >= 1
        await until(lambda: paths[0].read_bytes() == contents[paths[0]] or metric(second, STORE_WRITES.name) >= 1)


async def test_different_tenants_secrets_and_weights_share_nothing(model: Path, tmp_path: Path) -> None:
    await fill(tmp_path, model)
    (tmp_path / "secret").write_text("a" * 64)
    (tmp_path / "secret").chmod(0o600)
    keyed = SecurityConfig(secret_file=str(tmp_path / "secret"))
    other = make_checkpoint("llama", tmp_path / "other", max_position_embeddings=2048, initializer_range=0.2)
    for config in (
        sharing(tmp_path, model, "keyed", security=keyed),
        sharing(tmp_path, other, "other"),
        sharing(tmp_path, model, "quantized").model_copy(
            update={"engine": sharing(tmp_path, model, "x").engine.model_copy(update={"kv_dtype": "int8"})}
        ),
    ):
        async with running(config) as [server]:
            await until(lambda server=server: server.shell._shared._known._folder)
            assert not server.shell._shared._known._listed
    async with running(sharing(tmp_path, model, "same")) as [same]:
        await knows(same, 3)


async def test_a_failing_store_is_avoided_and_found_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await fill(tmp_path, model)
    works = asyncio.Event()
    read = FolderStore.get

    def get(self: FolderStore, name: str, max_bytes: int) -> memoryview | None:
        if not works.is_set():
            raise OSError("stale file handle")
        return read(self, name, max_bytes)

    monkeypatch.setattr("worker.pull.store.circuit_policy._FIRST_PAUSE_S", 0.2)
    async with running(sharing(tmp_path, model, "second")) as [second]:
        monkeypatch.setattr(FolderStore, "get", get)
        await until(lambda: metric(second, STORE_USABLE.name) == 0)
        assert (await ask(second)).token_ids == expected
        assert metric(second, STORE_FAILURES.name) >= 3
        works.set()
        await until(lambda: metric(second, STORE_USABLE.name) == 1)
        await knows(second, 3)


async def test_a_cancelled_prompt_reads_no_more(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(tmp_path, model)
    begun, go_on = threading.Event(), threading.Event()
    names: list[str] = []
    read = FolderStore.get

    def get(self: FolderStore, name: str, max_bytes: int) -> memoryview | None:
        if len(name.rpartition("/")[2]) == 32:  # an object with pages
            names.append(name)
            begun.set()
            go_on.wait(TIMEOUT_S)
        return read(self, name, max_bytes)

    monkeypatch.setattr("worker.pull.store.store_threads.NUM_READERS", 1)
    async with running(sharing(tmp_path, model, "second")) as [second]:
        await knows(second, 3)
        monkeypatch.setattr(FolderStore, "get", get)
        async with caller(second) as to_it:
            stream = to_it.submit(PROMPT, GREEDY)
            await until(begun.is_set)
            to_it.cancel(stream)
            await until(lambda: second.shell.pulls.num_open == 0)
            go_on.set()
        assert metric(second, PULLS_CANCELLED.name) == 1
        answer = await ask(second)
        assert answer.timing is not None
        assert answer.timing.pull.problem == ""
    assert len(names) == 1 + 3  # two objects were still unread when the prompt was cancelled
