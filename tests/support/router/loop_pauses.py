"""Bounds what a router's event loop computes without a pause, in processor time, which a busy machine does not
lengthen."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from penstock.errors import InvalidInput

MAX_PAUSE_S = 0.05  # the worst takes 6 to 12 ms on a quiet core, and up to twice that beside other work


@contextlib.contextmanager
def bounded_pauses(case: str) -> Iterator[None]:
    """Fails if a callback of this thread's event loop computes for `MAX_PAUSE_S`. Callers must use another thread."""
    loops, longest_s, longest = threading.get_ident(), 0.0, ""
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        nonlocal longest_s, longest
        if threading.get_ident() != loops:
            run(handle)
            return
        callback, before_s = handle._callback, time.thread_time()  # type: ignore[attr-defined]
        run(handle)
        took_s = time.thread_time() - before_s
        if took_s > longest_s:
            task = getattr(callback, "__self__", None)
            longest_s, longest = took_s, repr(task.get_coro() if isinstance(task, asyncio.Task) else callback)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        yield
    assert longest_s < MAX_PAUSE_S, f"{case}: {longest}"


def longest_call_s(work: Callable[[], object]) -> float:
    """Returns the processor time of the longest call into C, which holds the interpreter's lock until it ends."""
    starts: list[float] = []
    longest_s = 0.0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal longest_s
        if event == "c_call":
            starts.append(time.thread_time())
        elif event in ("c_return", "c_exception") and starts:
            longest_s = max(longest_s, time.thread_time() - starts.pop())

    sys.setprofile(profile)
    try:
        with contextlib.suppress(InvalidInput):
            work()
    finally:
        sys.setprofile(None)
    return longest_s
