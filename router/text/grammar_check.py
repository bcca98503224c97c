"""Compiles a request's grammar before admission, so that workers get no grammar that cannot be enforced.

Callers (tenants) take turns at compiling, which runs under limits in a process of its own
(`router.text.grammar_sandbox`).
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgpack

from penstock.errors import CheckpointError, InternalError, InvalidInput
from penstock.text.grammars import FIELD, MAX_SOURCE_BYTES
from penstock.types import Grammar
from router.text.fair_threads import FairThreads
from router.text.frames import read_frame, write_frame
from router.text.grammar_sandbox import READY, REFUSED, VALID
from router.text.sandbox_process import clean_up_sandbox, start_sandbox

_MAX_WAIT_S = 10.0  # for an answer, on a busy machine
_INLINE_CHARACTERS = 1 << 14  # of schemas; a grammar for them is written in half a millisecond
_MAX_VERDICTS = 1 << 14  # of a few hundred bytes each


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of one compilation. A real schema of 130 kB takes 20 ms of processor time."""

    max_cpu_s: float = 0.1
    max_memory_bytes: int = 256 << 20


class GrammarCheck:
    """Owns the process, the thread that calls it, and a cache of verdicts on grammars. Workers compile grammars again.

    `start` or the first grammar starts the process, and a later grammar starts it again if it has ended.
    """

    def __init__(
        self, folder: str | Path, vocab_size: int, max_queued: int, limits: GrammarLimits | None = None
    ) -> None:
        """`max_queued` bounds the queued grammars and schemas, in characters."""
        given = {"folder": str(folder), "vocab_size": vocab_size, **asdict(limits or GrammarLimits())}
        self._start_frame = msgpack.packb(given)
        self._threads = FairThreads("grammars", 1, max_queued)
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()  # the problem, if any, by digest
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Starts the process, which builds the tokens' trie, on a thread. Does not wait for it."""
        self._threads.submit(self._started)

    async def write(self, caller: str, size: int, work: Callable[[], None]) -> None:
        """Runs `work`, which writes a grammar for schemas of `size` characters; on a thread if they are long.

        Raises Overloaded, or what `work` raises.
        """
        if size <= _INLINE_CHARACTERS:
            work()
        else:
            await self._threads.run(caller, size, work)

    async def check(self, grammar: Grammar, caller: str) -> None:
        """Raises InvalidInput for a grammar that cannot be enforced, CheckpointError if the checkpoint's tokens cannot
        be read, or Overloaded.
        """
        if len(grammar.source) > MAX_SOURCE_BYTES:
            raise InvalidInput(FIELD, f"has more than {MAX_SOURCE_BYTES} bytes; shorten it")
        digest = hashlib.blake2b(f"{grammar.kind}\n{grammar.source}".encode(errors="replace"), digest_size=16).digest()
        if digest not in self._verdicts:
            self._keep(digest, await self._ask(grammar, caller))
        self._verdicts.move_to_end(digest)
        problem = self._verdicts[digest]
        if problem is not None:
            raise InvalidInput(FIELD, problem)

    async def _ask(self, grammar: Grammar, caller: str) -> str | None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def compile_it() -> str | None:
            self._started()
            loop.call_soon_threadsafe(begun.set)
            return self._compile(grammar)

        compiling = asyncio.create_task(self._threads.run(caller, len(grammar.source), compile_it))
        compiling.add_done_callback(lambda done: begun.set())
        try:
            await begun.wait()  # the wait for the turn, bounded by the request's deadline, does not count
            await asyncio.wait({compiling}, timeout=_MAX_WAIT_S)
            if not compiling.done():
                raise InvalidInput(FIELD, f"takes more than {_MAX_WAIT_S:g} s to compile; simplify it")
            return await compiling
        finally:
            compiling.cancel()  # gives up a turn that has not come; a thread that has begun goes on

    def _keep(self, digest: bytes, problem: str | None) -> None:
        self._verdicts[digest] = problem
        while len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def _compile(self, grammar: Grammar) -> str | None:
        """Returns the problem with the grammar, or None. Raises CheckpointError or InternalError."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, msgpack.packb([grammar.kind.value, grammar.source], unicode_errors="replace"))
            answer = read_frame(process.stdout)
        except (OSError, ValueError):  # the process has ended, and `close` may have closed its pipes
            answer = None
        if answer is None:
            raise self._clean_up(process)
        if answer[:1] == VALID:
            return None
        text = answer[1:].decode(errors="replace")
        if answer[:1] == REFUSED:
            return text
        raise CheckpointError(text)

    def _started(self) -> subprocess.Popen[bytes]:
        """Returns the process; starts it if there is none, which takes about a second. Raises InternalError."""
        with self._starting:
            if self._closed:
                raise InternalError("the router is stopping")
            if self._process is not None:
                return self._process
            self._process = process = start_sandbox("router.text.grammar_sandbox")
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, self._start_frame)
            is_ready = read_frame(process.stdout) == READY
        except (OSError, ValueError):
            is_ready = False
        if not is_ready:
            raise self._clean_up(process)
        return process

    def close(self) -> None:
        """Ends the process, even while it compiles."""
        with self._starting:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()
            self._clean_up(process)
        self._threads.close()

    def _clean_up(self, process: subprocess.Popen[bytes]) -> InternalError:
        """Ends a process that does not answer, and returns the error that says so."""
        self._process = None
        process.kill()
        status = clean_up_sandbox(process)
        return InternalError(f"the process that compiles grammars ended with status {status}")
