"""Keeps Python's cycle collector from walking a whole deployment again and again while it is simulated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 100_000  # made since the last collection, before the next; Python's own threshold is 700


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Exempts existing objects from collections, and collects seldom until the end of the block."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
