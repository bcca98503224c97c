"""Sets which test files share one test process; every other file goes to whichever process is free."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Two Rays at once slow each other down until their daemons give up.
RAY_FILES = frozenset(
    {
        "tests/cluster/ray/test_controller_moves.py",
        "tests/cluster/ray/test_end_to_end.py",
        "tests/cluster/ray/test_nodes.py",
        "tests/cluster/ray/test_ray_autoscaler.py",
        "tests/cluster/ray/test_ray_loss.py",
        "tests/cluster/scaling/test_autoscaler_on_ray.py",
        "tests/repository/test_deploy_image.py",
        "tests/system/test_runbooks.py",
    }
)
# These parse every source of the project, which one process does once for all of them.
SOURCE_FILES = frozenset(
    {
        "tests/repository/test_imports.py",
        "tests/repository/test_language.py",
        "tests/repository/test_structure.py",
    }
)


class GroupedFiles(LoadFileScheduling):
    """Distributes like `--dist loadfile`, but keeps the Ray files together, and those that read all sources."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if file in RAY_FILES:
            return "ray"
        return "sources" if file in SOURCE_FILES else file


def make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Returns the scheduler of `--dist loadfile`, or None for other ways to distribute."""
    return GroupedFiles(config, log) if config.getvalue("dist") == "loadfile" else None
