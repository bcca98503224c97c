"""Tests what the keeper takes from a worker, and when it releases the pool. Starts no process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from worker.pull.kept.keeper import Keeper, KeptMemory, choose_released


@pytest.fixture(name="listener")
def _listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.bind(b"\0penstock-test-%d" % os.getpid())
        made.listen(1)
        yield made


@pytest.mark.parametrize(
    ("wanted", "lease_s"), [("NaN", 0.0), (-1, 0.0), ("Infinity", 3600.0), (7200, 3600.0), (5, 5.0)]
)
def test_a_lease_is_bounded_whatever_a_worker_requests(listener: socket.socket, wanted: object, lease_s: float) -> None:
    keeper = Keeper(listener)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
        message = {"op": "deposit", "key": "k", "worker_id": "w", "pool_id": "00", "num_pages": 1, "lease_s": wanted}
        assert keeper._answer(ours, message, files) == []
        pool = keeper._owned[ours]
        assert pool is not None
        assert pool.lease_s == lease_s
        pool.close()


def test_the_number_of_kept_pools_is_bounded_for_each_worker_and_host() -> None:
    def kept(worker_id: str, until_s: float) -> KeptMemory:
        description: dict[str, object] = {"key": "k", "worker_id": worker_id, "pool_id": f"{worker_id}{until_s}"}
        pool = KeptMemory(description, [], 60.0, 1)
        pool.until_s = until_s
        return pool

    pools = [kept("over", 1.0), *(kept("crashes", 10.0 + number) for number in range(3))]
    pools += [kept(f"worker-{number}", 50.0) for number in range(63)]
    released = choose_released(pools, 5.0, free_share=1.0)
    assert [pool.pool_id for pool in released] == ["over1.0", "crashes11.0", "crashes10.0"]
    assert choose_released(pools[-2:], 5.0, free_share=0.01) == [pools[-2]]
