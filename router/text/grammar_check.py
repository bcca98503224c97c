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
        compiling = self._threads.run(caller, len(grammar.source), self._compiler.compile, grammar)
        try:
            async with asyncio.timeout(_MAX_COMPILE_S):
                await compiling
        except TimeoutError:
            raise InvalidInput(FIELD, f"takes more than {_MAX_COMPILE_S:g} s to compile; simplify it") from None

    def close(self) -> None:
        self._threads.close()
