"""Compiles the grammar of a request before it is admitted, so that no worker is sent one that cannot be enforced.

Compiling runs in turns by caller (a tenant), in a process of its own under limits (`router.text.grammar_sandbox`).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
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
from router.text.grammar_sandbox import OBEYED, READY, REFUSED

_ROOT = Path(__file__).resolve().parents[2]
_MAX_WAIT_S = 10.0  # for an answer, on a machine that has other work
_STOP_TIMEOUT_S = 5.0
_INLINE_CHARACTERS = 1 << 14  # of schemas, from which a grammar is written in half a millisecond
_MAX_VERDICTS = 1 << 14  # a few hundred bytes each


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of one compilation. A real schema of 130 kB takes 20 ms of a core."""

    max_cpu_s: float = 0.1
    max_memory_bytes: int = 256 << 20


class GrammarCheck:
    """Owns the process, the thread that asks it and the verdicts on the grammars seen last; workers compile their own.

    The process is started by `start`, else by the first grammar, and again should it have ended.
    """

    def __init__(
        self, folder: str | Path, vocab_size: int, max_queued: int, limits: GrammarLimits | None = None
    ) -> None:
        """`max_queued` is in characters of sources."""
        given = {"folder": str(folder), "vocab_size": vocab_size, **asdict(limits or GrammarLimits())}
        self._start_frame = msgpack.packb(given)
        self._threads = FairThreads("grammars", 1, max_queued)
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()  # what is wrong, by digest
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Starts the process off the event loop, and has it build the tokens' trie."""
        self._threads.submit(self._started)

    async def write(self, caller: str, size: int, work: Callable[[], None]) -> None:
        """Does `work`, which writes a grammar for schemas of `size` characters: long ones off the event loop.

        Raises Overloaded, or what `work` raises.
        """
        if size <= _INLINE_CHARACTERS:
            work()
        else:
            await self._threads.run(caller, size, work)

    async def check(self, grammar: Grammar, caller: str) -> None:
        """Raises InvalidInput for a grammar that cannot be enforced, CheckpointError where the tokens are unknown, or
        Overloaded."""
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
            await begun.wait()  # its turn, for which its grammar is not to blame; the request's deadline bounds it
            await asyncio.wait({compiling}, timeout=_MAX_WAIT_S)
            if not compiling.done():
                raise InvalidInput(FIELD, f"takes more than {_MAX_WAIT_S:g} s to compile; simplify it")
            return await compiling
        finally:
            compiling.cancel()  # of no effect on its thread, nor once it is done

    def _keep(self, digest: bytes, problem: str | None) -> None:
        self._verdicts[digest] = problem
        while len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def _compile(self, grammar: Grammar) -> str | None:
        """Returns what is wrong with the grammar, or None. Raises CheckpointError or InternalError."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, msgpack.packb([grammar.kind.value, grammar.source], unicode_errors="replace"))
            answer = read_frame(process.stdout)
        except (OSError, ValueError):  # it has ended, and `close` may have closed its pipes
            answer = None
        if answer is None:
            raise self._explain_end(process)
        if answer[:1] == OBEYED:
            return None
        text = answer[1:].decode(errors="replace")
        if answer[:1] == REFUSED:
            return text
        raise CheckpointError(text)

    def _started(self) -> subprocess.Popen[bytes]:
        """Returns the process once it is ready. Blocks for a second the first time; raises InternalError."""
        with self._starting:
            if self._closed:
                raise InternalError("the router is stopping")
            if self._process is not None:
                return self._process
            kept = {name: os.environ[name] for name in ("PATH", "LANG", "VIRTUAL_ENV") if name in os.environ}
            path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "router.text.grammar_sandbox"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**kept, "PYTHONPATH": path},
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, self._start_frame)
            is_ready = read_frame(process.stdout) == READY
        except (OSError, ValueError):
            is_ready = False
        if not is_ready:
            raise self._explain_end(process)
        return process

    def close(self) -> None:
        """Ends the process, even in the middle of a grammar."""
        with self._starting:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()
            self._explain_end(process)
        self._threads.close()

    def _explain_end(self, process: subprocess.Popen[bytes]) -> InternalError:
        self._process = None
        process.kill()
        status = process.wait(_STOP_TIMEOUT_S)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                continue  # input that the process had not read
        return InternalError(f"the grammars' process ended with status {status}")
