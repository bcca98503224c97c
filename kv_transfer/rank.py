"""`python -m kv_transfer.rank PATH PARENT`: the process of a rank other than the first. Started by rank 0's process.

PATH is where rank 0 listens, PARENT its process id.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.rank_member import Extension, RankMember
from engine.rank_process import end_with, serve_rank, spawn_ranks
from kv_transfer.rank_ends import RankTransfers
from penstock import log

launch_ranks = spawn_ranks("kv_transfer.rank")


def extend(member: RankMember) -> Extension:
    """What a rank does besides steps."""
    return RankTransfers(member).extension


def main(arguments: list[str]) -> int:
    control, parent = arguments
    end_with(int(parent))
    log.set_up("rank")
    serve_rank(Path(control), extend)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
