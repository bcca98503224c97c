"""Tests experts stored in MXFP4, as gpt-oss publishes them: their values, and the tokens of the same values stored
plain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.engine.quality import compare, logits
from engine.engine import Engine
from engine.generate import generate
from engine.layers.stacked_experts import unpack_mxfp4
from engine.memory.plan import plan_memory
from engine.models.config import ModelConfig
from penstock.config import EngineConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.types import SamplingParams
from tests.engine.memory.test_memory_plan import HOST, tensors_of
from tests.engine.parallel.test_tensor_parallel import launch_threads
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.engine.isas import needs_native

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = [(7 * place) % 250 + 2 for place in range(37)]


def test_codes_are_decoded_as_the_format_defines() -> None:
    """Covers every code, with the lower half of a byte first, and the smallest and largest exponents of bf16."""
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes[:, None] | (codes.flip(0)[:, None] << 4)).repeat(1, 16)[:, None]
    wanted = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    for exponent in (1, 120, 127, 131, 250):
        values = unpack_mxfp4(blocks, torch.full((16, 1), exponent, dtype=torch.uint8)).dequantize(torch.bfloat16)
        scale = 2.0 ** (exponent - 127)
        assert values[:, 0].tolist() == [value * scale for value in wanted]
        assert values[:, 31].tolist() == [value * scale for value in reversed(wanted)]


def quantize(weight_EIO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns blocks and exponents of the nearest magnitudes that are not larger than the weight's."""
    groups = weight_EIO.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(3).clamp(min=1e-6) / 6).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.bucketize(scaled.abs().contiguous(), magnitudes, right=True).sub(1) + 8 * (scaled < 0)
    pairs = codes.to(torch.uint8).unflatten(3, (16, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents + 127).to(torch.uint8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Makes a checkpoint in MXFP4 and one with its values in float32."""
    plain = make_checkpoint("gpt_oss", tmp_path_factory.mktemp("plain"), num_local_experts=6)
    coded = make_checkpoint("gpt_oss", tmp_path_factory.mktemp("coded"), num_local_experts=6)
    tensors = load_file(plain / "model.safetensors")
    stored = {}
    for name, values in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = values
            continue
        blocks, exponents = quantize(values)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks.contiguous(), exponents.contiguous()
        decoded = [unpack_mxfp4(*expert).dequantize(torch.float32).T for expert in zip(blocks, exponents, strict=True)]
        tensors[name] = torch.stack(decoded).contiguous()
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, coded / "model.safetensors")
    config = json.loads((coded / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (coded / "config.json").write_text(json.dumps(config))
    return coded, plain


def settings(folder: Path, **more: object) -> EngineConfig:
    values = {"model": str(folder), "num_pages": 16, "page_size": 4, "num_threads": 1, "dtype": "float32", **more}
    return EngineConfig.model_validate(values)


def test_tokens_equal_those_of_the_plain_values(folders: tuple[Path, Path]) -> None:
    coded, plain = (Engine.load(settings(folder)) for folder in folders)
    wanted = generate(plain, PROMPT, GREEDY)
    assert generate(coded, PROMPT, GREEDY) == wanted
    for is_whole in (False, True):
        split = Engine.load(settings(folders[0], tensor_parallel=2, expert_parallel=is_whole), launch=launch_threads)
        try:
            assert generate(split, PROMPT, GREEDY) == wanted
        finally:
            split.close()


def test_bf16_keeps_the_codes_and_the_logits_stay_near(folders: tuple[Path, Path]) -> None:
    """Products with codes are exact in their values, so the error is at most that of a checkpoint of plain values."""
    coded, plain, exact = (
        logits(Engine.load(settings(folder, dtype=dtype)), PROMPT)
        for folder, dtype in ((folders[0], "bfloat16"), (folders[1], "bfloat16"), (folders[1], "float32"))
    )
    assert compare(coded, exact).error < max(0.05, 1.25 * compare(plain, exact).error)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_counts_codes_or_values_as_they_are_held(dtype: str, folders: tuple[Path, Path]) -> None:
    config = settings(folders[0], dtype=dtype, device="cpu")
    held = tensors_of(Engine.load(config).runner._model)
    assert plan_memory(config, HOST).weight_bytes == sum(tensor.nbytes for tensor in held.values())


def test_groups_that_do_not_fit_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel = 4 does not divide the model's 2 groups of an expert's"):
        plan_memory(settings(folders[0], tensor_parallel=4), HOST)
    data = json.loads((folders[0] / "config.json").read_text())
    for changes, problem in (
        ({"intermediate_size": 48}, "intermediate_size = 48: MXFP4 needs a multiple of 32"),
        ({"swiglu_limit": -1}, "swiglu_limit = -1: a positive number"),
        ({"experts_per_token": 3}, "experts_per_token = 3 and num_experts_per_tok = 2 differ"),
        ({"rope_parameters": None}, "rope_scaling is missing"),
        ({"quantization_config": {"quant_method": "mxfp6"}}, "quant_method = 'mxfp6' is not supported"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(data | changes))
        (tmp_path / "model.safetensors").write_bytes((folders[0] / "model.safetensors").read_bytes())
        with pytest.raises(CheckpointError, match=problem):
            ModelConfig.from_folder(tmp_path)
