"""Tests a replica of several ranks: it samples the tokens of one rank, and ends as a whole if a rank is lost.

Most ranks here are threads of this process; like processes, they share nothing but the channel and the group.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cluster.cli.commands.inspecting.status import format_status
from cluster.cli.commands.running.serve import serve_config
from cluster.cli.main import make_parser
from cluster.pools.resources import divide_resources, num_cpus_needed
from engine.cache.disk_tier import DiskTier
from engine.cache.tensor_parallel import AllRanksDiskFile
from engine.engine import Engine
from engine.generate import generate
from engine.memory.plan import plan_memory
from engine.models.config import ModelConfig
from engine.models.shapes import tensor_shapes
from engine.models.sharding import tensor_slices
from engine.parallel.channel import RankChannel, dial
from engine.parallel.leader import RankFailure, RankLeader
from engine.parallel.shard import Shard
from engine.parallel.spawn import serve_rank
from engine.parallel.step_codec import BroadcastStep, decode, encode
from engine.step.batch import build_host_batch
from engine.step.sequence import ScheduledSequence, Sequence
from kv_transfer.ranks.rank_main import extend, launch_ranks
from penstock.config import EngineConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.types import PageId, RequestId, Role, SamplingParams
from penstock.v1 import admin_pb2
from tests.engine.memory.test_memory_plan import HOST, tensors_of
from tests.support.engine.checkpoints import FAMILIES, make_checkpoint

SALT = b"tests"
MODEL = Path(__file__).resolve().parents[3] / "models" / "penstock-tiny"
PROMPT = [3 + (7 * place) % 290 for place in range(21)]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)


def launch_threads(control: Path, num_ranks: int) -> None:
    """Starts ranks as threads instead of processes."""
    for _ in range(num_ranks):
        serve = partial(serve_rank, control, extend, on_orphaned=lambda: None)
        threading.Thread(target=serve, name="rank", daemon=True).start()


def config(folder: Path, **settings: object) -> EngineConfig:
    return EngineConfig.model_validate(
        {"model": str(folder), "num_pages": 16, "page_size": 4, "num_threads": 1, "dtype": "float32", **settings}
    )


def check_equal(folder: Path, num_ranks: int, *, expert_parallel: bool = False, **settings: object) -> None:
    alone = Engine.load(config(folder, **settings))
    ranks = config(folder, tensor_parallel=num_ranks, expert_parallel=expert_parallel, **settings)
    split = Engine.load(ranks, launch=launch_threads)
    try:
        for sampling, chunk in ((GREEDY, None), (SEEDED, 8)):
            wanted = generate(alone, PROMPT, sampling, SALT, chunk_tokens=chunk, use_prefix_cache=False)
            assert generate(split, PROMPT, sampling, SALT, chunk_tokens=chunk, use_prefix_cache=False) == wanted
        assert split.layout.page_bytes * min(num_ranks, alone.layout.num_kv_heads) == alone.layout.page_bytes
    finally:
        split.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_generate_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    check_equal(make_checkpoint(family, tmp_path), 2)


def test_more_ranks_than_kv_heads_and_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    biases = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    check_equal(make_checkpoint("llama", tmp_path, vocab_size=319, **biases), 4)


def test_ranks_take_their_rows_of_fused_and_quantized_products(tmp_path: Path) -> None:
    check_equal(make_checkpoint("phi3", tmp_path, partial_rotary_factor=0.75), 2, quantization="int8")


def test_norms_over_all_heads_count_a_replicated_head_once(tmp_path: Path) -> None:
    check_equal(make_checkpoint("olmo2", tmp_path), 4)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_ranks_read_every_value_of_every_tensor(num_ranks: int, configs: dict[str, ModelConfig]) -> None:
    for model in configs.values():
        slices = [tensor_slices(model, Shard(rank, num_ranks)) for rank in range(num_ranks)]
        for name, shape in tensor_shapes(model).items():
            parts = [cut for of_rank in slices if (cut := of_rank.get(name)) is not None and not cut.zeros]
            if not parts:
                continue  # read whole
            assert [cut.dim for cut in parts] == [parts[0].dim] * num_ranks, name
            read = {place for cut in parts for start, stop in cut.spans for place in range(start, stop)}
            assert read == set(range(shape[parts[0].dim])), name


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    """Returns configurations of every family, with eight heads."""
    made = {}
    for family in FAMILIES:
        kv_heads = {} if family.startswith("deepseek") else {"num_key_value_heads": 4}
        folder = make_checkpoint(family, tmp_path_factory.mktemp(family), num_attention_heads=8, **kv_heads)
        made[family] = ModelConfig.from_folder(folder)
    return made


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tensor_parallel": 3}, "does not divide the model's 4 attention heads"),
        (
            {"tensor_parallel": 2, "host_memory_bytes": 1 << 20, "disk_bytes": 9 << 20, "disk_path": "/no"},
            "disk_path = '/no'",
        ),
        ({"tensor_parallel": 2, "model": "/nowhere"}, "/nowhere"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(settings: dict[str, object], problem: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    with pytest.raises((ConfigError, CheckpointError), match=problem):
        Engine.load(config(folder, **settings), launch=launch_threads)


def test_pages_are_evicted_to_host_memory_and_loaded_on_every_rank(tmp_path: Path) -> None:
    """The pool holds one sequence: the second prompt evicts the first one's pages, which the third prompt loads
    again."""
    folder = make_checkpoint("llama", tmp_path)
    small = {"num_pages": 8, "host_memory_bytes": 1 << 20, "zero_freed_pages": True}
    split = Engine.load(config(folder, tensor_parallel=2, **small), launch=launch_threads)
    alone = Engine.load(config(folder))
    try:
        other = [token + 1 for token in PROMPT]
        for prompt in (PROMPT, other, PROMPT):
            assert generate(split, prompt, GREEDY, SALT) == generate(alone, prompt, GREEDY, SALT)
        assert split.prefix_cache.stats.host_hits > 0
    finally:
        split.close()


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    """Yields two ranks with a pool for one sequence and host memory for one page, and one rank without tiers."""
    folder = make_checkpoint("llama", tmp_path)
    alone = Engine.load(config(folder))
    page_bytes = alone.layout.page_bytes // 2  # of a rank
    (tmp_path / "disk").mkdir()
    tiers = {"host_memory_bytes": page_bytes, "disk_bytes": 64 * page_bytes, "disk_path": str(tmp_path / "disk")}
    small = config(folder, tensor_parallel=2, num_pages=8, zero_freed_pages=True, **tiers)
    split = Engine.load(small, launch=launch_threads)
    try:
        yield split, alone
    finally:
        split.close()


def disk_files(folder: Path) -> set[int]:
    """Returns the file descriptors of unlinked files in `folder`."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/"):
                found.add(int(name))
    return found


def other_ranks_file(split: Engine, folder: Path) -> int:
    tiers = split.prefix_cache._tiers
    assert tiers is not None
    assert isinstance(tiers.disk, DiskTier)
    assert isinstance(tiers.disk._file, AllRanksDiskFile)
    (other,) = disk_files(folder) - {tiers.disk._file._own.file.fileno()}
    return other


def check_same_answers(split: Engine, alone: Engine, *prompts: list[int]) -> None:
    for prompt in prompts:
        assert generate(split, prompt, GREEDY, SALT) == generate(alone, prompt, GREEDY, SALT)


def test_pages_are_evicted_to_disk_and_loaded_on_every_rank(on_disk: tuple[Engine, Engine], tmp_path: Path) -> None:
    split, alone = on_disk
    other = [token + 1 for token in PROMPT]
    check_same_answers(split, alone, PROMPT, other, PROMPT)
    assert split.prefix_cache.stats.disk_hits >= 3
    assert split.prefix_cache.stats.total_disk_pages == 64
    assert list((tmp_path / "disk").iterdir()) == []
    hits = split.prefix_cache.stats.disk_hits
    split.prefix_cache.clear()
    check_same_answers(split, alone, PROMPT, other, PROMPT)
    assert split.prefix_cache.stats.disk_hits >= hits + 3, "slots are not reused after `clear`"


def test_a_page_corrupted_on_one_ranks_disk_is_a_miss_for_all(on_disk: tuple[Engine, Engine], tmp_path: Path) -> None:
    split, alone = on_disk
    fd = other_ranks_file(split, tmp_path / "disk")
    other = [token + 1 for token in PROMPT]
    check_same_answers(split, alone, PROMPT, other)
    size = os.fstat(fd).st_size
    os.pwrite(fd, b"\xff" * size, 0)
    check_same_answers(split, alone, PROMPT)
    assert split.prefix_cache.stats.spoiled_pages >= 1
    assert split.prefix_cache.stats.disk_hits < 3, "pages behind a corrupt one were loaded"


def test_a_full_disk_of_one_rank_only_stops_the_tier_from_growing(
    on_disk: tuple[Engine, Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    split, alone = on_disk
    fd = other_ranks_file(split, tmp_path / "disk")
    write = os.pwrite

    def full(where: int, content: memoryview, offset: int) -> int:
        if where == fd:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(where, content, offset)

    monkeypatch.setattr("engine.cache.disk_tier.os.pwrite", full)
    other = [token + 1 for token in PROMPT]
    check_same_answers(split, alone, PROMPT, other, PROMPT, other)
    assert caplog.text.count("takes no more pages: rank 1: [Errno 28]") == 1
    assert split.prefix_cache.stats.disk_pages == 0


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Yields an engine whose second rank is a process."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("replica"))
    engine = Engine.load(config(folder, tensor_parallel=2, rank_timeout_s=5.0), launch=launch_ranks)
    try:
        engine.warm_up()
        yield engine
    finally:
        engine.close()


@pytest.mark.processes
def test_a_rank_process_computes_the_same_tokens_and_ends_the_replica_when_frozen(replica: Engine) -> None:
    assert replica.ranks is not None
    alone = Engine.load(replica.ranks.config.model_copy(update={"tensor_parallel": 1}))
    assert generate(replica, PROMPT, SEEDED, SALT) == generate(alone, PROMPT, SEEDED, SALT)
    lost: Future[BaseException] = Future()
    replica.when_lost(lost.set_result)
    (pid,) = replica.ranks.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankFailure, match=rf"rank 1 of 2 \(process {pid}\) has been silent for 5 s"):
        generate(replica, PROMPT, GREEDY, SALT)
    assert isinstance(lost.result(timeout=60), RankFailure)


def test_a_pending_call_fails_when_the_replica_is_closed(tmp_path: Path) -> None:
    silent: list[RankChannel] = []
    ranks = RankLeader(config(tmp_path, tensor_parallel=2), lambda control, _: silent.append(dial(control)))
    answers, failure = ranks.start_call("pool", 4), Future[BaseException]()

    def wait() -> None:
        try:
            ranks.wait(answers)
        except RankFailure as error:
            failure.set_result(error)

    threading.Thread(target=wait, daemon=True).start()
    ranks.close()
    assert "the replica is closed" in str(failure.result(timeout=60))
    silent[0].close()


def test_a_step_survives_encoding() -> None:
    sequences = [
        Sequence(RequestId("a"), [5, 6, 7], 3, GREEDY, SALT, [PageId(2)]),
        Sequence(RequestId("b"), [8, 9], 2, GREEDY, SALT, [PageId(3)], _num_prefilled=1),
    ]
    work = [ScheduledSequence(sequences[0], 2), ScheduledSequence(sequences[1], 1)]
    for awaited in (None, np.array([1, 0])):
        step = BroadcastStep(build_host_batch(work, 4), awaited)
        again = decode(BroadcastStep, encode(step))
        assert encode(again) == encode(step)
        for name in step.host.__slots__:
            decoded, original = (getattr(host, name) for host in (again.host, step.host))
            assert np.array_equal(decoded, original), name
            assert type(decoded) is type(original)
        assert (again.awaited_rows is None) == (awaited is None)


@pytest.mark.parametrize("family", ["deepseek_v2", "llama", "mixtral"])
def test_the_memory_plan_equals_what_a_rank_holds(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    settings = {"tensor_parallel": 2, "num_pages": None, "kv_memory_bytes": 70_000, "share_weights": False}
    wanted = config(folder, device="cpu", **settings)
    plan = plan_memory(wanted, HOST)
    split = Engine.load(wanted, launch=launch_threads)
    try:
        held = tensors_of(split.runner._model)
        assert plan.weight_bytes == sum(tensor.numel() * tensor.itemsize for tensor in held.values())
        assert plan.layout == split.layout
        assert (plan.num_pages, plan.kv_bytes) == (split.pool.num_pages, split.kv_pages.nbytes)
        assert plan.num_ranks == 2
    finally:
        split.close()


def test_command_line_flags_set_the_ranks_of_each_role() -> None:
    arguments = make_parser().parse_args(["serve", "--model", str(MODEL), "--prefill-tp", "2", "--decode-tp", "4"])
    deployment = serve_config(arguments)
    found = {role: deployment.worker_config("w", role).engine.tensor_parallel for role in Role}
    assert found == {Role.PREFILL: 2, Role.DECODE: 4}
    assert {name: share.num_cpus for name, share in divide_resources(deployment, 12.0).items()} == {
        "prefill": 2.0,
        "decode": 2.0,
    }
    assert num_cpus_needed(deployment, divide_resources(deployment, 12.0)) == 12.0
    worker = admin_pb2.WorkerStatus(member=admin_pb2.Member(worker_id="decode-0"), state="ready", num_ranks=4)
    assert "4 ranks" in format_status(admin_pb2.StatusResponse(model="m", ready=True, workers=[worker]))
