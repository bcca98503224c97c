"""Tests that replicas of a host share one copy of the weights: the same bits, nothing read twice, no file left
behind."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.generate import generate
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.weights import memory_files, shared_weights, tensor_bytes
from engine.weights.memory_files import open_memory_file
from engine.weights.quantized_weight import Kind
from engine.weights.reader import WeightReader
from engine.weights.shared_weights import linears, places
from penstock.config import EngineConfig
from tests.engine.weights.test_quantized_weights import LAYOUTS
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.serving import GREEDY, SALT


def load(folder: Path, dtype: torch.dtype, *, share: bool, quantization: Kind | None = None) -> Decoder:
    return load_model(
        folder,
        ModelConfig.from_folder(str(folder)),
        dtype=dtype,
        device=torch.device("cpu"),
        max_context=64,
        on_progress=lambda _: None,
        share=share,
        quantization=quantization,
    )


def content(model: Decoder) -> dict[str, bytes]:
    return {place.path: bytes(memoryview(tensor_bytes.content(place.tensor)).cast("B")) for place in places(model)}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32),
        ("llama", torch.bfloat16),
        ("qwen3_moe", torch.float32),
        ("deepseek_v2", torch.bfloat16),
        ("phi3", torch.bfloat16),
        ("olmo2", torch.bfloat16),
        ("gemma3_text", torch.bfloat16),
        ("gpt_oss", torch.bfloat16),
        ("glm4_moe", torch.bfloat16),
    ],
    ids=str,
)
def test_the_second_replica_gets_the_same_bits_and_reads_nothing(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows of 64 and 32: some bf16 weights fill tiles, and others do not.
    folder = make_checkpoint(family, tmp_path, attention_bias=family == "llama")
    alone = load(folder, dtype, share=False)
    first = load(folder, dtype, share=True)
    devices: set[str] = set()
    read = WeightReader.read

    def note(self: WeightReader, name: str) -> torch.Tensor:
        tensor = read(self, name)
        devices.add(tensor.device.type)
        return tensor

    monkeypatch.setattr(WeightReader, "read", note)
    second = load(folder, dtype, share=True)
    assert devices == {"meta"}
    assert content(alone) == content(first) == content(second)
    assert [linear.layout for _, linear in linears(alone)] == [linear.layout for _, linear in linears(second)]
    assert not any(place.tensor.is_meta for place in places(second))
    for (_, ours), (_, theirs) in zip(linears(alone), linears(second), strict=True):
        if ours._packed is not None:  # equal bytes alone do not prove that it was reassembled correctly
            x_TI = torch.randn(3, ours._packed.shape[1], dtype=ours._packed.dtype)
            assert torch.equal(ours(x_TI), theirs(x_TI))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("int8", "bfloat16"),
        ("int4", "bfloat16"),
        ("awq", "bfloat16"),
        ("gptq act-order", "bfloat16"),
        ("fp8 blocks", "bfloat16"),
        ("packed 8 bits", "float32"),
    ],
)
def test_quantized_weights_are_read_and_packed_once(
    layout: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replica reads and packs; the second maps the first one's file and has the same layouts, bits and
    tokens."""
    folder = make_checkpoint("llama", tmp_path / "whole", hidden_size=64, intermediate_size=128, head_dim=32)
    changes = {"quantization": layout}
    if layout in LAYOUTS:
        LAYOUTS[layout].convert(folder, tmp_path / "quantized", tmp_path / "plain")
        folder, changes = tmp_path / "quantized", {}

    def replica(*, share: bool) -> Engine:
        settings = {"model": str(folder), "num_pages": 16, "num_threads": 1, "dtype": dtype, "share_weights": share}
        return Engine.load(EngineConfig.model_validate({**settings, **changes}))

    alone, first = replica(share=False), replica(share=True)
    monkeypatch.setattr(WeightReader, "_file_of", lambda self, name: pytest.fail(f"{name} is read again"))
    second = replica(share=True)
    models = [engine.runner._model for engine in (alone, first, second)]
    assert content(models[0]) == content(models[1]) == content(models[2])
    layouts = [[linear.layout for _, linear in linears(model)] for model in models]
    assert layouts[0] == layouts[1] == layouts[2]
    held = [place.tensor for place in places(models[2]) if not place.tensor.is_mkldnn]
    assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == 1  # one file
    tokens = [generate(engine, [5, 9, 3, 77], GREEDY, SALT) for engine in (alone, first, second)]
    assert tokens[0] == tokens[1] == tokens[2]


def test_differently_quantized_weights_are_not_shared(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path, hidden_size=64)
    kinds: tuple[Kind | None, ...] = (None, "int8")
    held = [load(folder, torch.bfloat16, share=True, quantization=kind) for kind in kinds]
    for model, kind in zip(held, kinds, strict=True):
        for share in (False, True):
            assert content(model) == content(load(folder, torch.bfloat16, share=share, quantization=kind))


@pytest.mark.processes
def test_memory_is_freed_with_its_last_user(tmp_path: Path) -> None:
    """This holds however the last user ends; a file that a dead process left half filled is never used."""
    lock = tmp_path / "lock"
    lock.touch()
    label = f"penstock-test-{os.getpid()}"
    code = f"""
import sys
from pathlib import Path
from engine.weights.memory_files import open_memory_file
file = open_memory_file({label!r}, Path({str(lock)!r}))
import os
os.ftruncate(file.fd, 4096)
print(file.is_mine, flush=True)
if sys.stdin.readline() == "finish\\n":
    file.finish()
    print("done", flush=True)
    sys.stdin.readline()
"""

    def child() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
        )

    first = child()
    assert first.stdout
    assert first.stdout.readline() == "True\n"
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(_mine(label, lock)))
    waiting.start()
    first.kill()  # while the first fills the file
    first.wait()
    waiting.join(60)
    assert found == [True]
    second = child()
    assert second.stdin
    assert second.stdout
    assert second.stdout.readline() == "True\n"  # the thread's descriptor is closed
    second.stdin.write("finish\n")
    second.stdin.flush()
    assert second.stdout.readline() == "done\n"
    assert not _mine(label, lock)
    second.kill()
    second.wait()
    assert _mine(label, lock)


def _mine(label: str, lock: Path) -> bool:
    file = open_memory_file(label, lock)
    assert file is not None
    if not file.is_mine:  # no process can change what others compute with
        writable = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR)
        with pytest.raises(PermissionError):
            os.pwrite(writable, b"x", 0)
        os.close(writable)
    file.close()
    return file.is_mine


def test_a_checkpoint_rewritten_in_place_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds if the revision samples only unchanged bytes."""
    monkeypatch.setattr("engine.weights.checkpoint._SAMPLES", 1)
    folder = make_checkpoint("llama", tmp_path)
    before = load(folder, torch.float32, share=True)
    [file] = folder.glob("*.safetensors")
    with file.open("r+b") as stream:
        stream.seek(-64, os.SEEK_END)
        stream.write(bytes(64))
    after = load(folder, torch.float32, share=True)
    assert content(after) == content(load(folder, torch.float32, share=False)) != content(before)


def test_a_replica_keeps_its_own_weights_if_sharing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("llama", tmp_path)
    num_left, write = 5, os.pwrite

    def write_some(fd: int, data: memoryview, offset: int) -> int:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise OSError(errno.ENOSPC, "no space left")
        return write(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_some)
        first = load(folder, torch.bfloat16, share=True)
    assert num_left < 0
    second = load(folder, torch.bfloat16, share=True)
    assert content(first) == content(second) == content(load(folder, torch.bfloat16, share=False))


def test_a_file_finished_during_the_search_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, label = tmp_path / "lock", f"penstock-test-looked-at-{os.getpid()}"
    lock.touch()
    first = open_memory_file(label, lock)
    assert first is not None
    os.ftruncate(first.fd, 4096)
    try_lock = memory_files._try_lock

    def finish_first(fd: int) -> bool:
        if first.is_mine:
            first.finish()
            first.is_mine = False
        return try_lock(fd)

    monkeypatch.setattr(memory_files, "_try_lock", finish_first)
    assert not _mine(label, lock)
    first.close()


def test_the_wait_for_a_held_lock_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setattr(memory_files, "SEARCH_TIMEOUT_S", 0.01)
    with lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert open_memory_file(f"penstock-test-locked-{os.getpid()}", lock) is None


def test_a_file_with_another_layout_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_weights, "_digest", lambda key: f"same-for-all-{os.getpid()}")
    folder = make_checkpoint("llama", tmp_path / "folder")
    other = make_checkpoint("llama", tmp_path / "other", num_hidden_layers=3)
    first = load(folder, torch.float32, share=True)
    second = load(other, torch.float32, share=True)
    assert content(second) == content(load(other, torch.float32, share=False))
    assert len(content(first)) < len(content(second))
