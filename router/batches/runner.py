"""Runs batches: claims them, answers their lines while there is room, and finishes them. Lives on the event loop.

Lines that no worker could take are tried again until the batch expires. A line whose answer was not written before its
router died runs again at the next one, so each line has one answer, and may be computed more than once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.config.router import BatchConfig
from penstock.errors import InvalidInput, PenstockError, Unavailable
from router.batches.batches import ERRORS, OUTPUT, BatchClaim, BatchStore, input_lines
from router.batches.files import FileStore
from router.batches.lines import BatchLine, answer_line, unanswered_line
from router.batches.pacing_policy import PoolUse, lines_at_once
from router.batches.records import BatchRecord, BatchStatus, FileNotFound

log = logging.getLogger(__name__)

_SCAN_S = 5.0  # between looks for batches of other routers
_CHECK_S = 1.0  # between looks for room, for a cancellation and for the end of the window, if nothing else happens
_SWEEP_S = 3600.0
_MAX_OPEN = 64  # batches that one router runs side by side
_MAX_ERRORS = 100  # of a batch's file that are listed
_LINES = 64  # read at a time
_RETRY_S = (0.5, 30.0)  # least and most seconds between two attempts of a line

# Answers the request of a tenant at an endpoint: status, request id and body. Raises Unavailable if it may be tried
# again.
LineAnswerer = Callable[[str, str, bytes], Awaitable[tuple[int, str, dict[str, Any]]]]
# Reads a line of a batch for an endpoint. Raises InvalidInput.
LineReader = Callable[[bytes, str], BatchLine]


@dataclass(slots=True, eq=False)
class _OpenBatch:
    claim: BatchClaim
    record: BatchRecord
    lines: Iterator[BatchLine]
    upcoming: list[BatchLine] = field(default_factory=list)  # the next ones first
    in_flight: dict[asyncio.Task[None], BatchLine] = field(default_factory=dict)
    is_read: bool = False  # to the end
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    saved_s: float = 0.0


class BatchRunner:
    def __init__(
        self,
        config: BatchConfig,
        batches: BatchStore,
        files: FileStore,
        answer: LineAnswerer,
        pool_use: Callable[[int], PoolUse],
        read_line: LineReader,
    ) -> None:
        """`pool_use` returns what all requests do, given how many of batches are in flight here."""
        self._config = config
        self._batches = batches
        self._files = files
        self._answer = answer
        self._pool_use = pool_use
        self._read_line = read_line
        self._open: set[_OpenBatch] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by batch
        self._woken = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        """The lines being answered."""
        return sum(len(batch.in_flight) for batch in self._open)

    def wake(self) -> None:
        """Looks for new batches at once."""
        self._woken.set()

    def on_load(self) -> None:
        """Looks for room at once, because the workers' load has changed."""
        for batch in self._open:
            batch.changed.set()

    async def run(self) -> None:
        """Runs batches until it is cancelled; those unfinished then continue wherever they are claimed next."""
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
            if batch_id in self._tasks or len(self._tasks) >= _MAX_OPEN:
                continue
            claim = await asyncio.to_thread(self._batches.claim, tenant, batch_id)
            if claim is not None:
                task = self._tasks[batch_id] = asyncio.create_task(self._run(claim), name=batch_id)
                task.add_done_callback(lambda _, batch_id=batch_id: self._tasks.pop(batch_id))  # type: ignore[misc]

    async def _run(self, claim: BatchClaim) -> None:
        try:
            record = claim.record
            path = await self._input(claim, record)
            if path is None:
                return
            if record.status is BatchStatus.VALIDATING:
                record = await asyncio.to_thread(self._validated, claim, record, path)
                claim.save(record)
            if not record.status.is_final:
                await self._answer_all(claim, record, path)
        except (PenstockError, OSError) as error:
            log.warning("batch %s stops for now and is tried again: %s", claim.path("").name, error)
            await asyncio.sleep(_SCAN_S)
        finally:
            claim.close()

    async def _input(self, claim: BatchClaim, record: BatchRecord) -> Path | None:
        """Returns the batch's input; without it, the batch fails."""
        try:
            return await asyncio.to_thread(self._files.path, record.tenant, record.input_file_id, "input_file_id")
        except FileNotFound as error:
            claim.save(_failed(record, [_listed(None, "input_file_deleted", error)]))
            return None

    def _validated(self, claim: BatchClaim, record: BatchRecord, path: Path) -> BatchRecord:
        """Returns the batch in progress, or failed if a line is no request."""
        seen, errors, count = set[str](), list[dict[str, Any]](), 0
        for count, raw in enumerate(input_lines(path), 1):
            try:
                if count > self._config.max_lines:
                    problem = f"has more lines than router.batches.max_lines = {self._config.max_lines}; split it"
                    raise InvalidInput("input_file_id", problem)
                line = self._read_line(raw, record.endpoint)
                if line.custom_id in seen:
                    raise InvalidInput("custom_id", f"is {line.custom_id[:100]!r} again; give each line its own")
                seen.add(line.custom_id)
            except InvalidInput as error:
                errors.append(_listed(count, "invalid_line", error))
                if len(errors) >= _MAX_ERRORS or count > self._config.max_lines:
                    break
        if not count:
            errors.append(_listed(None, "empty_file", InvalidInput("input_file_id", "has no lines; write some")))
        if errors:
            return _failed(record, errors)
        return replace(record.entered(BatchStatus.IN_PROGRESS, time.time()), num_lines=count)

    async def _answer_all(self, claim: BatchClaim, record: BatchRecord, path: Path) -> None:
        completed, failed = await asyncio.to_thread(lambda: (claim.done(OUTPUT), claim.done(ERRORS)))
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
        await asyncio.to_thread(self._finish, batch, final)

    def _remaining(self, record: BatchRecord, path: Path, done: Collection[str]) -> Iterator[BatchLine]:
        for raw in input_lines(path):
            line = self._read_line(raw, record.endpoint)
            if line.custom_id not in done:
                yield line

    async def _answer_lines(self, batch: _OpenBatch) -> BatchStatus:
        """Returns how the batch ends."""
        while True:
            batch.changed.clear()
            if not batch.upcoming and not batch.is_read:
                batch.upcoming = await asyncio.to_thread(lambda: [*itertools.islice(batch.lines, _LINES)])
                batch.is_read = not batch.upcoming
            if not batch.upcoming and not batch.in_flight and batch.is_read:
                return BatchStatus.COMPLETED
            if time.monotonic() - batch.saved_s > _CHECK_S:
                batch.saved_s = time.monotonic()
                await asyncio.to_thread(batch.claim.save, batch.record)
                if batch.claim.is_cancelled:
                    return BatchStatus.CANCELLED
                if time.time() >= batch.record.expires_at:
                    return BatchStatus.EXPIRED
            if batch.upcoming and self._may_start(batch):
                line = batch.upcoming.pop(0)
                batch.in_flight[asyncio.create_task(self._answer_one(batch, line), name=line.custom_id)] = line
                continue
            try:
                async with asyncio.timeout(_CHECK_S):
                    await batch.changed.wait()
            except TimeoutError:
                pass

    def _may_start(self, batch: _OpenBatch) -> bool:
        """Whether there is room for a line more, and it is this batch's turn: the one with the fewest in flight."""
        fewest = min(len(other.in_flight) for other in self._open if other.upcoming)
        num_lines = self.num_in_flight
        return len(batch.in_flight) == fewest and num_lines < lines_at_once(self._pool_use(num_lines), self._config)

    async def _answer_one(self, batch: _OpenBatch, line: BatchLine) -> None:
        try:
            status, request_id, body = await self._answered(batch.record, line)
            is_completed = status < 400
            written = answer_line(line.custom_id, status, request_id, body)
            await asyncio.to_thread(batch.claim.append, OUTPUT if is_completed else ERRORS, written)
            record = batch.record
            if is_completed:
                batch.record = replace(record, num_completed=record.num_completed + 1)
            else:
                batch.record = replace(record, num_failed=record.num_failed + 1)
        except OSError as error:
            log.warning("batch %s: the answer to %.100r cannot be written: %s", batch.record.id, line.custom_id, error)
            await asyncio.sleep(_RETRY_S[1])
            batch.upcoming.append(line)
        finally:
            task = asyncio.current_task()
            if task is not None:
                batch.in_flight.pop(task, None)
            self.on_load()

    async def _answered(self, record: BatchRecord, line: BatchLine) -> tuple[int, str, dict[str, Any]]:
        while True:
            try:
                return await self._answer(record.tenant, record.endpoint, line.body)
            except Unavailable as error:
                least, most = _RETRY_S
                await asyncio.sleep(min(max(error.retry_after_s or least, least), most))

    def _finish(self, batch: _OpenBatch, final: BatchStatus) -> None:
        """Makes the lines written so far the tenant's files, and the batch final.

        The files are linked first, and removed last: a router that dies in between leaves them to the next one.
        """
        claim, record = batch.claim, batch.record

        def unanswered(done: set[str]) -> Iterator[bytes]:
            path = self._files.path(record.tenant, record.input_file_id)
            for line in self._remaining(record, path, done):
                yield unanswered_line(line.custom_id, "batch_expired", "the completion window has ended")

        num_unanswered = claim.seal(unanswered if final is BatchStatus.EXPIRED else None)
        ids = {}
        for name in (OUTPUT, ERRORS):
            if claim.path(name).exists():
                link = claim.path(f".{name}")
                link.unlink(missing_ok=True)
                os.link(claim.path(name), link)
                ids[name] = self._files.keep(record.tenant, link, f"{record.id}_{name}").id
        num_failed = record.num_failed + num_unanswered
        record = replace(record, output_file_id=ids.get(OUTPUT), error_file_id=ids.get(ERRORS), num_failed=num_failed)
        claim.save(record.entered(final, time.time()))
        for name in ids:
            claim.path(name).unlink()


def _failed(record: BatchRecord, errors: list[dict[str, Any]]) -> BatchRecord:
    return replace(record.entered(BatchStatus.FAILED, time.time()), errors=tuple(errors))


def _listed(number: int | None, code: str, error: InvalidInput) -> dict[str, Any]:
    return {"code": code, "line": number, "message": error.message, "param": error.field}
