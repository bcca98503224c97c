"""Runs callbacks and events so that an error in one of them cannot end the thread that serves all transfers."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


def guarded(event: Callable[[], None]) -> None:
    """Runs `event` and logs what it raises."""
    try:
        event()
    except Exception:
        log.exception("handling a transfer event failed")
