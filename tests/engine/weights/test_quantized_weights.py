"""Tests quantized weights: every layout is read as documented, computed exactly, and has a revision of its own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.engine.quality import KINDS, compare, logits, measure, texts
from engine.cpu.linear import pack_for_tiles
from engine.engine import Engine
from engine.generate import generate
from engine.kernels.triton.products.quantized_gemm import QuantizedGemm, fits
from engine.memory.device_memory import DeviceMemory
from engine.memory.estimates import make_layout
from engine.memory.plan import plan_memory
from engine.models.config import ModelConfig
from engine.weights.checkpoint import list_weight_files
from engine.weights.quantized_weight import QuantizedWeight, quantize_weight, stack_rows
from kv_transfer.layout.reshard import plan_reshard
from penstock.config import EngineConfig
from penstock.errors import CheckpointError, ConfigError, TransferRefused
from tests.support.engine.checkpoints import FAMILIES, make_checkpoint
from tests.support.engine.isas import needs_native
from tests.support.serving import GREEDY, SALT

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
PROMPT = [3 + i * i % 300 for i in range(40)]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Stored = dict[str, torch.Tensor]


def pack(codes: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Packs code by code as documented: the i-th of each 32 / bits codes goes to bits i * bits and up."""
    count = 32 // bits
    codes = codes.movedim(dim, 0).long()
    codes = torch.cat([codes, codes.new_zeros(-len(codes) % count, *codes.shape[1:])])
    words = codes.new_zeros(len(codes) // count, *codes.shape[1:])
    for place in range(count):
        words |= codes[(order[place] if order else place) :: count] << (place * bits)
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32).movedim(0, dim).contiguous()


def groups_of(width: int, size: int | None) -> torch.Tensor:
    return torch.arange(width) // (size or width)


def codes_for(weight: torch.Tensor, bits: int, group: torch.Tensor, is_symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Returns codes 0 to 2^bits - 1 [O, I], scales and zero points [O, G]; `group` has each input's group, in any
    order."""
    most, num_groups = 2**bits - 1, int(group.max()) + 1
    scales, zeros = torch.zeros(len(weight), num_groups), torch.zeros(len(weight), num_groups)
    for index in range(num_groups):
        part = weight[:, group == index]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if is_symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scales[:, index] = ((high - low) / most).clamp(min=1e-6).half().float()
        zeros[:, index] = (most + 1) // 2 if is_symmetric else (-low / scales[:, index]).round().clamp(1, most)
    codes = (weight / scales[:, group] + zeros[:, group]).round().clamp(0, most)
    return codes, scales, zeros


def gptq(bits: int, size: int | None, is_symmetric: bool, act_order: bool, form: str = "gptq") -> Quantizer:
    def quantize(path: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        group = groups_of(weight.shape[1], size)
        if act_order:
            group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(len(path)))]
        codes, scales, zeros = codes_for(weight, bits, group, is_symmetric)
        stored = {
            f"{path}.qweight": pack(codes.T, bits, 0),
            f"{path}.qzeros": pack(zeros.T - int(form == "gptq"), bits, 1),
            f"{path}.scales": scales.T.contiguous().half(),
            f"{path}.g_idx": group.int(),
        }
        return stored, (codes - zeros[:, group]) * scales[:, group]

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size or -1,
        "sym": is_symmetric,
        "desc_act": act_order,
        "checkpoint_format": form,
    }
    return Quantizer(config, quantize)


def awq(size: int) -> Quantizer:
    def quantize(path: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        group = groups_of(weight.shape[1], size)
        codes, scales, zeros = codes_for(weight, 4, group, False)
        stored = {
            f"{path}.qweight": pack(codes.T, 4, 1, AWQ_ORDER),
            f"{path}.qzeros": pack(zeros.T, 4, 1, AWQ_ORDER),
            f"{path}.scales": scales.T.contiguous().half(),
        }
        return stored, (codes - zeros[:, group]) * scales[:, group]

    return Quantizer(
        {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}, quantize
    )


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head", "re:.*embed.*"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def packed(bits: int, size: int | None, is_symmetric: bool) -> Quantizer:
    def quantize(path: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        group = groups_of(weight.shape[1], size)
        codes, scales, zeros = codes_for(weight, bits, group, is_symmetric)
        stored = {
            f"{path}.weight_packed": pack(codes, bits, 1),
            f"{path}.weight_scale": scales.half(),
            f"{path}.weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            stored[f"{path}.weight_zero_point"] = pack(zeros, bits, 0)
        return stored, (codes - zeros[:, group]) * scales[:, group]

    strategy = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    config = compressed("pack-quantized", {"num_bits": bits, "type": "int", "symmetric": is_symmetric, **strategy})
    return Quantizer(config, quantize)


def coded(form: str, strategy: str) -> Quantizer:
    """Stores one code per value, int8 or fp8, with a scale for the tensor or for each row."""
    is_float = form == "float-quantized"

    def quantize(path: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        peak = weight.abs().amax() if strategy == "tensor" else weight.abs().amax(1, keepdim=True)
        scale = peak / (448 if is_float else 127)
        shape = (1,) if strategy == "tensor" else (len(weight), 1)
        codes = (weight / scale).to(torch.float8_e4m3fn) if is_float else (weight / scale).round().to(torch.int8)
        return {f"{path}.weight": codes, f"{path}.weight_scale": scale.reshape(*shape)}, codes.float() * scale

    weights = {"num_bits": 8, "type": "float" if is_float else "int", "symmetric": True, "strategy": strategy}
    return Quantizer(compressed(form, weights), quantize)


def fp8_blocks(size: int) -> Quantizer:
    """Stores DeepSeek-V3's blocks, whose scales are named inverse but are not."""

    def quantize(path: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        rows, columns = (-(-length // size) for length in weight.shape)
        scale = torch.zeros(rows, columns)
        for row in range(rows):
            for column in range(columns):
                part = weight[row * size : (row + 1) * size, column * size : (column + 1) * size]
                scale[row, column] = part.abs().max() / 448
        whole = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[: weight.shape[0], : weight.shape[1]]
        codes = (weight / whole).to(torch.float8_e4m3fn)
        return {f"{path}.weight": codes, f"{path}.weight_scale_inv": scale}, codes.float() * whole

    return Quantizer({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [size, size]}, quantize)


class Quantizer:
    def __init__(
        self, config: dict[str, Any], quantize: Callable[[str, torch.Tensor], tuple[Stored, torch.Tensor]]
    ) -> None:
        self.config, self.quantize = config, quantize

    def convert(self, folder: Path, to: Path, plain: Path) -> None:
        """Writes every product of the checkpoint except routers and the head twice: quantized, and as plain values."""
        stored: Stored = {}
        values: Stored = {}
        for name, tensor in load_file(list_weight_files(folder)[0]).items():
            if name.endswith("_proj.weight") or (".experts." in name and name.endswith(".weight")):
                form, values[name] = self.quantize(name.removesuffix(".weight"), tensor.float())
                stored |= form
            else:
                stored[name] = values[name] = tensor
        config = json.loads((folder / "config.json").read_text())
        write(to, {**config, "quantization_config": self.config}, stored)
        write(plain, config, values)


def write(folder: Path, config: dict[str, Any], tensors: Stored) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load(folder: Path, **changes: Any) -> Engine:
    return Engine.load(EngineConfig(model=str(folder), num_pages=16, num_threads=1, **changes))


LAYOUTS = {
    "gptq 4 bits": gptq(4, 32, True, False),
    "gptq act-order": gptq(4, 32, False, True),
    "gptq v2 8 bits": gptq(8, None, False, False, "gptq_v2"),
    "awq": awq(32),
    "packed 4 bits": packed(4, 32, True),
    "packed 4 bits, zero points": packed(4, 32, False),
    "packed 8 bits": packed(8, None, True),
    "int8 channel": coded("int-quantized", "channel"),
    "int8 tensor": coded("int-quantized", "tensor"),
    "fp8 channel": coded("float-quantized", "channel"),
    "fp8 blocks": fp8_blocks(32),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), **SIZES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_tokens_of_its_values(layout: str, llama: Path, tmp_path: Path) -> None:
    """In bf16 the logits are compared, since CPU kernels multiply with unrounded values: they must be as close to those
    of the exact values as a checkpoint with values rounded to bf16."""
    LAYOUTS[layout].convert(llama, tmp_path / "quantized", tmp_path / "plain")
    exact, stored = (load(tmp_path / name, dtype="float32") for name in ("plain", "quantized"))
    greedy = replace(GREEDY, max_tokens=12)
    assert generate(exact, PROMPT, greedy, SALT) == generate(stored, PROMPT, greedy, SALT)
    wanted = logits(exact, PROMPT)
    coded, rounded = (
        compare(logits(load(tmp_path / name, dtype="bfloat16"), PROMPT), wanted) for name in ("quantized", "plain")
    )
    assert coded.error < 1.25 * rounded.error < 0.06
    device = DeviceMemory("cpu", "cpu", 1 << 34)
    taken, plain = (
        plan_memory(EngineConfig(model=str(tmp_path / name), dtype="bfloat16"), device).weight_bytes
        for name in ("quantized", "plain")
    )
    assert taken < plain  # half of the model's values are in the embedding


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_quantized_checkpoints(family: str, tmp_path: Path) -> None:
    experts = {"moe_intermediate_size": 32} if family.endswith("moe") or family.startswith("deepseek") else {}
    folder = make_checkpoint(family, tmp_path / "whole", **experts)
    LAYOUTS["int8 channel"].convert(folder, tmp_path / "quantized", tmp_path / "plain")
    tokens = [
        generate(load(tmp_path / name), PROMPT, replace(GREEDY, max_tokens=8), SALT) for name in ("quantized", "plain")
    ]
    assert tokens[0] == tokens[1]


def any_weight(kind: Any, outputs: int, inputs: int, size: int, has_zeros: bool) -> QuantizedWeight:
    """Returns a random weight that uses every code."""
    shape, num_groups = (outputs, inputs), -(-inputs // size)
    codes = torch.randint(0, 16, shape) if kind == "int4" else torch.randint(-128, 128, shape)
    codes = codes.to(torch.int8)
    if kind == "fp8":  # except NaN
        codes = torch.where((codes & 0x7F) == 0x7F, torch.zeros_like(codes), codes).view(torch.float8_e4m3fn)
    zeros = torch.randint(0, 16, (outputs, num_groups)).float() if has_zeros else None
    return QuantizedWeight(kind, codes, torch.rand(outputs, num_groups), zeros, size)


@needs_native
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_tiles_multiply_with_the_exact_values_of_codes(kind: Any, has_zeros: bool) -> None:
    """Codes are never rounded to bf16, so only float32 sums and the bf16 result round. A row's bits do not depend on
    other rows; panels come in pairs and alone, groups whole and cut short."""
    torch.manual_seed(0)
    for outputs, inputs, size in ((144, 320, 64), (144, 320, 320), (16, 32, 32), (48, 224, 128)):
        weight = any_weight(kind, outputs, inputs, size, has_zeros)
        bias = torch.randn(outputs).bfloat16()
        ours = pack_for_tiles(weight, bias)
        assert ours is not None
        x = torch.randn(300, inputs).bfloat16()
        exact = weight.dequantize(torch.float64)
        wanted = x.double() @ exact.T + bias.double()
        # bounds the error of float32, which first sums codes from which zero points and halves are then subtracted
        most = x.double().abs() @ (exact.abs() + weight._spread(weight.scales_OG) * 16).T
        found = ours(x)
        assert bool(((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + most * 2**-20).all())
        for rows in (1, 16, 17, 33):
            assert torch.equal(ours(x[:rows]), found[:rows])
        assert torch.equal(ours(x[299:]), found[299:])
        with threads(2):
            assert torch.equal(ours(x[:40]), found[:40])


@needs_native
def test_quantized_weights_take_at_most_half_of_the_memory() -> None:
    plain = pack_for_tiles(torch.randn(128, 512).bfloat16(), None)
    assert plain is not None
    for kind, share in (("int4", 0.32), ("int8", 0.52), ("fp8", 0.52)):
        ours = pack_for_tiles(quantize_weight(torch.randn(128, 512), kind), None)
        assert ours is not None
        assert ours.num_bytes < plain.num_bytes * share


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "shape"), [("int4", (72, 192)), ("int4", (40, 96)), ("int8", (33, 64)), ("fp8", (48, 64))]
)
def test_the_triton_product_equals_that_of_the_dequantized_weight(
    kind: Any, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight = quantize_weight(torch.randn(shape) / shape[1] ** 0.5, kind).to(device)
    assert fits(weight)
    bias = torch.randn(shape[0], device=device).to(dtype)
    for rows in (1, 37):
        x = torch.randn(rows, shape[1], device=device).to(dtype)
        wanted = x.float() @ weight.dequantize(dtype).float().T + bias.float()
        found = QuantizedGemm(weight, bias)(x)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2  # the interpreter truncates to bf16, while a GPU rounds
        torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance)


def test_quantization_loses_bounded_quality() -> None:
    """The bounds are a few times what `benchmarks.engine.quality` measures over longer texts."""
    found = measure(texts(num_texts=2, num_tokens=128), KINDS)
    for name, quality in found.items():
        assert quality.error < (0.25 if "int4" in name else 0.08 if "fp8" in name else 0.03), name
        assert quality.agreement > (0.85 if "int4" in name else 0.93), name
    assert found["bf16"].error < found["KV fp8"].error < found["weights int4"].error


def test_parts_and_stacks_of_a_weight_equal_those_of_its_values() -> None:
    torch.manual_seed(2)
    weight = quantize_weight(torch.randn(32, 128), "int4")
    shuffled = replace(weight, group_I=torch.randperm(128) // 128, zeros_OG=None)
    for each in (
        weight,
        shuffled,
        quantize_weight(torch.randn(32, 128), "int8"),
        quantize_weight(torch.randn(8, 96), "int4"),
    ):
        whole = each.dequantize(torch.float32)
        for dim, start, length in ((0, 3, 5), (1, 32, 64), (1, 7, 9)):
            assert torch.equal(
                each.narrow(dim, start, length).dequantize(torch.float32), whole.narrow(dim, start, length)
            )
    plain = torch.randn(4, 128)
    for others in ([weight, weight], [weight, replace(weight, zeros_OG=None)], [weight, shuffled], [weight, plain]):
        stacked = stack_rows(others, torch.float32)
        rows = [other if isinstance(other, torch.Tensor) else other.dequantize(torch.float32) for other in others]
        found = stacked if isinstance(stacked, torch.Tensor) else stacked.dequantize(torch.float32)
        assert torch.equal(found, torch.cat(rows))
    assert isinstance(stack_rows([weight, weight], torch.float32), QuantizedWeight)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_plain_checkpoint_is_quantized_while_it_is_loaded(
    kind: Any, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ModelConfig.from_folder(llama)
    plain, own = (
        make_layout(EngineConfig(model=str(llama), quantization=quantization), config)
        for quantization in ("none", kind)
    )
    # Page salts contain the revision, and requests stay with one revision.
    assert plain.model_revision != own.model_revision
    with pytest.raises(TransferRefused, match=f"quantization is '{kind}' at the receiver, 'none' at the sender"):
        plan_reshard(plain, own)
    with caplog.at_level(logging.INFO, logger="engine.weights.reader"):
        engine = load(llama, quantization=kind, dtype="bfloat16")
    assert "weights are used quantized" in caplog.text
    tokens = generate(engine, PROMPT, replace(GREEDY, max_tokens=4), SALT)
    assert tokens == generate(
        load(llama, quantization=kind, dtype="bfloat16"), PROMPT, replace(GREEDY, max_tokens=4), SALT
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes' is not supported; give one of gptq, awq"),
        ({"bits": 3}, "bits = 3 is not supported; give 4 or 8"),
        ({"group_size": 0}, "group_size = 0"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"group_size": 64}, r"qzeros is I32 \[2, 8\]; quantization_config and the model's shape ask for I32 \[1, 8\]"),
        ({"modules_to_not_convert": ["q_proj"]}, "q_proj is stored quantized, though quantization_config says"),
        ({"modules_to_not_convert": ["re:("]}, "is not a regular expression"),
    ],
)
def test_unsupported_quantization_is_refused(
    changes: dict[str, Any], problem: str, llama: Path, tmp_path: Path
) -> None:
    LAYOUTS["gptq 4 bits"].convert(llama, tmp_path / "quantized", tmp_path / "plain")
    file = tmp_path / "quantized" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=problem):
        load(tmp_path / "quantized")


def test_quantizing_twice_and_missing_tensors_are_refused(llama: Path, tmp_path: Path) -> None:
    LAYOUTS["awq"].convert(llama, tmp_path / "quantized", tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"are quantized already \(awq\); give engine.quantization = none"):
        load(tmp_path / "quantized", quantization="int8")
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, tmp_path / "quantized" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.scales is missing"):
        load(tmp_path / "quantized")
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"is missing; config.json and the weights must be of one checkpoint"):
        load(tmp_path / "quantized")
