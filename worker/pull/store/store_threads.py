"""Moves objects of the shared store on a few threads, off the step loop.

The threads are daemons, so storage that hangs delays neither a step nor the end of the process. Objects to be written
wait in a bounded amount of memory; those that do not fit are not written. Every call counts for the circuit, which
keeps a failing store from being called.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.types import PageHash
from worker.pull.store.backends.object_store import ObjectStore
from worker.pull.store.circuit_policy import Circuit
from worker.pull.store.object_format import RunFormat, UnusableObject

log = logging.getLogger(__name__)

NUM_READERS = 4


@dataclass(frozen=True, slots=True)
class RunRead:
    """The result of reading an object: its pages, none because the object does not exist, or a problem."""

    pages: memoryview | None
    seconds: float
    problem: str = ""
    is_refused: bool = False  # it was read, but is unusable


@dataclass(frozen=True, slots=True)
class RunWrite:
    """The result of writing an object."""

    num_bytes: int
    seconds: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reader:
    """Asks for one object."""

    form: RunFormat
    hashes: Sequence[PageHash]
    is_wanted: Callable[[], bool]  # asked on a reader's thread; a read that nobody waits for any more is skipped
    on_done: Callable[[RunRead], None]  # called on a reader's thread, unless the read was skipped


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes one object."""

    form: RunFormat
    hashes: Sequence[PageHash]
    take: Callable[[], memoryview]  # copies the pages and releases them; called on the writer's thread
    on_done: Callable[[RunWrite], None]  # called on the writer's thread


class StoreThreads:
    """Owns the threads, the queues and the circuit. Its methods may be called from any thread and never block, except
    `close`."""

    def __init__(self, store: ObjectStore, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self.timeout_s = timeout_s
        self._clock = clock
        self._circuit = Circuit()
        self._lock = threading.Lock()  # of the circuit and `_begun`
        self._begun: dict[int, float] = {}  # when each thread's call in flight began
        self._reads: queue.SimpleQueue[Reader | None] = queue.SimpleQueue()
        self._copies: queue.SimpleQueue[Writer | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[tuple[Writer, memoryview] | None] = queue.SimpleQueue()
        loops = [self._read_loop] * NUM_READERS + [self._copy_loop, self._write_loop]
        self._threads = [threading.Thread(target=loop, name="shared store", daemon=True) for loop in loops]
        self.num_failures = 0

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self, timeout_s: float) -> None:
        """Lets queued writes finish, for at most `timeout_s`. Blocks."""
        deadline_s = self._clock() + timeout_s
        self._copies.put(None)  # the writer is ended after it, and so after what is copied
        for _ in range(NUM_READERS):
            self._reads.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline_s - self._clock()))

    @property
    def is_usable(self) -> bool:
        """Returns whether to read and write, because the last calls have not failed and none hangs."""
        now_s = self._clock()
        with self._lock:
            return not self._circuit.is_open and all(
                now_s - begun_s <= self.timeout_s for begun_s in self._begun.values()
            )

    def allows_trial(self) -> bool:
        """Returns whether the store may be called: it has not failed, or a trial call is due."""
        with self._lock:
            return self._circuit.allows(self._clock())

    def read(self, reader: Reader) -> None:
        self._reads.put(reader)

    def write(self, writer: Writer) -> None:
        self._copies.put(writer)

    def call(self, what: str, action: Callable[[], None], *, is_long: bool = False) -> str:
        """Calls the store on the caller's thread and counts how that ends. Returns the problem, if any. A long call may
        take longer than the timeout.
        """
        thread, begun_s = threading.get_ident(), self._clock()
        with self._lock:
            self._begun[thread] = math.inf if is_long else begun_s
        problem = ""
        try:
            action()
        except Exception as error:  # backends raise whatever their libraries raise, and any failure here is a miss
            problem = f"{type(error).__name__}: {error}"
        now_s = self._clock()
        if not problem and not is_long and now_s - begun_s > self.timeout_s:
            problem = f"took {now_s - begun_s:.3g} s, more than kv_store.timeout_s"
        with self._lock:
            del self._begun[thread]
            given_up = False
            if problem:
                self.num_failures += 1
                given_up = self._circuit.on_failure(now_s)
            else:
                self._circuit.on_success()
        if problem:
            log.log(logging.ERROR if given_up else logging.INFO, "%s failed: %s", what, problem)
        if given_up:
            log.error(
                "the shared store is not used for a while, because its last calls have failed; prompts are computed"
            )
        return problem

    def _read_loop(self) -> None:
        while (reader := self._reads.get()) is not None:
            if reader.is_wanted():
                reader.on_done(self._read(reader))

    def _read(self, reader: Reader) -> RunRead:
        begun_s = self._clock()
        name = reader.form.name(reader.hashes[-1])
        found: list[memoryview | None] = [None]

        def get() -> None:
            found[0] = self.store.get(name, reader.form.max_object_bytes + 1)

        problem = self.call("reading from the shared store", get)
        content = found[0]
        if problem or content is None:
            return RunRead(None, self._clock() - begun_s, problem)
        try:
            pages = reader.form.unpack(content, reader.hashes)
        except UnusableObject as error:
            log.error("object %s of the shared store %s; its pages are computed", name, error.message)
            return RunRead(None, self._clock() - begun_s, error.message, is_refused=True)
        return RunRead(pages, self._clock() - begun_s)

    def _copy_loop(self) -> None:
        while (writer := self._copies.get()) is not None:
            self._writes.put((writer, writer.take()))
        self._writes.put(None)

    def _write_loop(self) -> None:
        while (entry := self._writes.get()) is not None:
            writer, pages = entry
            writer.on_done(self._write(writer, pages))

    def _write(self, writer: Writer, pages: memoryview) -> RunWrite:
        begun_s = self._clock()
        if not self.is_usable:
            return RunWrite(0, 0.0, "the store is not used for a while")
        header = writer.form.pack(writer.hashes, pages)
        name = writer.form.name(writer.hashes[-1])
        problem = self.call("writing into the shared store", lambda: self.store.put(name, (header, pages)))
        return RunWrite(0 if problem else len(header) + len(pages), self._clock() - begun_s, problem)
