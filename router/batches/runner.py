"""Runs batches: claims them, answers their lines while there is room, and finishes them. Runs on the event loop.

Lines that no worker could serve are retried until the batch expires. A line whose answer was not written before its
router died runs again at the next router. So each line gets one answer, but may be computed more than once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from penstock.config.router import BatchConfig
from penstock.errors import PenstockError, Unavailable
from router.batches.batches import ERRORS, OUTPUT, BatchClaim, BatchStore
from router.batches.files import FileStore
from router.batches.input_validation import LineReader, failed_without_input, input_lines, validate_input
from router.batches.lines import BatchLine, answer_line, unanswered_line
from router.batches.pacing_policy import PoolUse, lines_at_once
from router.batches.records import BatchRecord, BatchStatus, FileNotFound, output_file_id

log = logging.getLogger(__name__)

_SCAN_S = 5.0  # between two searches for batches to claim
_CHECK_S = 1.0  # between two checks for room, a cancellation and the end of the window, if nothing else happens
_SWEEP_S = 3600.0
_MAX_OPEN = 64  # batches that one router runs at once; a tenant without any may still have one more
_LINES = 64  # most lines read at a time, and most refused lines that wait for a retry
_LINES_BYTES = 1 << 20  # of lines read at a time, after which no more are read
_RETRY_S = (0.5, 30.0)  # bounds of the time between two attempts of a line
_LOAD_S = 0.05  # least time between two checks for room because of load reports

ResultT = TypeVar("ResultT")

# Answers a request, given its tenant, endpoint and body, with the status, the request id and the body of the answer.
# Raises Unavailable if the request may be retried.
LineAnswerer = Callable[[str, str, bytes], Awaitable[tuple[int, str, dict[str, Any]]]]


@dataclass(slots=True, eq=False)
class _OpenBatch:
    claim: BatchClaim
    record: BatchRecord
    lines: Iterator[BatchLine]
    upcoming: list[BatchLine] = field(default_factory=list)  # read but not started, in order
    in_flight: set[asyncio.Task[None]] = field(default_factory=set)
    refused: deque[tuple[float, BatchLine]] = field(default_factory=deque)  # each with the time of its retry
    is_read: bool = False  # all of `lines` are read
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    saved_s: float = 0.0

    @property
    def has_next(self) -> bool:
        """Returns whether a line could start; a batch with too many refused lines starts none."""
        return bool(self.upcoming) and len(self.refused) < _LINES

    @property
    def is_answered(self) -> bool:
        return self.is_read and not (self.upcoming or self.in_flight or self.refused)

    def take_back(self, now_s: float) -> None:
        """Moves refused lines that may be retried now back to the upcoming ones."""
        for _ in range(len(self.refused)):
            due_s, line = self.refused.popleft()
            if due_s <= now_s:
                self.upcoming.append(line)
            else:
                self.refused.append((due_s, line))

    def read(self) -> None:
        """Reads the next lines. Blocks on the disk."""
        num_bytes = 0
        for line in itertools.islice(self.lines, _LINES):
            self.upcoming.append(line)
            num_bytes += len(line.body)
            if num_bytes > _LINES_BYTES:
                return
        self.is_read = not self.upcoming


class BatchRunner:
    def __init__(
        self,
        config: BatchConfig,
        batches: BatchStore,
        files: FileStore,
        answer: LineAnswerer,
        pool_use: Callable[[int], PoolUse],
        read_line: LineReader,
        line_bytes: int,
    ) -> None:
        """`pool_use` returns how busy the pools are, given the number of lines in flight here.

        `read_line` refuses lines of more than `line_bytes`.
        """
        self._config = config
        self._batches = batches
        self._files = files
        self._answer = answer
        self._pool_use = pool_use
        self._read_line = read_line
        self._line_bytes = line_bytes
        self._open: set[_OpenBatch] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by batch
        self._tenants: dict[str, str] = {}  # by batch
        self._woken = asyncio.Event()
        self._load_timer: asyncio.TimerHandle | None = None

    @property
    def num_in_flight(self) -> int:
        """The number of lines being answered."""
        return sum(len(batch.in_flight) for batch in self._open)

    def wake(self) -> None:
        """Makes `run` look for new batches at once."""
        self._woken.set()

    def on_load(self) -> None:
        """Checks for room soon, because the workers' load has changed. Cheap, for thousands of reports a second."""
        if self._load_timer is None and self._open:
            self._load_timer = asyncio.get_running_loop().call_later(_LOAD_S, self._after_load)

    def _after_load(self) -> None:
        self._load_timer = None
        self._wake_next()

    def _wake_next(self) -> None:
        batch = min((each for each in self._open if each.has_next), key=lambda each: len(each.in_flight), default=None)
        if batch is not None:
            batch.changed.set()

    async def run(self) -> None:
        """Runs batches until it is cancelled. The router that claims an unfinished batch next continues it."""
        swept_s = float("-inf")
        try:
            while True:
                self._woken.clear()
                try:
                    if time.monotonic() - swept_s > _SWEEP_S:
                        swept_s = time.monotonic()
                        await asyncio.to_thread(self._sweep)
                    await self._claim_all()
                except (PenstockError, OSError) as error:
                    log.warning("batches cannot be read: %s", error)
                try:
                    async with asyncio.timeout(_SCAN_S):
                        await self._woken.wait()
                except TimeoutError:
                    pass
        finally:
            tasks = [*self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _sweep(self) -> None:
        self._batches.sweep(time.time())
        self._files.sweep(time.time())

    async def _claim_all(self) -> None:
        for tenant, batch_id in await asyncio.to_thread(self._batches.unfinished):
            # The limit does not keep a tenant without a running batch waiting.
            if batch_id in self._tasks or (len(self._tasks) >= _MAX_OPEN and tenant in self._tenants.values()):
                continue
            claim = await asyncio.to_thread(self._batches.claim, tenant, batch_id)
            if claim is not None:
                task = self._tasks[batch_id] = asyncio.create_task(self._run(claim), name=batch_id)
                self._tenants[batch_id] = tenant
                task.add_done_callback(lambda _, batch_id=batch_id: self._forget(batch_id))  # type: ignore[misc]

    def _forget(self, batch_id: str) -> None:
        del self._tasks[batch_id], self._tenants[batch_id]

    async def _run(self, claim: BatchClaim) -> None:
        try:
            record = claim.record
            try:
                path = await asyncio.to_thread(self._files.path, record.tenant, record.input_file_id, "input_file_id")
            except FileNotFound as error:
                failed = failed_without_input(record, error)
                await _in_thread(lambda: self._finish(claim, failed, BatchStatus.FAILED))
                return
            if record.status is BatchStatus.VALIDATING:
                record = await asyncio.to_thread(
                    validate_input, record, path, self._read_line, self._config.max_lines, self._line_bytes
                )
                await _in_thread(lambda: claim.save(record))
            if not record.status.is_final:
                await self._answer_all(claim, record, path)
        except (PenstockError, OSError) as error:
            log.warning("batch %s has stopped and will be retried: %s", claim.path("").name, error)
            await asyncio.sleep(_SCAN_S)
        finally:
            claim.close()

    async def _answer_all(self, claim: BatchClaim, record: BatchRecord, path: Path) -> None:
        completed, failed = await _in_thread(lambda: (claim.done(OUTPUT), claim.done(ERRORS)))
        record = replace(record, num_completed=len(completed), num_failed=len(failed))
        batch = _OpenBatch(claim, record, self._remaining(record, path, completed | failed))
        self._open.add(batch)
        try:
            final = await self._answer_lines(batch)
        finally:
            self._open.discard(batch)
            for task in batch.in_flight:
                task.cancel()
            await asyncio.gather(*batch.in_flight, return_exceptions=True)
        await _in_thread(lambda: self._finish(claim, batch.record, final))

    def _remaining(self, record: BatchRecord, path: Path, done: Collection[str]) -> Iterator[BatchLine]:
        for _, raw in input_lines(path, self._line_bytes):
            line = self._read_line(raw, record.endpoint)
            if line.custom_id not in done:
                yield line

    async def _answer_lines(self, batch: _OpenBatch) -> BatchStatus:
        """Answers lines until the batch ends, and returns its final status."""
        while True:
            batch.changed.clear()
            batch.take_back(time.monotonic())
            if not batch.upcoming and not batch.is_read:
                await _in_thread(batch.read)
            if batch.is_answered:
                return BatchStatus.COMPLETED
            if time.monotonic() - batch.saved_s > _CHECK_S:
                batch.saved_s = time.monotonic()
                await _in_thread(lambda: batch.claim.save(batch.record))
                if batch.claim.is_cancelled:
                    return BatchStatus.CANCELLED
                if time.time() >= batch.record.expires_at:
                    return BatchStatus.EXPIRED
            if batch.has_next and self._may_start(batch):
                line = batch.upcoming.pop(0)
                batch.in_flight.add(asyncio.create_task(self._answer_one(batch, line), name=line.custom_id))
                self._wake_next()
                continue
            try:
                async with asyncio.timeout(_CHECK_S):
                    await batch.changed.wait()
            except TimeoutError:
                pass

    def _may_start(self, batch: _OpenBatch) -> bool:
        """Returns whether there is room for a line and this batch has the fewest in flight, so that it is its turn."""
        fewest = min(len(other.in_flight) for other in self._open if other.has_next)
        num_lines = self.num_in_flight
        return len(batch.in_flight) == fewest and num_lines < lines_at_once(self._pool_use(num_lines), self._config)

    async def _answer_one(self, batch: _OpenBatch, line: BatchLine) -> None:
        try:
            status, request_id, body = await self._answer(batch.record.tenant, batch.record.endpoint, line.body)
            is_completed = status < 400
            written = answer_line(line.custom_id, status, request_id, body)
            await _in_thread(lambda: batch.claim.append(OUTPUT if is_completed else ERRORS, written))
            record = batch.record
            if is_completed:
                batch.record = replace(record, num_completed=record.num_completed + 1)
            else:
                batch.record = replace(record, num_failed=record.num_failed + 1)
        except Unavailable as error:
            least, most = _RETRY_S
            retry_s = min(max(error.retry_after_s or least, least), most)
            batch.refused.append((time.monotonic() + retry_s, line))
        except OSError as error:
            log.warning("batch %s: the answer to %.100r cannot be written: %s", batch.record.id, line.custom_id, error)
            batch.refused.append((time.monotonic() + _RETRY_S[1], line))
        finally:
            task = asyncio.current_task()
            if task is not None:
                batch.in_flight.discard(task)
            batch.changed.set()
            self._wake_next()

    def _finish(self, claim: BatchClaim, record: BatchRecord, final: BatchStatus) -> None:
        """Makes the lines written so far the tenant's files, and gives the batch its final status.

        The files are linked first and removed last, so that if this router dies in between, the next one finds them and
        gives them the same ids.
        """

        def unanswered(done: set[str]) -> Iterator[bytes]:
            path = self._files.path(record.tenant, record.input_file_id)
            for line in self._remaining(record, path, done):
                yield unanswered_line(line.custom_id, "batch_expired", "the completion window has ended")

        claim.seal(unanswered if final is BatchStatus.EXPIRED else None)
        if final is not BatchStatus.COMPLETED:  # a line may have been cancelled after its answer was written
            num_completed, num_failed = len(claim.done(OUTPUT)), len(claim.done(ERRORS))
            record = replace(record, num_completed=num_completed, num_failed=num_failed)
        ids = {}
        for name in (OUTPUT, ERRORS):
            if claim.path(name).exists():
                link = claim.path(f".{name}")
                link.unlink(missing_ok=True)
                os.link(claim.path(name), link)
                kept = self._files.keep(record.tenant, link, f"{record.id}_{name}", output_file_id(record.id, name))
                ids[name] = kept.id
        record = replace(record, output_file_id=ids.get(OUTPUT), error_file_id=ids.get(ERRORS))
        claim.save(record.entered(final, time.time()))
        for name in ids:
            claim.path(name).unlink()


async def _in_thread(work: Callable[[], ResultT]) -> ResultT:
    """Runs `work`, which uses a claim, in a thread.

    Returns only when `work` has ended, even if cancelled: the caller may then close the claim, and another router may
    take the batch.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise
