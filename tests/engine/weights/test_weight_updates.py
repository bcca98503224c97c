"""Tests updates of weights while an engine lives: it computes what a fresh engine does and keeps no page of the old
weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from engine.generate import generate
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loader import load_model, open_weights
from engine.parallel.collectives import SINGLE_RANK
from engine.weights import tensor_bytes
from engine.weights.in_place import copy_weights
from engine.weights.shared_weights import places
from penstock.config import EngineConfig, LoadedWeightsConfig
from penstock.errors import CheckpointError, InternalError
from penstock.kv.weights_version import base_revision, weights_version
from tests.engine.parallel.test_tensor_parallel import launch_threads
from tests.support.engine.checkpoints import make_checkpoint, perturb_weights
from tests.support.serving import GREEDY, SALT

PROMPT = list(range(3, 60))
CPU = torch.device("cpu")


def engine(folder: Path, weights: LoadedWeightsConfig | None = None, **settings: object) -> Engine:
    return Engine.load(
        EngineConfig.model_validate(
            {"model": str(folder), "num_pages": 32, "num_threads": 1, "weights": weights, **settings}
        )
    )


def tokens(of: Engine) -> list[int]:
    return generate(of, PROMPT, GREEDY, SALT)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_updated_engine_computes_what_a_fresh_one_does(tmp_path: Path, dtype: str) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", hidden_size=64)
    serving = engine(folder, dtype=dtype)
    seen = [tokens(serving)]
    for version in (1, 2):
        weights = perturb_weights(folder, tmp_path / f"v{version}", version)
        serving.prepare_weights(weights)
        assert tokens(serving) == seen[-1], "the old weights are in force until they are replaced"
        serving.apply_weights()
        seen.append(tokens(serving))
        fresh = engine(folder, weights, dtype=dtype)
        assert tokens(fresh) == seen[-1]
        assert fresh.model_layout == serving.model_layout
        assert serving.weights_version == version == weights_version(serving.layout.model_revision)
        fresh.close()
    assert len({tuple(each) for each in seen}) == 3, "each version generates something else"
    serving.close()


def test_no_page_of_the_old_weights_remains(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model")
    serving = engine(folder, host_memory_bytes=1 << 20)
    tokens(serving)
    assert serving.prefix_cache.num_cached > 0
    before = serving.model_layout
    serving.prepare_weights(perturb_weights(folder, tmp_path / "v1", 1))
    serving.apply_weights()
    assert serving.prefix_cache.num_cached == 0
    assert serving.pool.num_free == serving.pool.num_pages
    serving.prefix_cache.check_integrity()
    assert serving.model_layout.kv_digest() != before.kv_digest(), "no page moves between two versions"
    assert base_revision(serving.layout.model_revision) == before.model_revision
    serving.close()


def test_every_rank_of_a_split_model_is_updated_or_none(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model")
    weights = perturb_weights(folder, tmp_path / "v1", 1)
    settings = EngineConfig(model=str(folder), num_pages=32, num_threads=1, tensor_parallel=2)
    split, fresh = Engine.load(settings, launch=launch_threads), engine(folder, weights)
    try:
        before = tokens(split)
        with pytest.raises(CheckpointError, match="version 2 has"):
            split.prepare_weights(weights.model_copy(update={"version": 2, "digest": "0"}))
        assert tokens(split) == before
        split.prepare_weights(weights)
        split.apply_weights()
        assert tokens(split) == tokens(fresh) != before
        assert split.model_layout == fresh.model_layout
    finally:
        split.close()
        fresh.close()


@pytest.mark.parametrize("change", ["name", "shape", "missing", "other file", "cut short"])
def test_weights_that_do_not_fit_change_nothing(tmp_path: Path, change: str) -> None:
    folder = make_checkpoint("llama", tmp_path / "model")
    weights = perturb_weights(folder, tmp_path / "v1", 1)
    file = tmp_path / "v1" / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight"
    if change == "name":
        stored["model.layers.0.mlp.other.weight"] = stored[name].clone()
    elif change == "shape":
        stored[name] = stored[name][:, 1:].contiguous()
    elif change == "missing":
        del stored[name]
    elif change == "other file":
        stored[name] = stored[name] + 1
    save_file(stored, file)
    if change == "cut short":
        file.write_bytes(file.read_bytes()[:-100])
    serving = engine(folder)
    before = tokens(serving)
    expected = {"other file": "version 1 has", "cut short": "is cut short"}.get(change, "model.layers.0.mlp")
    with pytest.raises(CheckpointError, match=expected):
        serving.prepare_weights(weights)
    assert tokens(serving) == before
    assert serving.weights_version == 0
    serving.close()


def test_weights_of_a_differently_configured_model_are_refused_by_setting(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model")
    weights = perturb_weights(folder, tmp_path / "v1", 1)
    settings = json.loads((folder / "config.json").read_text())
    (tmp_path / "v1" / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    serving = engine(folder)
    serving.prepare_weights(weights)
    (tmp_path / "v1" / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 0.5}))
    with pytest.raises(
        CheckpointError, match=r"rms_norm_eps is 0.5, and .* in the served model; give weights of the same"
    ):
        serving.prepare_weights(weights)
    serving.close()


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ("llama", torch.float32, None),
        ("llama", torch.bfloat16, None),
        ("llama", torch.bfloat16, "int8"),
        ("gemma2", torch.bfloat16, None),
        ("qwen3_moe", torch.float32, None),
        ("deepseek_v2", torch.bfloat16, None),
    ],
)
def test_weights_replaced_in_place_equal_those_of_a_fresh_model(
    tmp_path: Path, family: str, dtype: torch.dtype, quantization: str | None
) -> None:
    """A GPU is updated this way: addresses stay, so that captured graphs compute with the new weights."""
    folder = make_checkpoint(family, tmp_path / "model")
    weights = perturb_weights(folder, tmp_path / "v1", 1)
    config = ModelConfig.from_folder(str(folder))

    def load(of: LoadedWeightsConfig | None) -> Decoder:
        return load_model(
            folder, config, weights=of, dtype=dtype, device=CPU, max_context=64, on_progress=lambda _: None,
            quantization=quantization,  # type: ignore[arg-type]
        )  # fmt: skip

    model, fresh = load(None), load(weights)
    addresses = [_address(place.tensor) for place in places(model)]
    with open_weights(Path(weights.path), config, dtype, CPU, SINGLE_RANK, quantization) as reader:  # type: ignore[arg-type]
        model.reload(reader)
    assert [_address(place.tensor) for place in places(model)] == addresses
    assert _content(model) == _content(fresh)


def test_weights_of_another_shape_are_not_copied_in_place(tmp_path: Path) -> None:
    wide = make_checkpoint("llama", tmp_path / "wide")
    narrow = make_checkpoint("llama", tmp_path / "narrow", intermediate_size=48)
    models = [
        load_model(folder, ModelConfig.from_folder(str(folder)), dtype=torch.float32, device=CPU, max_context=64,
                   on_progress=lambda _: None)
        for folder in (wide, narrow)
    ]  # fmt: skip
    before = _content(models[0])
    with pytest.raises(InternalError, match="laid out differently"):
        copy_weights(models[0], models[1])
    assert _content(models[0]) == before


def _address(tensor: torch.Tensor) -> int:
    return int(torch.ops.mkldnn.data_ptr(tensor)) if tensor.is_mkldnn else tensor.data_ptr()


def _content(model: Decoder) -> dict[str, bytes]:
    return {place.path: bytes(memoryview(tensor_bytes.content(place.tensor)).cast("B")) for place in places(model)}
