"""Tests engines that receive their weights from a trainer in another thread: they compute what a fresh engine does that
has read the same weights from files, in every layout, and keep their weights if anything goes wrong."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from engine.engine import Engine
from engine.models.config import ModelConfig
from engine.weights.broadcast import staged
from engine.weights.broadcast.receive import check_manifest
from engine.weights.broadcast.staged import NewFolder
from engine.weights.checkpoint import SINGLE_FILE, list_weight_files, weights_digest
from penstock.client.broadcast.group import TRAINER, BroadcastGroup, TrainerStore
from penstock.client.broadcast.manifest import BroadcastMember, WeightsBroadcast, WeightsManifest, digest_of_bytes
from penstock.client.broadcast.trainer import make_manifest, send_weights
from penstock.config import EngineConfig, LoadedWeightsConfig
from penstock.errors import CheckpointError, InvalidInput, PenstockError, Unavailable
from tests.engine.parallel.test_tensor_parallel import launch_threads
from tests.engine.weights.test_quantized_weights import LAYOUTS
from tests.engine.weights.test_weight_updates import engine, tokens
from tests.support.engine.checkpoints import make_checkpoint, perturb_weights

TIMEOUT_S = 30.0
NAME = "model.layers.0.mlp.down_proj.weight"

Tensors = Mapping[str, torch.Tensor]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in list_weight_files(folder) for name, each in load_file(file).items()}


def broadcast_to(
    engines: list[Engine],
    tensors: Tensors,
    folder: Path,
    *,
    announced: WeightsManifest | None = None,
    send: Callable[[BroadcastGroup, Tensors, WeightsManifest], None] = send_weights,
) -> list[Exception | None]:
    """Broadcasts to all engines, of which the first writes the folder; returns the error of each and of the trainer.

    The update names the manifest `announced`, by default that of the tensors.
    """
    manifest = make_manifest(tensors)
    encoded = (announced or manifest).encode()
    store = TrainerStore("127.0.0.1", TIMEOUT_S)
    key, digest = secrets.token_hex(16), digest_of_bytes(encoded)
    broadcast = WeightsBroadcast(store.address, key, len(encoded), digest, TIMEOUT_S, 2 * TIMEOUT_S)
    num_ranks = len(engines) + 1

    def receive(rank: int, receiver: Engine) -> Exception | None:
        try:
            receiver.receive_weights(broadcast, BroadcastMember(rank, num_ranks, str(folder) if rank == 1 else ""))
        except (PenstockError, MemoryError) as error:
            return error
        return None

    def train() -> PenstockError | None:
        try:
            with BroadcastGroup(broadcast, TRAINER, num_ranks, store.store) as group:
                send(group, tensors, manifest)
        except PenstockError as error:
            return error
        return None

    with ThreadPoolExecutor() as threads:
        receiving = [threads.submit(receive, rank, each) for rank, each in enumerate(engines, 1)]
        training = threads.submit(train)
        return [each.result(2 * TIMEOUT_S) for each in (*receiving, training)]


def named(folder: Path) -> LoadedWeightsConfig:
    return LoadedWeightsConfig(version=1, path=str(folder), digest=weights_digest(folder))


@pytest.mark.parametrize(
    ("family", "layout", "settings"),
    [
        ("llama", None, {"dtype": "float32"}),
        ("llama", None, {"dtype": "bfloat16", "quantization": "int8"}),
        ("llama", None, {"dtype": "bfloat16", "share_weights": True}),
        ("llama", "gptq 4 bits", {"dtype": "bfloat16"}),
        ("llama", "int8 channel", {"dtype": "bfloat16"}),
        ("qwen3_moe", None, {"dtype": "float32"}),
    ],
)
def test_received_weights_compute_what_those_in_files_do(
    tmp_path: Path, family: str, layout: str | None, settings: dict[str, object]
) -> None:
    served = make_checkpoint(family, tmp_path / "model", hidden_size=64, intermediate_size=96)
    if layout is not None:
        LAYOUTS[layout].convert(served, tmp_path / "quantized", tmp_path / "plain")
        served = tmp_path / "quantized"
    trained = perturb_weights(served, tmp_path / "trained", 1)
    received, fresh = engine(served, **settings), engine(served, trained, **settings)
    before = tokens(received)
    assert broadcast_to([received], tensors_of(Path(trained.path)), tmp_path / "saved") == [None, None]
    received.prepare_weights(named(tmp_path / "saved"))
    assert tokens(received) == before, "the old weights are in force until they are replaced"
    received.apply_weights()
    assert tokens(received) == tokens(fresh) != before
    received.close()
    fresh.close()


def test_every_rank_of_a_split_model_reads_its_part_of_what_was_received(tmp_path: Path) -> None:
    served = make_checkpoint("llama", tmp_path / "model")
    trained = perturb_weights(served, tmp_path / "trained", 1)
    settings = EngineConfig(model=str(served), num_pages=32, num_threads=1, tensor_parallel=2)
    split, fresh = Engine.load(settings, launch=launch_threads), engine(served, trained)
    try:
        assert broadcast_to([split], tensors_of(Path(trained.path)), tmp_path / "saved") == [None, None]
        split.prepare_weights(named(tmp_path / "saved"))
        split.apply_weights()
        assert tokens(split) == tokens(fresh)
    finally:
        split.close()
        fresh.close()


def test_experts_of_a_transformers_model_are_sent_as_its_checkpoint_stores_them(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "model")
    model, served = AutoModelForCausalLM.from_pretrained(folder), ModelConfig.from_folder(str(folder))
    check_manifest(make_manifest(revert_weight_conversion(model, model.state_dict())), served)
    with pytest.raises(CheckpointError, match=r"the broadcast: tensor model.layers.*experts.* is missing"):
        check_manifest(make_manifest(model.state_dict()), served)


def test_weights_are_read_from_memory_but_the_folder_must_hold_them(tmp_path: Path) -> None:
    served = make_checkpoint("llama", tmp_path / "model")
    trained = perturb_weights(served, tmp_path / "trained", 1)
    receiver = engine(served)
    assert broadcast_to([receiver], tensors_of(Path(trained.path)), tmp_path / "saved") == [None, None]
    wanted = named(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"saved holds neither model.safetensors nor"):
        receiver.prepare_weights(wanted)
    (tmp_path / "elsewhere").rename(tmp_path / "saved")
    receiver.prepare_weights(wanted)
    receiver.close()


def leave_midway(group: BroadcastGroup, tensors: Tensors, manifest: WeightsManifest) -> None:
    class Leaving(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            if name == manifest.tensors[3].name:
                raise Unavailable("the trainer leaves")
            return super().__getitem__(name)

    send_weights(group, Leaving(tensors), manifest)


def send_others(group: BroadcastGroup, tensors: Tensors, manifest: WeightsManifest) -> None:
    send_weights(group, {name: each + 1 for name, each in tensors.items()}, manifest)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("missing", rf"the broadcast: tensor {NAME} \(1 in all\) is missing"),
        ("shape", rf"the broadcast: tensor {NAME} has shape \[.*\], config.json asks for"),
        ("name", "the broadcast: tensor other of shape .* is not part of the model"),
        ("dtype", rf"the broadcast: tensor {NAME} is stored as I32; give unquantized weights"),
        ("other manifest", "manifest: is not the one that the update names"),
        ("other bytes", "arrived with other bytes than were sent"),
        ("trainer", "the broadcast broke off: "),
        ("memory", "MiB of host memory are free; give the machine more"),
        ("folder", "saved cannot be written: .*; give a new folder"),
    ],
)
def test_a_broadcast_that_fails_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, problem: str
) -> None:
    served = make_checkpoint("llama", tmp_path / "model")
    trained = perturb_weights(served, tmp_path / "trained", 1)
    sent = tensors_of(Path(trained.path))
    announced, send, into = None, send_weights, tmp_path / "new"
    if fault == "missing":
        del sent[NAME]
    elif fault == "shape":
        sent[NAME] = sent[NAME][:, 1:]
    elif fault == "name":
        sent["other"] = torch.ones(3)
    elif fault == "dtype":
        sent[NAME] = sent[NAME].to(torch.int32)
    elif fault == "other manifest":
        announced = WeightsManifest(make_manifest({**sent, NAME: sent[NAME] + 1}).tensors)
    elif fault == "other bytes":
        send = send_others
    elif fault == "trainer":
        send = leave_midway
    elif fault == "memory":
        monkeypatch.setattr(staged, "available_bytes", lambda: 1 << 10)
    elif fault == "folder":
        into.write_text("a file")
    engines = [engine(served), engine(served)]
    before = tokens(engines[0])
    errors = broadcast_to(engines, sent, into / "saved", announced=announced, send=send)
    assert all(isinstance(each, InvalidInput | CheckpointError | Unavailable) for each in errors), errors
    assert any(each is not None and re.search(problem, str(each)) for each in errors[:-1]), errors
    assert not (into / "saved").exists()
    assert not into.is_dir() or list(into.iterdir()) == []
    for each in engines:
        assert tokens(each) == before
        each.close()


def test_one_worker_that_cannot_use_the_weights_ends_the_broadcast_for_all(tmp_path: Path) -> None:
    served = make_checkpoint("llama", tmp_path / "model")
    other = make_checkpoint("llama", tmp_path / "other", intermediate_size=48)
    trained = perturb_weights(served, tmp_path / "trained", 1)
    engines = [engine(served), engine(other)]
    errors = broadcast_to(engines, tensors_of(Path(trained.path)), tmp_path / "saved")
    assert [each and str(each).partition(":")[0] for each in errors] == [
        "another worker cannot use the broadcast",
        "the broadcast",
        "a worker refuses the weights",
    ]
    assert not (tmp_path / "saved").exists()
    for each in engines:
        each.close()


def test_an_unforeseen_error_of_one_worker_reaches_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = make_checkpoint("llama", tmp_path / "model")
    trained = perturb_weights(served, tmp_path / "trained", 1)
    engines = [engine(served), engine(served)]

    def fail(*_: object) -> None:
        raise MemoryError("no room for the folder's buffers")

    monkeypatch.setattr("engine.weights.broadcast.receive.NewFolder", fail)  # only the first one writes a folder
    errors = broadcast_to(engines, tensors_of(Path(trained.path)), tmp_path / "saved")
    assert list(map(str, errors)) == [
        "no room for the folder's buffers",
        "another worker cannot use the broadcast",
        "a worker refuses the weights",
    ]
    for each in engines:
        each.close()


def test_the_next_broadcast_removes_what_killed_writers_have_left_and_nothing_else(tmp_path: Path) -> None:
    served = make_checkpoint("llama", tmp_path / "model")
    trained = perturb_weights(served, tmp_path / "trained", 1)
    steps = tmp_path / "steps"
    kept = [f".notes.{'0' * 32}/readme", f".1.{'0' * 31}/{SINGLE_FILE}", f"1.{'0' * 32}/{SINGLE_FILE}"]
    for name in (*kept, f".1.{'0' * 32}/{SINGLE_FILE}"):
        (steps / name).parent.mkdir(parents=True)
        (steps / name).write_text("bytes")
    written = NewFolder(steps / "2", 1, "2" * 32)
    receiver = engine(served)
    assert broadcast_to([receiver], tensors_of(Path(trained.path)), steps / "3") == [None, None]
    found = sorted(str(each.relative_to(steps)) for each in steps.glob("*/*"))
    assert found == sorted([*kept, f".2.{'2' * 32}/{SINGLE_FILE}", f"3/{SINGLE_FILE}"])
    written.discard()
    receiver.close()
