"""Tests the threads before admission: turns by tenant, a bounded queue, and abandoned work."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.errors import InvalidInput, Overloaded
from router.text.fair_threads import FairThreads

SIZE = 1024  # the least that any work counts for


class Work:
    """Blocks the only thread until `release`, and records whose work was done."""

    def __init__(self, max_queued: int) -> None:
        self.threads = FairThreads("tokenizer", 1, max_queued)
        self.done: list[str] = []
        self._open = threading.Event()

    def release(self) -> None:
        self._open.set()

    def _hold(self) -> None:
        assert self._open.wait(60.0)

    async def hold(self) -> asyncio.Task[None]:
        """Returns once the thread is busy."""
        return await self._started(self.threads.run("holder", SIZE, self._hold))

    async def queue(self, caller: str, size: int = SIZE) -> asyncio.Task[None]:
        return await self._started(self.threads.run(caller, size, self.done.append, caller))

    async def _started(self, work) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        await asyncio.sleep(0)  # runs until the caller waits
        return task


@pytest.fixture(name="work")
async def _work():
    work = Work(10 * SIZE)
    yield work
    work.release()
    work.threads.close()


async def test_callers_take_turns_by_the_size_of_their_work(work):
    tasks = [await work.hold()]
    tasks += [await work.queue("many") for _ in range(4)]
    tasks += [await work.queue("long", 3 * SIZE)]
    tasks += [await work.queue("few") for _ in range(2)]
    work.release()
    await asyncio.gather(*tasks)
    assert work.done == ["many", "long", "few", "many", "few", "many", "many"]


async def test_a_full_queue_refuses_the_newest_work_of_the_largest_caller(work):
    tasks = [await work.hold()]
    flood = [await work.queue("flood") for _ in range(10)]
    with pytest.raises(Overloaded, match=r"tokenizer: the queue is full \(limits.text_queue_characters = 10240\)"):
        await work.threads.run("flood", SIZE, work.done.append, "flood")
    tasks += [await work.queue("guest")]
    with pytest.raises(Overloaded):
        await flood.pop()
    assert work.threads.num_queued == 10
    work.release()
    await asyncio.gather(*tasks, *flood)
    assert work.done.count("flood") == 9
    assert work.done.count("guest") == 1


async def test_work_whose_caller_leaves_is_not_done(work):
    tasks = [await work.hold()]
    gone, stays = await work.queue("gone"), await work.queue("stays")
    gone.cancel()
    await asyncio.wait([gone])
    late = await work.queue("late")
    async with asyncio.timeout(60.0):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await work.threads.run("hurried", SIZE, work.done.append, "hurried")
    assert work.threads.num_queued == 2
    work.release()
    await asyncio.gather(*tasks, stays, late)
    assert work.done == ["stays", "late"]


async def test_a_caller_that_leaves_at_its_turn_passes_it_on(work, monkeypatch):
    holder = await work.hold()
    gone, stays = await work.queue("gone"), await work.queue("stays")
    give_turn = work.threads._give_turn

    def give_and_cancel() -> None:
        give_turn()
        gone.cancel()  # its turn has come, but it has not woken yet

    monkeypatch.setattr(work.threads, "_give_turn", give_and_cancel)
    work.release()
    await asyncio.gather(holder, stays)
    assert work.done == ["stays"]
    await work.threads.run("next", SIZE, work.done.append, "next")


async def test_running_work_keeps_its_thread_when_its_caller_leaves(work):
    holder = await work.hold()
    waits = await work.queue("waits")
    holder.cancel()
    await asyncio.wait([holder])
    assert not work.done
    assert work.threads.num_queued == 1
    work.release()
    await waits


async def test_an_error_reaches_its_caller_and_frees_the_thread(work):
    def refuse() -> None:
        raise InvalidInput("messages", "no")

    for _ in range(2):
        with pytest.raises(InvalidInput):
            await work.threads.run("a", SIZE, refuse)
