"""Compiles the grammar of a request before it is admitted, so that no worker is sent one that cannot be obeyed.

Compiling runs in turns by caller (a tenant), off the event loop and outside the interpreter's lock.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.errors import InvalidInput
from penstock.text.grammars import FIELD, MAX_SOURCE_BYTES, GrammarCompiler
from penstock.types import Grammar
from router.fair_threads import FairThreads

_NUM_THREADS = 2
_MAX_COMPILE_S = 5.0  # the worst grammar found takes 0.6 s on an idle core


class GrammarCheck:
    """Owns the compiled grammars and the threads; workers compile their own."""

    def __init__(self, folder: str | Path, vocab_size: int, max_queued: int) -> None:
        """`max_queued` is in characters of sources."""
        self._compiler = GrammarCompiler(folder, vocab_size)
        self._threads = FairThreads("grammars", _NUM_THREADS, max_queued)

    async def check(self, grammar: Grammar, caller: str) -> None:
        """Raises InvalidInput for a grammar that cannot be obeyed, or Overloaded."""
        if len(grammar.source) > MAX_SOURCE_BYTES:
            raise InvalidInput(FIELD, f"has more than {MAX_SOURCE_BYTES} bytes; shorten it")
        if self._compiler.cached(grammar) is not None:
            return
        if not self._compiler.is_prepared:
            await self._threads.run(caller, 0, self._compiler.prepare)
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def compile_it() -> None:
            loop.call_soon_threadsafe(begun.set)
            self._compiler.compile(grammar)

        compiling = asyncio.create_task(self._threads.run(caller, len(grammar.source), compile_it))
        compiling.add_done_callback(lambda done: begun.set())
        try:
            await begun.wait()  # its turn, for which its grammar is not to blame; the request's deadline bounds it
            await asyncio.wait({compiling}, timeout=_MAX_COMPILE_S)
            if not compiling.done():
                raise InvalidInput(FIELD, f"takes more than {_MAX_COMPILE_S:g} s to compile; simplify it")
            await compiling
        finally:
            compiling.cancel()  # of no effect on its thread, nor once it is done

    def close(self) -> None:
        self._threads.close()
