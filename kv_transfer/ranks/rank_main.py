"""Runs the process of any rank except the first: `python -m kv_transfer.ranks.rank_main PATH PARENT`.

Rank 0 starts this process. PATH is the socket on which rank 0 listens, PARENT is rank 0's process id.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.parallel.spawn import end_with_parent, serve_rank, spawn_ranks
from engine.parallel.worker_rank import RankExtension, WorkerRank
from kv_transfer.ranks.rank_service import RankTransfers
from penstock.process.setup import set_up_logging

launch_ranks = spawn_ranks("kv_transfer.ranks.rank_main")


def extend(member: WorkerRank) -> RankExtension:
    """Returns the calls that a rank answers besides steps."""
    return RankTransfers(member).extension


def main(arguments: list[str]) -> int:
    control, parent = arguments
    end_with_parent(int(parent))
    set_up_logging("rank")
    serve_rank(Path(control), extend)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
