"""Tests how background tasks are kept, cancelled and awaited."""

from __future__ import annotations

import asyncio
import gc

import pytest

from penstock.process.task_set import TaskSet


async def test_a_task_is_kept_until_it_ends() -> None:
    tasks, go_on, done = TaskSet(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go_on.wait()
        done.set()

    tasks.start(work())
    await asyncio.sleep(0)
    gc.collect()
    assert len(tasks) == 1
    go_on.set()
    await done.wait()
    await tasks.wait()
    assert len(tasks) == 0


async def test_close_cancels_tasks_and_waits_for_their_cleanup() -> None:
    tasks, cleaned = TaskSet(), []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleanup may take several turns of the loop
            cleaned.append(name)

    for name in ("a", "b"):
        tasks.start(work(name), name=name)
    await asyncio.sleep(0)
    await tasks.close()
    assert sorted(cleaned) == ["a", "b"]
    assert len(tasks) == 0


async def test_a_failure_is_raised_to_the_awaiter_and_does_not_stop_other_tasks() -> None:
    tasks, finished = TaskSet(), []

    async def fail() -> None:
        raise ValueError("broken")

    async def succeed() -> None:
        await asyncio.sleep(0)
        finished.append(True)

    failing = tasks.start(fail())
    tasks.start(succeed())
    await tasks.wait()
    assert finished == [True]
    with pytest.raises(ValueError, match="broken"):
        await failing
