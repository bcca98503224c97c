"""Tests small sums in the ranks' shared memory over a double, whose ranks are threads: who takes part, and what is
summed."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.parallel import collectives
from engine.parallel.collectives import TorchGroup
from engine.parallel.one_shot import OneShotSums, TorchPeerMemory, default_limit_bytes, join_one_shot
from engine.parallel.shard import Shard
from penstock.errors import ConfigError

CPU = torch.device("cpu")


class ThreadMemory:
    """Maps the ranks' buffers into one process. `problems` and `failures` are by rank."""

    def __init__(self, num_ranks: int, problems: dict[int, str], failures: dict[int, str]) -> None:
        self._problems, self._failures = problems, failures
        self._buffers: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(num_ranks, timeout=20)

    def find_problem(self, shard: Shard, device: torch.device) -> str:
        return self._problems.get(shard.rank, "")

    def join(self, shard: Shard, device: torch.device, num_bytes: int, store: dist.Store) -> torch.Tensor:
        if shard.rank in self._failures:
            raise RuntimeError(self._failures[shard.rank])
        self._buffers[shard.rank] = torch.zeros(num_bytes, dtype=torch.uint8)
        return self._buffers[shard.rank]

    def sum(self, part: torch.Tensor, out: torch.Tensor) -> None:
        self._barrier.wait()
        parts = [self._buffers[rank][: part.nbytes].view(part.dtype) for rank in sorted(self._buffers)]
        total = parts[0].clone()
        for other in parts[1:]:
            total += other
        out.view(-1).copy_(total)
        self._barrier.wait()


def on_ranks(num_ranks: int, run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def join_all(
    num_ranks: int = 2, problems: dict[int, str] | None = None, failures: dict[int, str] | None = None
) -> list[OneShotSums | None]:
    store, memory = dist.HashStore(), ThreadMemory(num_ranks, problems or {}, failures or {})
    store.set_timeout(datetime.timedelta(seconds=20))
    return on_ranks(num_ranks, lambda rank: join_one_shot(Shard(rank, num_ranks), CPU, store, memory))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_rank_gets_the_same_sum_again_and_again(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ends = join_all(3)
    for num_tokens in (1, 5, 2):
        parts = [torch.randn(num_tokens, 16).to(dtype) for _ in ends]
        sums = on_ranks(3, lambda rank: ends[rank](parts[rank]))  # type: ignore[misc]  # noqa: B023
        assert all(torch.equal(total, (parts[0] + parts[1]) + parts[2]) for total in sums)


def test_only_small_aligned_tensors_of_two_dtypes_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ONE_SHOT_BYTES", "4096")
    (end, _) = join_all()
    assert end is not None
    assert end.takes(torch.zeros(2048, dtype=torch.bfloat16))
    assert not end.takes(torch.zeros(2056, dtype=torch.bfloat16)), "it does not fit the buffer"
    assert not end.takes(torch.zeros(9, dtype=torch.bfloat16)), "18 bytes are no multiple of 16"
    assert not end.takes(torch.zeros(8, dtype=torch.float16))
    assert not end.takes(torch.zeros(0))


@pytest.mark.parametrize("stage", ["problems", "failures"])
def test_a_rank_that_cannot_take_part_keeps_all_out(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert join_all(3, **{stage: {2: "GPU 2 cannot access the memory of GPU 0"}}) == [None] * 3  # type: ignore[arg-type]
    assert "ranks add up with NCCL alone: rank 2: GPU 2 cannot access the memory of GPU 0" in caplog.text


def test_a_limit_of_0_keeps_all_out_and_another_is_validated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("PENSTOCK_ONE_SHOT_BYTES", "0")
    assert join_all() == [None, None]
    assert "PENSTOCK_ONE_SHOT_BYTES is 0" in caplog.text
    monkeypatch.setenv("PENSTOCK_ONE_SHOT_BYTES", "1 MiB")
    with pytest.raises(ConfigError, match="'1 MiB' is not a number of bytes"):
        join_all()


def test_limits_shrink_with_the_number_of_ranks() -> None:
    assert [default_limit_bytes(num_ranks) >> 10 for num_ranks in (2, 4, 8)] == [512, 512, 256]


def test_gpus_without_access_to_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, shard = TorchPeerMemory(), Shard(1, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "sees 1 of 2 GPUs" in memory.find_problem(shard, torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: False)
    assert memory.find_problem(shard, torch.device("cuda:1")) == "GPU 1 cannot access the memory of GPU 0"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
    assert memory.find_problem(shard, torch.device("cuda:1")) == ""


def test_torch_has_what_is_called() -> None:
    from torch._C._distributed_c10d import _SymmetricMemory

    schema = str(torch.ops.symm_mem.one_shot_all_reduce_out.default._schema)
    assert "(Tensor input, str reduce_op, str group_name, Tensor(a!) out)" in schema
    for name in ("set_group_info", "empty_strided_p2p", "rendezvous"):
        assert hasattr(_SymmetricMemory, name)


def test_a_group_of_gpus_sends_only_small_sums_through_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reduced: list[torch.Size] = []

    class Nccl:
        class Options:
            _timeout = datetime.timedelta()

        def __init__(self, *args: Any) -> None:
            pass

        def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
            reduced.append(tensors[0].shape)
            return self

        def wait(self) -> None:
            pass

    class Memory(ThreadMemory):
        def sum(self, part: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(2 * part)

    end = OneShotSums(Memory(1, {}, {}), torch.zeros(1024, dtype=torch.uint8))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(collectives, "join_one_shot", lambda shard, device, store: end)
    group = TorchGroup(Shard(0, 2), torch.device("cuda:0"), tmp_path / "store", 20)
    assert torch.equal(group.sum(torch.ones(4, 8)), torch.full((4, 8), 2.0))
    assert reduced == []
    group.sum(torch.ones(64, 8))
    assert reduced == [torch.Size([64, 8])]


def test_another_api_of_torch_is_a_reason_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(name: str) -> None: ...

    monkeypatch.setattr("torch._C._distributed_c10d._SymmetricMemory.set_group_info", staticmethod(changed))
    with pytest.raises(RuntimeError, match=r"has another interface to symmetric memory: .*positional argument"):
        TorchPeerMemory().join(Shard(0, 2), CPU, 4096, dist.HashStore())
    monkeypatch.delattr("torch._C._distributed_c10d._SymmetricMemory")
    with pytest.raises(RuntimeError, match="has another interface to symmetric memory"):
        TorchPeerMemory().join(Shard(0, 2), CPU, 4096, dist.HashStore())
