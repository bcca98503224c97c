"""Hands all files that start Ray to one test process: two at once slow each other down until their daemons give up."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

RAY_FILES = frozenset(
    {
        "tests/cluster/ray/test_controller_moves.py",
        "tests/cluster/ray/test_end_to_end.py",
        "tests/cluster/ray/test_nodes.py",
        "tests/cluster/ray/test_ray_loss.py",
        "tests/repository/test_deploy_image.py",
        "tests/system/test_runbooks.py",
    }
)


class OneRayScheduling(LoadFileScheduling):
    """`--dist loadfile`, with the Ray files as one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "ray" if file in RAY_FILES else file


def make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Returns the scheduler of `--dist loadfile`; None for other ways to distribute."""
    return OneRayScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
