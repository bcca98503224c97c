"""The process group of a broadcast: the trainer is rank 0, and each worker has a rank above it.

Uses gloo over TCP, and tensors of bytes alone: nothing that is received is unpickled. The group is no default group, so
a trainer's own process groups are not touched. Every call has a time limit.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import time
from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.distributed as dist

from penstock.client.broadcast.manifest import WeightsBroadcast
from penstock.errors import Unavailable

TRAINER = 0  # rank
_PIECE_BYTES = 64 << 20  # sent at once, so that each wait is short


class TrainerStore:
    """The store at which the members of a group meet. The trainer keeps it until the broadcast is over."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """Listens on `host` alone, at a free port. Raises OSError."""
        listening = socket.create_server((host, 0))
        port = listening.getsockname()[1]
        self.address = f"{host}:{port}"
        timeout = datetime.timedelta(seconds=timeout_s)
        self.store = dist.TCPStore(
            host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )


class BroadcastGroup:
    """A context manager, because the group's threads and connections must end with the broadcast."""

    def __init__(
        self, broadcast: WeightsBroadcast, rank: int, num_ranks: int, store: dist.TCPStore | None = None
    ) -> None:
        """Blocks until every rank has joined. `store` is the trainer's. Raises Unavailable."""
        self._timeout_s = broadcast.timeout_s
        self._deadline_s = time.monotonic() + broadcast.within_s
        timeout = datetime.timedelta(seconds=broadcast.timeout_s)
        host, _, port = broadcast.address.rpartition(":")
        with _named_errors():
            if store is None:
                store = dist.TCPStore(host, int(port), None, False, timeout)
            store.set_timeout(timeout)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stub
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address(broadcast.address))]
            options._timeout = timeout
            options._threads = 1
            keys = dist.PrefixStore(broadcast.key, store)
            self._group: Any = dist.ProcessGroupGloo(keys, rank, num_ranks, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._group = None

    def broadcast(self, data: torch.Tensor) -> None:
        """Sends the trainer's bytes, which fill `data` at every other rank. Blocks. Raises Unavailable."""
        options = dist.BroadcastOptions()
        options.rootRank = TRAINER
        for piece in data.split(_PIECE_BYTES):
            options.timeout = self._limit(self._timeout_s)
            with _named_errors():
                self._group.broadcast([piece], options).wait()

    def all_agree(self, is_content: bool, *, is_patient: bool = False) -> bool:
        """Returns whether every rank is content. Blocks until all have answered, for as long as one wait may take, or
        if patient as long as the whole broadcast. Raises Unavailable."""
        votes = torch.tensor([int(is_content)], dtype=torch.int32)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]  # torch's stub
        options.timeout = self._limit(float("inf") if is_patient else self._timeout_s)
        with _named_errors():
            self._group.allreduce([votes], options).wait()
        return bool(votes.item())

    def _limit(self, longest_s: float) -> datetime.timedelta:
        """Returns how long the next call may take. Raises Unavailable once the whole broadcast has taken too long."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise Unavailable("the broadcast broke off: it takes longer than its within_s")
        return datetime.timedelta(seconds=min(longest_s, left_s))


def local_address(peer: str) -> str:
    """Returns the address of this machine from which it reaches `peer` (host:port). Raises OSError."""
    host, _, port = peer.rpartition(":")
    if not port.isdecimal():
        raise OSError("no port is given")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch raises RuntimeError for every failure of the network
        reason = str(error).partition("\n")[0].partition(". This is typically")[0]
        raise Unavailable(f"the broadcast broke off: {reason}") from error
