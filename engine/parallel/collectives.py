"""Exchanges data between the ranks of one replica inside a step: sums, the logits to rank 0, and the sampled tokens
back.

On GPUs it all stays on the devices, in order with the step. A group is passed explicitly to whatever reduces, and
belongs to the thread that computes steps; `SINGLE_RANK` is the group of one, whose calls cost nothing. There is no
default process group: each group has its own store.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from engine.parallel.one_shot import OneShotSums, join_one_shot
from engine.parallel.shard import WHOLE, Shard

_NEVER = datetime.timedelta(days=365)


class ParallelGroup(Protocol):
    shard: Shard

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks, the same bits on each; may write into `x`.

        Blocks on a CPU. Raises RuntimeError.
        """
        ...

    def join_columns(self, x_RV: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' columns concatenated on rank 0, and `x_RV` on others; every rank has equally many."""
        ...

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """Copies rank 0's `x` into that of the others, of the same shape and dtype, and returns it.

        Blocks on a CPU. Raises RuntimeError.
        """
        ...


class SingleRank:
    """The group of a replica that is not split."""

    shard = WHOLE

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join_columns(self, x_RV: torch.Tensor) -> torch.Tensor:
        return x_RV

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        return x


SINGLE_RANK = SingleRank()


class TorchGroup:
    """Uses gloo between CPUs, and between GPUs NCCL, besides small sums in each other's memory (`one_shot`)."""

    def __init__(self, shard: Shard, device: torch.device, store_file: Path, timeout_s: float) -> None:
        """Blocks until every rank has joined; `store_file` is in a folder that nobody else can read.

        A collective that takes longer than `timeout_s` raises on a CPU. On a GPU, where calls return before anything
        has moved, the leader's watch ends the process (`engine.parallel.leader`). Raises RuntimeError.
        """
        self.shard = shard
        timeout = datetime.timedelta(seconds=timeout_s)
        store = dist.FileStore(str(store_file), shard.num_ranks)
        store.set_timeout(timeout)
        self._one_shot: OneShotSums | None = None
        if device.type == "cuda":
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # else torch ends the process before we do
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = _NEVER
            self._group: Any = dist.ProcessGroupNCCL(store, shard.rank, shard.num_ranks, nccl)
            self._one_shot = join_one_shot(shard, device, store)
        else:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stub
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            gloo._timeout = timeout
            gloo._threads = 1
            self._group = dist.ProcessGroupGloo(store, shard.rank, shard.num_ranks, gloo)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x, options = x.contiguous(), dist.AllreduceOptions()
        if self._one_shot is not None and self._one_shot.takes(x):
            return self._one_shot(x)
        options.asyncOp = False  # on the current stream: with its own, NCCL makes each wait for the other at every sum
        self._group.allreduce([x], options).wait()
        return x

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, False
        self._group.broadcast([x], options).wait()
        return x

    def join_columns(self, x_RV: torch.Tensor) -> torch.Tensor:
        options = dist.GatherOptions()
        options.rootRank, options.asyncOp = 0, False
        x_RV = x_RV.contiguous()
        if self.shard.rank:
            self._group.gather([], [x_RV], options).wait()
            return x_RV
        parts = [torch.empty_like(x_RV) for _ in range(self.shard.num_ranks)]
        self._group.gather([parts], [x_RV], options).wait()
        return torch.cat(parts, dim=1)
