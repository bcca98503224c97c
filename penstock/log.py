"""Logging set up once a process: one line an event, transitions and not tokens, never a prompt."""

from __future__ import annotations

import logging
import os
import sys

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def set_up(name: str, level: str | None = None) -> None:
    """Logs of this process go to stderr, prefixed with `name`. The level comes from PENSTOCK_LOG unless given."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{name} {_FORMAT}"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel((level or os.environ.get("PENSTOCK_LOG", "WARNING")).upper())
