"""Marks that a worker on this machine has started, for a probe that imports nothing from this package.

The folder is PENSTOCK_READY_DIR; without it nothing is marked. `penstock-health worker` reads the marks. Each worker
has a file with its process id, since a process that is killed cannot remove its file.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


def leave_ready_mark(worker_id: str) -> None:
    """Marks this process as a started worker."""
    if folder := os.environ.get("PENSTOCK_READY_DIR"):
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            Path(folder, worker_id).write_text(str(os.getpid()))
        except OSError as error:
            log.warning("PENSTOCK_READY_DIR = %s: %s; its pod never becomes ready", folder, error)


def remove_ready_mark(worker_id: str) -> None:
    """Removes this worker's mark, if there is one."""
    if folder := os.environ.get("PENSTOCK_READY_DIR"):
        Path(folder, worker_id).unlink(missing_ok=True)
