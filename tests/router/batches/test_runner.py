"""Tests the runner of batches over stores on disk, without a router: refused lines, lost files, and a runner that
ends."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.router import BatchConfig
from penstock.errors import Overloaded
from router.batches import runner as runner_module
from router.batches.batches import BatchStore
from router.batches.files import FileStore
from router.batches.lines import BatchLine, read_line
from router.batches.pacing_policy import PoolUse
from router.batches.records import BatchRecord, BatchStatus
from router.batches.runner import BatchRunner, LineAnswerer, _OpenBatch

ENDPOINT = "/v1/completions"
WAIT_S = 60.0


class Batches:
    """Holds a folder of batches, and runs them."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.config = BatchConfig(folder=str(root), **settings)
        self.files = FileStore(root, self.config)
        self.store = BatchStore(root, self.config, self.files)

    def create(self, tenant: str, *names: str) -> str:
        lines = [json.dumps({"custom_id": name, "body": {"prompt": name}}) for name in names]
        file = self.files.put(tenant, "in.jsonl", io.BytesIO("\n".join(lines).encode()))
        return self.store.create(tenant, ENDPOINT, file.id, "24h", 86_400, None).id

    @contextlib.asynccontextmanager
    async def running(self, answer: LineAnswerer) -> AsyncIterator[BatchRunner]:
        def read(raw: bytes, endpoint: str) -> BatchLine:
            return read_line(raw, endpoint, 1 << 20, json.loads)

        def use(num_lines: int) -> PoolUse:
            return PoolUse(num_lines, num_others=0, num_waiting=0, num_decode_workers=1)

        runner = BatchRunner(self.config, self.store, self.files, answer, use, read, 1 << 20)
        task = asyncio.create_task(runner.run())
        try:
            yield runner
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def until(self, tenant: str, batch_id: str, status: BatchStatus) -> BatchRecord:
        async with asyncio.timeout(WAIT_S):
            while (record := self.store.get(tenant, batch_id)).status is not status:  # noqa: ASYNC110 - as clients do
                await asyncio.sleep(0.02)
        return record


async def answered(tenant: str, endpoint: str, body: bytes) -> tuple[int, str, dict[str, Any]]:
    return 200, "id", {}


async def test_refused_lines_leave_their_room_to_others(tmp_path: Path) -> None:
    async def answer(tenant: str, endpoint: str, body: bytes) -> tuple[int, str, dict[str, Any]]:
        if tenant == "poor":
            raise Overloaded("no tokens are left today", 3600.0)
        return await answered(tenant, endpoint, body)

    batches = Batches(tmp_path, max_running=1)
    poor = batches.create("poor", *(f"line {number}" for number in range(100)))
    async with batches.running(answer) as runner:
        await batches.until("poor", poor, BatchStatus.IN_PROGRESS)
        rich = batches.create("rich", "a", "b")
        runner.wake()
        record = await batches.until("rich", rich, BatchStatus.COMPLETED)
    assert record.num_completed == 2
    assert batches.store.get("poor", poor).num_failed == 0


async def test_refused_lines_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_RETRY_S", (0.0, 0.0))
    tried: dict[bytes, int] = {}

    async def answer(tenant: str, endpoint: str, body: bytes) -> tuple[int, str, dict[str, Any]]:
        tried[body] = tried.get(body, 0) + 1
        if tried[body] < 3:
            raise Overloaded("try again", 0.0)
        return await answered(tenant, endpoint, body)

    batches = Batches(tmp_path)
    batch_id = batches.create("a", *(f"line {number}" for number in range(150)))
    async with batches.running(answer):
        record = await batches.until("a", batch_id, BatchStatus.COMPLETED)
    assert record.num_completed == 150
    assert set(tried.values()) == {3}


async def test_a_tenant_with_many_batches_does_not_delay_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_MAX_OPEN", 2)
    begun: set[bytes] = set()

    async def answer(tenant: str, endpoint: str, body: bytes) -> tuple[int, str, dict[str, Any]]:
        begun.add(body)
        if tenant == "greedy":
            await asyncio.Event().wait()
        return await answered(tenant, endpoint, body)

    batches = Batches(tmp_path)
    for number in range(3):
        batches.create("greedy", f"line {number}")
    async with batches.running(answer) as runner:
        async with asyncio.timeout(WAIT_S):
            while len(begun) < 2:  # noqa: ASYNC110 - the answerer has no event for it
                await asyncio.sleep(0.02)
        batch_id = batches.create("other", "line")
        runner.wake()
        await batches.until("other", batch_id, BatchStatus.COMPLETED)
        assert len(begun) == 3


async def test_answers_outlive_the_input(tmp_path: Path) -> None:
    is_answered = asyncio.Event()

    async def answer(tenant: str, endpoint: str, body: bytes) -> tuple[int, str, dict[str, Any]]:
        if json.loads(body)["prompt"] == "second":
            is_answered.set()
            await asyncio.Event().wait()
        return await answered(tenant, endpoint, body)

    batches = Batches(tmp_path, max_running=1)
    batch_id = batches.create("a", "first", "second")
    async with batches.running(answer):
        await asyncio.wait_for(is_answered.wait(), WAIT_S)
    batches.files.delete("a", batches.store.get("a", batch_id).input_file_id)
    async with batches.running(answered):
        record = await batches.until("a", batch_id, BatchStatus.FAILED)
    assert (record.num_completed, record.errors[0]["code"]) == (1, "input_file_deleted")
    assert record.output_file_id is not None
    assert json.loads(batches.files.path("a", record.output_file_id).read_text())["custom_id"] == "first"


async def test_an_ending_runner_keeps_its_batch_until_it_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = Batches(tmp_path)
    batch_id = batches.create("a", "line")
    begun, may_end, keep = asyncio.Event(), threading.Event(), batches.files.keep
    loop = asyncio.get_running_loop()

    def slow_keep(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(WAIT_S)
        return keep(*arguments)

    monkeypatch.setattr(batches.files, "keep", slow_keep)

    async def run_until_it_finishes() -> None:
        async with batches.running(answered):
            await begun.wait()

    task = asyncio.create_task(run_until_it_finishes())
    try:
        await asyncio.wait_for(begun.wait(), WAIT_S)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        assert batches.store.claim("a", batch_id) is None, "no other router may finish it at the same time"
    finally:
        may_end.set()
    await asyncio.wait_for(task, WAIT_S)
    record = batches.store.get("a", batch_id)
    assert record.status is BatchStatus.COMPLETED
    assert len(batches.files.ids("a")) == 2


def test_few_large_lines_are_held_at_a_time(tmp_path: Path) -> None:
    batches = Batches(tmp_path)
    claim = batches.store.claim("a", batches.create("a", "line"))
    assert claim is not None
    lines = (BatchLine(str(number), b"x" * (1 << 19)) for number in range(8))
    batch = _OpenBatch(claim, claim.record, lines)
    batch.read()
    assert [line.custom_id for line in batch.upcoming] == ["0", "1", "2"]
    claim.close()
