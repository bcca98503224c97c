"""Sums small tensors over GPUs that reach each other's memory, in one kernel instead of NCCL's ring.

Every rank copies its part into a buffer that all others map (torch's symmetric memory), and reads all parts in the
order of ranks, so that each has the same bits. A decode step's sums are some tens of KiB, whose time with NCCL is
latency. The kernel waits for its peers on the device, never on the host, so graphs capture it. The ranks agree at the
start: either all use it or none does.

Torch marks the API as unstable, though it is the same in 2.11 and 2.13. A version that has other names or arguments is
noticed when the ranks join, and all then use NCCL.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Protocol

import torch
import torch.distributed as dist

from engine.parallel.shard import Shard
from penstock.errors import ConfigError

log = logging.getLogger(__name__)

LIMIT_VARIABLE = "PENSTOCK_ONE_SHOT_BYTES"
_ALIGN = 16  # bytes that a thread reads at once
_DTYPES = (torch.bfloat16, torch.float32)
_GROUP = "penstock-one-shot"


def default_limit_bytes(num_ranks: int) -> int:
    """Returns the largest sum that is computed so. Each rank reads all parts, so more ranks pay off for less.

    Chosen by others' experience with such kernels, not measured.
    """
    return 512 << 10 if num_ranks <= 4 else 256 << 10


class PeerMemory(Protocol):
    """Memory that all ranks of a group map. Implemented by `TorchPeerMemory`, and by a double in tests."""

    def find_problem(self, shard: Shard, device: torch.device) -> str:
        """Returns why this rank cannot reach its peers' memory, or an empty string."""
        ...

    def join(self, shard: Shard, device: torch.device, num_bytes: int, store: dist.Store) -> torch.Tensor:
        """Returns this rank's buffer, uint8, once every rank has mapped all others. Raises RuntimeError."""
        ...

    def sum(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Sums the ranks' `part`s, views of the beginning of their buffers, into `out`."""
        ...


class TorchPeerMemory:
    def find_problem(self, shard: Shard, device: torch.device) -> str:
        if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_out"):
            return f"torch {torch.__version__} has no one_shot_all_reduce_out"
        if torch.cuda.device_count() < shard.num_ranks:
            return f"a process sees {torch.cuda.device_count()} of {shard.num_ranks} GPUs, so access is not known"
        peers = (peer for peer in range(shard.num_ranks) if peer != shard.rank)
        blind = next((peer for peer in peers if not torch.cuda.can_device_access_peer(shard.rank, peer)), None)
        return "" if blind is None else f"GPU {shard.rank} cannot access the memory of GPU {blind}"

    def join(self, shard: Shard, device: torch.device, num_bytes: int, store: dist.Store) -> torch.Tensor:
        try:
            from torch._C._distributed_c10d import _SymmetricMemory

            _SymmetricMemory.set_group_info(_GROUP, shard.rank, shard.num_ranks, store)
            buffer = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, _GROUP)
            _SymmetricMemory.rendezvous(buffer, _GROUP)
        except (AttributeError, ImportError, TypeError) as error:  # names or arguments of another version
            problem = f"torch {torch.__version__} has another interface to symmetric memory: {error}"
            raise RuntimeError(problem) from error
        return buffer

    def sum(self, part: torch.Tensor, out: torch.Tensor) -> None:
        torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", _GROUP, out)


class OneShotSums:
    """A rank's end of the sums, once all ranks have agreed to use them."""

    def __init__(self, memory: PeerMemory, buffer: torch.Tensor) -> None:
        self._memory, self._buffer = memory, buffer

    def takes(self, x: torch.Tensor) -> bool:
        """Returns whether `x` is summed here; the same on every rank."""
        return x.dtype in _DTYPES and 0 < x.nbytes <= self._buffer.numel() and x.nbytes % _ALIGN == 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks, the same bits on each. Does not wait for the device."""
        part, out = self._buffer[: x.nbytes].view(x.dtype).view(x.shape), torch.empty_like(x)
        part.copy_(x)  # a peer has read what was there before, for the last sum has ended on this device
        self._memory.sum(part, out)
        return out


def join_one_shot(
    shard: Shard, device: torch.device, store: dist.Store, memory: PeerMemory | None = None
) -> OneShotSums | None:
    """Returns this rank's end, or None if a rank cannot take part, which rank 0 logs. Blocks until all have agreed.

    Raises RuntimeError if a rank does not answer in time, and ConfigError.
    """
    memory = memory or TorchPeerMemory()
    limit_bytes = _limit_bytes(shard.num_ranks)
    problem = memory.find_problem(shard, device) if limit_bytes else f"{LIMIT_VARIABLE} is 0"
    problem, limit_bytes = _agree(shard, store, "able", problem, limit_bytes)
    buffer = None
    if not problem:
        try:
            buffer = memory.join(shard, device, limit_bytes, dist.PrefixStore(_GROUP, store))
        except RuntimeError as error:
            problem = str(error)
        problem, _ = _agree(shard, store, "joined", problem, limit_bytes)
    if problem or buffer is None:
        if shard.rank == 0:
            log.info("ranks add up with NCCL alone: %s", problem)
        return None
    if shard.rank == 0:
        log.info("ranks add up to %d KiB in each other's memory, and more with NCCL", limit_bytes >> 10)
    return OneShotSums(memory, buffer)


def _limit_bytes(num_ranks: int) -> int:
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return default_limit_bytes(num_ranks)
    if not text.isdecimal():
        raise ConfigError(f"{LIMIT_VARIABLE} = {text!r} is not a number of bytes; give one, or 0 for NCCL alone")
    return int(text)


def _agree(shard: Shard, store: dist.Store, stage: str, problem: str, limit_bytes: int) -> tuple[str, int]:
    """Returns the first problem of any rank, and the least limit."""
    store.set(f"one-shot-{stage}-{shard.rank}", json.dumps([problem, limit_bytes]))
    answers = [json.loads(store.get(f"one-shot-{stage}-{rank}")) for rank in range(shard.num_ranks)]
    problems = (f"rank {rank}: {answer[0]}" for rank, answer in enumerate(answers) if answer[0])
    return next(problems, ""), min(answer[1] for answer in answers)
