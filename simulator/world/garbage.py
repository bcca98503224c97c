"""Keeps Python's cycle collector from walking a whole deployment again and again while it is simulated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Collections of young objects are rare, and of all objects very rare: the deployment lives as long as the simulation.
_YOUNG_OBJECTS = 100_000  # new objects that cause a collection; Python's own threshold is 700
_COLLECTIONS = (10, 50)  # collections of one generation before the next older one is walked; Python: 10 and 10


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Makes collections rare until the end of the block."""
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG_OBJECTS, *_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
