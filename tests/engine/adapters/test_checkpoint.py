"""Tests what an adapter's folder must hold, and that everything else is refused by field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.adapters.checkpoint import read_adapter
from engine.adapters.products import adapted_products
from engine.adapters.slot_store import AdapterStore
from engine.engine import Engine
from engine.memory.device_memory import find_device
from engine.memory.plan import plan_memory
from engine.models.config import ModelConfig
from engine.parallel.shard import Shard
from penstock.config import EngineConfig
from penstock.errors import CheckpointError, ConfigError, InvalidInput
from penstock.kv.adapter_files import CONFIG_FILE, WEIGHTS_FILE, AdapterRef, check_adapter_name, read_adapter_ref
from tests.support.engine.adapters import make_adapter
from tests.support.engine.checkpoints import make_checkpoint

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model"))


def read(folder: Path, ref: AdapterRef, max_rank: int = 8) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return read_adapter(ref, adapted_products(ModelConfig.from_folder(str(folder))), max_rank)


def test_the_scale_is_multiplied_into_b(folder: Path, tmp_path: Path) -> None:
    module = MODULE.removeprefix("base_model.model.")
    for settings, scale in (({}, 8 / 4), ({"use_rslora": True}, 8 / 2), ({"lora_alpha": 3}, 3 / 4)):
        ref = make_adapter(folder, tmp_path / "adapter", config=settings)
        stored = load_file(Path(ref.path) / WEIGHTS_FILE)
        down, up = read(folder, ref)[module]
        assert torch.equal(down, stored[f"{MODULE}.lora_A.weight"])
        assert torch.equal(up, stored[f"{MODULE}.lora_B.weight"] * scale)


REFUSED_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora = True is not supported; train the adapter without it"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head'] is not supported"),
    "bias": ({"bias": "all"}, "bias = 'all' is not supported"),
    "lora_bias": ({"lora_bias": True}, "lora_bias = True is not supported"),
    "rank_pattern": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern = {'q_proj': 2} is not supported"),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern = {'q_proj': 2} is not supported"),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, "fan_in_fan_out = True is not supported"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' changes the model's own weights"),
    "ia3": ({"peft_type": "IA3"}, "peft_type = 'IA3'; only LORA is served"),
    "rank": ({"r": 9}, "r = 9, but slots hold rank 8; raise engine.max_adapter_rank"),
    "no rank": ({"r": 0}, "r = 0; give a rank of 1 or more"),
    "alpha": ({"lora_alpha": "much"}, "lora_alpha = 'much'; give a number"),
}


@pytest.mark.parametrize("case", REFUSED_SETTINGS)
def test_an_unsupported_setting_is_refused(case: str, folder: Path, tmp_path: Path) -> None:
    settings, message = REFUSED_SETTINGS[case]
    ref = make_adapter(folder, tmp_path / "mine", config=settings)
    with pytest.raises(CheckpointError, match=re.escape(f"adapter 'mine' ({ref.path}): {message}")):
        read(folder, ref)


def _rename(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def _add(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.ones(shape)}


REFUSED_TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "magnitude": (_add(f"{MODULE}.lora_magnitude_vector", 4), "belongs to DoRA, which is not supported"),
    "head": (_add("base_model.model.lm_head.lora_A.weight", 4, 32), "adapts the embedding or the head"),
    "embedding": (
        _add("base_model.model.model.embed_tokens.lora_embedding_A", 4, 9),
        "adapts the embedding or the head",
    ),
    "expert": (
        _add("base_model.model.model.layers.0.mlp.experts.3.down_proj.lora_A.weight", 4, 9),
        "adapts an expert, which is not supported; adapt only the attention",
    ),
    "no such layer": (_rename("layers.1.", "layers.7."), "adapts nothing in this model; give an adapter of this model"),
    "shape": (
        _add(f"{MODULE}.lora_A.weight", 4, 31),
        "[4, 31], expected floats [4, 32]; give an adapter of this model",
    ),
    "one side": (lambda tensors: {f"{MODULE}.lora_A.weight": torch.ones(4, 32)}, "has only lora_A"),
    "nothing": (lambda tensors: {}, "holds no tensors"),
    "nan": (
        lambda tensors: tensors | {f"{MODULE}.lora_A.weight": torch.full((4, 32), float("nan"))},
        "holds values that are not finite",
    ),
    "integers": (
        lambda tensors: tensors | {f"{MODULE}.lora_A.weight": torch.ones((4, 32), dtype=torch.int32)},
        "is torch.int32 [4, 32], expected floats",
    ),
}


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_an_unsupported_tensor_is_refused(case: str, folder: Path, tmp_path: Path) -> None:
    change, message = REFUSED_TENSORS[case]
    path = tmp_path / "mine"
    make_adapter(folder, path)
    save_file(change(load_file(path / WEIGHTS_FILE)), path / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(folder, read_adapter_ref("mine", str(path)))


def test_damaged_and_missing_files_are_refused_by_path(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    make_adapter(folder, path)
    content = (path / WEIGHTS_FILE).read_bytes()
    for damaged in (content[:-50], content[50:], b"", b"\xff" * 100):
        (path / WEIGHTS_FILE).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is damaged .*; fetch the adapter again"):
            read(folder, read_adapter_ref("mine", str(path)))
    (path / WEIGHTS_FILE).write_bytes(content + b"\0" * (1 << 21))
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors has more than \d+ bytes, the most that"):
        read(folder, read_adapter_ref("mine", str(path)))
    (path / CONFIG_FILE).write_text("{")
    (path / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is not valid JSON"):
        read(folder, read_adapter_ref("mine", str(path)))
    (path / CONFIG_FILE).unlink()
    with pytest.raises(CheckpointError, match="give the folder of a PEFT adapter"):
        read_adapter_ref("mine", str(path))


def test_files_that_have_changed_are_refused(folder: Path, tmp_path: Path) -> None:
    old = make_adapter(folder, tmp_path / "mine", seed=1)
    new = make_adapter(folder, tmp_path / "mine", seed=2)
    assert old.revision != new.revision
    read(folder, new)
    with pytest.raises(CheckpointError, match=f"have revision {new.revision}, but revision {old.revision} was"):
        read(folder, old)


def test_the_revision_depends_on_both_files(folder: Path, tmp_path: Path) -> None:
    first = make_adapter(folder, tmp_path / "a")
    same = make_adapter(folder, tmp_path / "b")
    other = make_adapter(folder, tmp_path / "c", alpha=9)
    assert first.revision == same.revision != other.revision


@pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 129, "a\n"])
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="give 1 to 128 letters, digits"):
        check_adapter_name(name, "model")


def test_the_name_of_the_model_is_refused() -> None:
    check_adapter_name("org/sql-v2", "model")
    with pytest.raises(InvalidInput, match="like the model itself; give another name"):
        check_adapter_name("model", "model")


def test_a_model_with_latent_attention_refuses_adapters(tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek_v2", tmp_path)
    config = EngineConfig(model=str(folder), num_pages=8, max_adapters=1)
    with pytest.raises(ConfigError, match=r"latent attention \(DeepSeek\) take no adapters"):
        Engine.load(config)


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "glm4_moe", "llama4_text"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_memory_plan_counts_the_slots(family: str, num_ranks: int, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    settings = {"model": str(folder), "dtype": "bfloat16", "num_pages": 8, "tensor_parallel": num_ranks}
    config = EngineConfig.model_validate(settings | {"max_adapters": 3, "max_adapter_rank": 5})
    store = AdapterStore(
        ModelConfig.from_folder(str(folder)), 4, 5, torch.bfloat16, torch.device("cpu"), Shard(0, num_ranks)
    )
    assert plan_memory(config, find_device("cpu:64GiB")).adapter_bytes == store.num_bytes > 0
    assert plan_memory(config.model_copy(update={"max_adapters": 0}), find_device("cpu:64GiB")).adapter_bytes == 0


@pytest.mark.parametrize("family", ["llama", "phi3", "glm4_moe"])
def test_the_ranks_parts_add_up_to_the_whole_adapter(family: str, tmp_path: Path) -> None:
    """Two ranks, each with its part of inputs and outputs, together add what one process adds."""
    folder = make_checkpoint(family, tmp_path / "model", num_key_value_heads=2)
    model = ModelConfig.from_folder(str(folder))
    ref = make_adapter(folder, tmp_path / "adapter", rank=3)
    whole = AdapterStore(model, 2, 3, torch.float32, torch.device("cpu"))
    parts = [AdapterStore(model, 2, 3, torch.float32, torch.device("cpu"), Shard(rank, 2)) for rank in range(2)]
    for store in (whole, *parts):
        store.write(1, read_adapter(ref, store.products, 3))
    for product, weights, *own in zip(whole.products, whole._weights, *(part._weights for part in parts), strict=True):
        assert weights.up_SRO.abs().sum() > 0
        for part, end in enumerate(weights.part_ends):
            begin = weights.part_ends[part - 1] if part else 0
            down = weights.down_SQI[1, part * 3 : part * 3 + 3]
            product_OI = weights.up_SRO[1, :, begin:end].T @ down
            pieces = []
            for each in own:
                first = each.part_ends[part - 1] if part else 0
                up = each.up_SRO[1, :, first : each.part_ends[part]]
                pieces.append(up.T @ each.down_SQI[1, part * 3 : part * 3 + 3])
            is_narrowing = product.name in ("out", "down")
            if is_narrowing or len(product.parts) > 1:
                torch.testing.assert_close(torch.cat(pieces, 1 if is_narrowing else 0), product_OI)
            else:  # several products are stored as one, and each rank has a run of each
                assert torch.cat(pieces).shape == product_OI.shape
                wanted, found = product_OI.sum(dim=1).sort().values, torch.cat(pieces).sum(dim=1).sort().values
                torch.testing.assert_close(found, wanted)


def test_an_unloaded_adapter_leaves_nothing_in_its_slot(folder: Path, tmp_path: Path) -> None:
    model = ModelConfig.from_folder(str(folder))
    store = AdapterStore(model, 2, 8, torch.float32, torch.device("cpu"))
    large = make_adapter(folder, tmp_path / "large", rank=8)
    small = make_adapter(folder, tmp_path / "small", rank=2, modules=("q_proj",))
    fresh = AdapterStore(model, 2, 8, torch.float32, torch.device("cpu"))
    for ref in (large, small):
        store.write(1, read_adapter(ref, store.products, 8))
    fresh.write(1, read_adapter(small, fresh.products, 8))
    for found, wanted in zip(store._weights, fresh._weights, strict=True):
        assert torch.equal(found.down_SQI, wanted.down_SQI)
        assert torch.equal(found.up_SRO, wanted.up_SRO)
        assert torch.equal(found.ranks_SP, wanted.ranks_SP)
    assert json.loads((Path(large.path) / CONFIG_FILE).read_text())["r"] == 8
