"""What the ranks of one replica say to each other in the middle of a step: sums, the logits to rank 0, and from there
the tokens that it has drawn of them. On GPUs it all stays on the devices, in order with the step.

Passed explicitly to whoever reduces; `Alone` is the group of one, whose calls cost nothing. A group belongs to the
thread that computes steps. No default process group: each stands on its own store.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from engine.shard import WHOLE, Shard

_NEVER = datetime.timedelta(days=365)


class ParallelGroup(Protocol):
    shard: Shard

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Over all ranks, the same bits on each; may put it into `x`. Blocks on a CPU. Raises RuntimeError."""
        ...

    def join_columns(self, x_RV: torch.Tensor) -> torch.Tensor:
        """On rank 0 the ranks' columns side by side, on others `x_RV`; equally many on each."""
        ...

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's, into those of the others, of its shape and dtype. Blocks on a CPU. Raises RuntimeError."""
        ...


class Alone:
    """One rank has everything."""

    shard = WHOLE

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join_columns(self, x_RV: torch.Tensor) -> torch.Tensor:
        return x_RV

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        return x


ALONE = Alone()


class TorchGroup:
    """Over gloo between CPUs, over NCCL between GPUs."""

    def __init__(self, shard: Shard, device: torch.device, store_file: Path, timeout_s: float) -> None:
        """Blocks until every rank is here. `store_file` is in a folder that nobody else can read. Raises RuntimeError.

        A collective that takes longer than `timeout_s` raises on a CPU; on a GPU, where calls return before anything
        has moved, the ranks' watch ends the process (`engine.ranks`).
        """
        self.shard = shard
        timeout = datetime.timedelta(seconds=timeout_s)
        store = dist.FileStore(str(store_file), shard.num_ranks)
        store.set_timeout(timeout)
        if device.type == "cuda":
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # else torch ends the process, and not we
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = _NEVER
            self._group: Any = dist.ProcessGroupNCCL(store, shard.rank, shard.num_ranks, nccl)
        else:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stub
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            gloo._timeout = timeout
            gloo._threads = 1
            self._group = dist.ProcessGroupGloo(store, shard.rank, shard.num_ranks, gloo)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([x], options).wait()
        return x

    def join_columns(self, x_RV: torch.Tensor) -> torch.Tensor:
        options = dist.GatherOptions()
        options.rootRank = 0
        x_RV = x_RV.contiguous()
        if self.shard.rank:
            self._group.gather([], [x_RV], options).wait()
            return x_RV
        parts = [torch.empty_like(x_RV) for _ in range(self.shard.num_ranks)]
        self._group.gather([parts], [x_RV], options).wait()
        return torch.cat(parts, dim=1)
