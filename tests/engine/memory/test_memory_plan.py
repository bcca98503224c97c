"""Tests that `penstock plan-memory` counts what a loaded engine holds, to the byte, and refuses what cannot work."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.cli.main import main
from decode_worker.drafting.draft_model import DraftModel
from decode_worker.drafting.load_draft import load_draft
from engine.engine import Engine
from engine.memory.device_memory import DeviceMemory, find_device
from engine.memory.estimates import (
    SCORED_TOKENS,
    count_pages,
    graph_bytes,
    make_layout,
    step_bytes,
    workspace_bytes,
)
from engine.memory.plan import MemoryPlan, plan_memory
from engine.models.config import ModelConfig
from engine.models.shapes import tensor_shapes
from engine.parallel.model_part import ModelPart
from penstock.config import EngineConfig
from penstock.errors import CheckpointError, ConfigError, InvalidInput
from penstock.sizing.accelerators import ACCELERATORS
from penstock.sizing.model_shape import shape_from_config
from simulator.costs.roofline import held_shape
from tests.support.engine.checkpoints import FAMILIES, make_checkpoint
from tests.support.engine.mtp_layers import make_mtp_checkpoint

ROOT = Path(__file__).resolve().parents[3]
BUNDLED = ROOT / "models" / "penstock-tiny"
HOST = DeviceMemory("host", "cpu", 4 << 30)
GPU = DeviceMemory("gpu", "cuda", 2 << 30)
FREE = (2 << 30) - (600 << 20) - 3 * (32 << 20)  # bytes of GPU memory, without context, workspaces and weights


def tensors_of(thing: object) -> dict[int, torch.Tensor]:
    """Returns every tensor that an object of this project holds, by address, because two tensors may share memory."""
    if isinstance(thing, torch.Tensor):
        return {id(thing) if thing.is_mkldnn else thing.data_ptr(): thing}
    parts: list[object] = []
    if isinstance(thing, list | tuple):
        parts = list(thing)
    elif type(thing).__module__.startswith("engine.") and hasattr(thing, "__dict__"):
        parts = list(vars(thing).values())
    elif type(thing).__module__.startswith("engine.") and hasattr(thing, "__slots__"):
        parts = [getattr(thing, name) for name in thing.__slots__]
    return {key: tensor for part in parts for key, tensor in tensors_of(part).items()}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    ],
)
def test_the_plan_equals_what_the_engine_holds(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path, **overrides)
    for settings in ({"kv_memory_bytes": 100_000}, {"kv_memory_bytes": 70_000, "dtype": "bfloat16", "max_context": 99}):
        config = EngineConfig(model=str(folder), num_threads=1, device="cpu", **settings)
        plan = plan_memory(config, HOST)
        engine = Engine.load(config)
        held = tensors_of(engine.runner._model)
        assert plan.weight_bytes == sum(tensor.numel() * tensor.itemsize for tensor in held.values())
        assert plan.layout == engine.layout
        assert (plan.num_pages, plan.kv_bytes) == (engine.pool.num_pages, engine.kv_pages.nbytes)
        assert plan.kv_bytes_per_token == engine.kv_pages.nbytes // (plan.num_pages * config.page_size)


def test_a_window_in_every_layer_bounds_the_pages_of_a_long_request(tmp_path: Path) -> None:
    def plan(family: str, **overrides: Any) -> MemoryPlan:
        folder = make_checkpoint(family, tmp_path / family, max_position_embeddings=4096, **overrides)
        return plan_memory(EngineConfig(model=str(folder), num_pages=32, device="cpu"), HOST, context=4096)

    windowed = plan("mistral", sliding_window=100)
    held = -(-99 // 16) + 2
    assert windowed.largest_batch == {1024: 32 // held, 4096: 32 // held}
    assert windowed.longest_fitting == 4096
    # With one full-attention layer, every page is kept.
    with pytest.raises(ConfigError, match="a context of 4096 tokens takes 256 pages"):
        plan("gemma2", sliding_window=100)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "olmo3"])
def test_a_share_of_pages_with_windowed_layers_makes_room_for_more_pages(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(family, tmp_path, max_position_embeddings=4096, sliding_window=100)
    config = EngineConfig(model=str(folder), kv_memory_bytes=1 << 20, num_threads=1)
    whole = plan_memory(config, HOST)
    shared = plan_memory(config.model_copy(update={"window_share": 0.25}), HOST)
    assert (whole.num_pages, shared.num_pages, shared.num_slots) == (128, 204, 51)  # half of the layers have a window
    assert shared.kv_bytes == shared.num_pages * 4096 + shared.num_slots * 4096 <= 1 << 20
    assert shared.largest_batch[4096] == 0  # 256 pages
    assert shared.largest_batch[1024] == min(204 // 64, 51 // (-(-99 // 16) + 2))
    engine = Engine.load(config.model_copy(update={"window_share": 0.25}))
    assert engine.window_kv is not None
    assert engine.pool.parts is not None
    assert (engine.pool.num_pages, engine.pool.parts.num_slots) == (shared.num_pages, shared.num_slots)
    assert engine.kv_pages.nbytes + engine.window_kv.nbytes == shared.kv_bytes


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("llama", {}, "do not alternate between windowed and full attention"),
        ("mistral", {}, "do not alternate between windowed and full attention"),
        ("llama4_text", {}, "do not alternate between windowed and full attention"),
        ("gemma2", {"tensor_parallel": 2}, r"engine\.tensor_parallel = 2 splits pages"),
        ("gemma2", {"host_memory_bytes": 1 << 20}, r"engine\.host_memory_bytes keeps whole pages"),
        ("gpt_oss", {"attention": "flashinfer"}, "reads one page table"),
    ],
)
def test_a_window_share_is_refused_where_pages_stay_whole(
    tmp_path: Path, family: str, settings: dict[str, Any], problem: str
) -> None:
    folder = make_checkpoint(family, tmp_path)
    config = EngineConfig.model_validate({"model": str(folder), "num_pages": 8, "window_share": 0.5} | settings)
    with pytest.raises(ConfigError, match=rf"engine\.window_share = 0\.5 keeps .*{problem}.*; set it to 1"):
        make_layout(config, ModelConfig.from_folder(folder))


# The published shapes, with parameters and KV bytes per token as their authors give them.
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "torch_dtype": "bfloat16",
    "output_router_logits": False, "router_aux_loss_coef": 0.02, "sliding_window": None,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936,
    "max_position_embeddings": 40960, "num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 48,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "max_window_layers": 48,
    "rope_theta": 1e6, "router_aux_loss_coef": 0.001, "use_sliding_window": False, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "intermediate_size": 10944, "vocab_size": 102400,
    "max_position_embeddings": 163840, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 27,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "aux_loss_alpha": 0.001,
    "seq_aux": True, "ep_size": 1, "pretraining_tp": 1, "rope_theta": 10000, "torch_dtype": "bfloat16",
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "billions", "kv_bytes"),
    [(MIXTRAL_8X7B, 46.7, 131072), (QWEN3_30B_A3B, 30.5, 98304), (DEEPSEEK_V2_LITE, 15.7, 31104)],
    ids=["Mixtral-8x7B", "Qwen3-30B-A3B", "DeepSeek-V2-Lite"],
)
def test_published_models_have_their_published_sizes(
    data: dict[str, Any], billions: float, kv_bytes: int, tmp_path: Path
) -> None:
    """Plans from files that hold a header and no weights, but have the right size."""
    (tmp_path / "config.json").write_text(json.dumps(data))
    write_hollow_weights(tmp_path, {})
    shapes = tensor_shapes(ModelConfig.from_folder(tmp_path))
    write_hollow_weights(tmp_path, shapes)
    plan = plan_memory(EngineConfig(model=str(tmp_path)), find_device("H200"), context=32768)
    assert round(sum(math.prod(shape) for shape in shapes.values()) / 1e9, 1) == billions
    assert plan.kv_bytes_per_token == kv_bytes
    assert plan.largest_batch[32768] == plan.num_pages // 2048 > 0


GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 24,
    "head_dim": 64, "num_local_experts": 32, "experts_per_token": 4, "sliding_window": 128, "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"}, "torch_dtype": "bfloat16", "rope_theta": 150000,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
}  # fmt: skip


def test_mxfp4_counts_in_the_form_that_the_device_holds(tmp_path: Path) -> None:
    """A device holds fp8 codes with scales if its kernels read e4m3, bf16 otherwise; plans of fleets count the same."""
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    config = EngineConfig(model=str(tmp_path), kv_memory_bytes=1 << 30)
    coded, decoded = (plan_memory(config, find_device(name)).weight_bytes for name in ("H100", "A100-80GB"))
    assert (round(coded / 1e9), round(decoded / 1e9)) == (25, 42)
    shape = shape_from_config(GPT_OSS_20B, "gpt-oss-20b")
    assert (round(shape.num_parameters / 1e9, 1), shape.num_chosen, shape.num_window_layers) == (20.9, 4, 12)
    assert shape.weight_bytes == pytest.approx(coded, rel=0.005)
    assert held_shape(shape, ACCELERATORS["A100"]).weight_bytes == pytest.approx(decoded, rel=0.005)
    assert held_shape(shape, ACCELERATORS["H100"]) == shape
    assert shape.quantized(32).weight_bytes == 4 * shape.num_parameters


@pytest.mark.parametrize("name", ["kv_dtype", "quantization"])
def test_fp8_is_refused_on_devices_whose_kernels_do_not_read_it(name: str) -> None:
    config = EngineConfig.model_validate({"model": str(BUNDLED), "dtype": "bfloat16", name: "fp8"})
    with pytest.raises(ConfigError, match=rf"engine.{name} = 'fp8': kernels of A10G do not read fp8; .* int8"):
        plan_memory(config, find_device("A10G"))


def write_hollow_weights(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # a sparse region, which takes no room on the disk


def test_the_largest_batch_of_a_context_is_exact_to_the_page() -> None:
    plan = plan_memory(EngineConfig(model=str(BUNDLED), num_pages=1001), HOST, context=100)
    assert plan.largest_batch[100] == 1001 // 7  # seven pages of 16 tokens
    assert plan.largest_batch[1024] == 1001 // 64
    assert list(plan.largest_batch) == [100, 1024, plan.max_context]


def test_a_gpus_pool_takes_the_memory_that_weights_and_steps_leave() -> None:
    config = EngineConfig(model=str(BUNDLED))
    plan = plan_memory(config, GPU)
    assert plan.graph_bytes > 0
    assert plan.num_pages == int((FREE - plan.weight_bytes - plan.graph_bytes) * 0.9) // plan.layout.page_bytes
    assert plan.weight_bytes < plan_memory(config, HOST).weight_bytes, "the tied head is no second copy there"
    assert plan.kv_bytes + plan.weight_bytes + plan.graph_bytes + plan.step_bytes <= FREE


def test_a_gpus_pool_leaves_room_for_a_step_wider_than_a_tenth_of_the_memory() -> None:
    config = EngineConfig(model=str(BUNDLED))
    plan = plan_memory(config, GPU, step_tokens=1 << 16)
    free = FREE - plan.weight_bytes - plan.graph_bytes
    assert plan.step_bytes > free // 10
    assert plan.num_pages == (free - plan.step_bytes) // plan.layout.page_bytes


@pytest.mark.parametrize(("total", "used"), [(143771 << 20, 20 << 30), (8 << 30, 4 << 30)])
def test_an_engine_sizes_its_pool_from_the_memory_that_its_device_reports(
    total: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(BUNDLED), device="cpu", num_threads=1)
    part = replace(ModelPart.load(config), device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - used, total))
    later = graph_bytes(config, part.model, "cuda") + workspace_bytes(config, part.model, "cuda")
    assert later > 0
    assert part.count_pages() == int((total - used - later) * 0.9) // part.layout.page_bytes
    wide = replace(part, model=replace(part.model, vocab_size=1 << 18))  # its logits take a tenth of 8 GiB
    free = total - used - graph_bytes(config, wide.model, "cuda") - workspace_bytes(config, wide.model, "cuda")
    step = step_bytes(wide.model, part.layout.dtype, 2048, config.cuda_graphs + SCORED_TOKENS)
    assert wide.count_pages() == min(int(free * 0.9), free - step) // part.layout.page_bytes


def test_a_prompt_stream_counts_with_the_workspaces_of_its_libraries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_checkpoint("llama", tmp_path, head_dim=64)
    for name, added in {"triton": 32 << 20, "flashinfer": (32 + 128) << 20, "cudnn": (32 + 256) << 20}.items():
        config = EngineConfig.model_validate({"model": str(folder), "attention": name, "dtype": "bfloat16"})
        without, plan = (plan_memory(config, GPU, has_prompt_stream=has) for has in (False, True))
        assert abs(without.kv_bytes - plan.kv_bytes - 0.9 * added) <= plan.layout.page_bytes
    on_cpu = EngineConfig(model=str(folder))
    assert plan_memory(on_cpu, HOST, has_prompt_stream=True).kv_bytes == plan_memory(on_cpu, HOST).kv_bytes

    part = replace(ModelPart.load(EngineConfig(model=str(BUNDLED), device="cpu")), device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 2 << 30))
    fewer = part.count_pages() - part.count_pages(has_prompt_stream=True)
    assert abs(fewer * part.layout.page_bytes - 0.9 * (32 << 20)) <= part.layout.page_bytes

    file, printed = tmp_path / "serve.toml", []
    for share in (0, 0.3):
        file.write_text(f"[decode]\nprompt_sm_share = {share}\n")
        assert main(["plan-memory", str(BUNDLED), "--device", "2GiB", "--config", str(file), "--json"]) == 0
        printed.append(json.loads(capsys.readouterr().out)["num_pages"])
    assert abs(printed[0] - printed[1] - fewer) <= 1


def test_a_larger_step_takes_more_memory() -> None:
    model = ModelConfig.from_folder(BUNDLED)
    assert (
        step_bytes(model, "float32", 64, 1) < step_bytes(model, "float32", 65, 1) < step_bytes(model, "float32", 65, 2)
    )
    assert step_bytes(model, "bfloat16", 64, 0) * 2 == step_bytes(model, "float32", 64, 0)


def test_a_pool_without_memory_is_refused() -> None:
    config = EngineConfig(model=str(BUNDLED))
    layout = make_layout(config, ModelConfig.from_folder(BUNDLED))
    with pytest.raises(ConfigError, match=r"engine.kv_memory_bytes = 0 holds 0 pages of \d+ bytes; give at least"):
        count_pages(config, layout, "cuda", -5)


@pytest.mark.parametrize(
    ("settings", "device", "context", "message"),
    [
        ({}, DeviceMemory("small", "cuda", 601 << 20), None, r"weights of .* in float32.* engine.dtype = bfloat16"),
        ({}, DeviceMemory("small", "cpu", 1 << 20), None, r"give a device with at least 1\d\.\d\d MiB"),
        (
            {"dtype": "bfloat16"},
            DeviceMemory("small", "cuda", 601 << 20),
            None,
            r"at least \d+\.\d\d MiB, or engine.quantization = int8, .*, or engine.tensor_parallel = 2, on as many",
        ),
        ({"num_pages": 900_000}, HOST, None, r"KV pages take 41.* left; give engine.num_pages = \d+ at most"),
        ({"kv_memory_bytes": 5 << 30}, HOST, None, r"KV pages take 5.00 GiB.* engine.kv_memory_bytes = \d+ at most"),
        ({"host_memory_bytes": 4 << 30}, HOST, None, r"engine.host_memory_bytes = 4294967296 leaves no room"),
        ({"kv_memory_bytes": 5}, HOST, None, r"engine.kv_memory_bytes = 5 holds 0 pages"),
        ({"num_pages": 10}, HOST, 1000, r"takes 63 pages .*give engine.num_pages = 63, .* at most 160 tokens"),
        ({"kv_memory_bytes": 1 << 19}, HOST, 1000, r"engine.kv_memory_bytes = 3096576, which it has room for"),
        (
            {"num_pages": 5, "cuda_graphs": 0},
            DeviceMemory("small", "cuda", 695 << 20),
            2048,
            r"has 5; give a larger device or at most 80",
        ),
        ({"max_context": 9999}, HOST, None, r"engine.max_context = 9999 is more than"),
        ({}, HOST, 9999, r"a context of 9999 tokens: .* takes 1 to 2048"),
    ],
)
def test_a_refusal_suggests_settings_that_work(
    settings: dict[str, Any], device: DeviceMemory, context: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_memory(EngineConfig(model=str(BUNDLED), **settings), device, context=context)


def test_the_suggested_number_works_and_is_the_largest() -> None:
    """Plans with the number in the message, and with one page more, which is refused."""
    for setting, first in (("kv_memory_bytes", 5 << 30), ("num_pages", 900_000)):
        with pytest.raises(ConfigError) as refused:
            plan_memory(EngineConfig(model=str(BUNDLED), **{setting: first}), HOST)
        most = int(str(refused.value).split(f"engine.{setting} = ")[1].split()[0])
        plan = plan_memory(EngineConfig(model=str(BUNDLED), **{setting: most}), HOST)
        more = most + (plan.layout.page_bytes if setting == "kv_memory_bytes" else 1)
        with pytest.raises(ConfigError):
            plan_memory(EngineConfig(model=str(BUNDLED), **{setting: more}), HOST)


def test_weights_that_do_not_fit_their_config_are_refused_without_loading(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_local_experts": 6}))
    with pytest.raises(CheckpointError, match=r"experts.5.w1.weight \(6 in all\) is missing|gate.weight has shape"):
        plan_memory(EngineConfig(model=str(folder)), HOST)


def test_devices_by_name_and_size() -> None:
    assert find_device("h200") == DeviceMemory("H200", "cuda", 143771 << 20)
    assert not find_device("T4").reads_e4m3
    assert find_device("24GiB") == DeviceMemory("24GiB", "cuda", 24 << 30)
    assert find_device("cpu:1.5GB") == DeviceMemory("cpu:1.5GB", "cpu", 1_500_000_000)
    assert find_device("cpu").total_bytes > 0
    for unknown in ("H900", "24", "tpu:5GiB", "", "GiB"):
        with pytest.raises(InvalidInput, match=r"give cpu, cuda, B200, H200, .* 24GiB or cpu:64GiB"):
            find_device(unknown)


def test_the_command_prints_a_plan_or_the_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text('[engine]\ndtype = "bfloat16"\n[decode_pool.engine]\npage_size = 32\nnum_pages = 50\n')
    ask = ["plan-memory", str(BUNDLED), "--device", "cpu:2GiB", "--config", str(config)]
    assert main([*ask, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["dtype"], plan["page_size"], plan["num_pages"]) == ("bfloat16", 32, 50)
    assert plan["largest_batch"]["1024"] == 50 // 32
    assert main([*ask, "--context", "640"]) == 0
    text = capsys.readouterr().out
    assert "No request of more than 1,600 tokens fits" in text
    assert "    640              2" in text
    assert main([*ask, "--context", "2000"]) == 2
    assert "a context of 2000 tokens takes 63 pages" in capsys.readouterr().err
    assert main([*ask, "--role", "prefill"]) == 0
    assert "a page of 16" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["penstock-tiny-draft", "penstock-tiny-eagle3", "deepseek_v3", "glm4_moe"])
def test_a_draft_counts_with_its_pages(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, folder = BUNDLED, str(BUNDLED.with_name(name))
    if name in FAMILIES:
        model, folder = make_mtp_checkpoint(name, tmp_path / name), "mtp"
    settings = {"dtype": "float32", "page_size": 16, "num_pages": 40}
    config = EngineConfig.model_validate({"model": str(model), **settings})
    engine = Engine.load(config)
    draft = load_draft(folder, config, engine)
    if isinstance(draft, DraftModel):
        held = [*tensors_of(draft._engine.runner._model).values(), draft._engine.kv_pages]
    else:
        target = tensors_of(engine.runner._model)  # an MTP layer shares its embedding and output head
        found = tensors_of([draft._runner._head, draft._runner._kv]).items()
        # Without the map of its vocabulary.
        held = [tensor for key, tensor in found if tensor.is_floating_point() and key not in target]
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in held)
    draft.close()
    engine.close()
    assert plan_memory(config, HOST, draft_model=folder).draft_bytes == num_bytes
    assert plan_memory(config, HOST).draft_bytes == 0
    file = tmp_path / "serve.toml"
    file.write_text(
        f'[engine]\ndtype = "float32"\nnum_pages = 40\n[decode]\nspeculation = "auto"\ndraft_model = "{folder}"\n'
    )
    ask = ["plan-memory", str(model), "--config", str(file), "--device"]
    assert main([*ask, "cpu:2GiB"]) == 0
    assert "with its pages" in capsys.readouterr().out
    assert main([*ask, "cpu:2GiB", "--role", "prefill"]) == 0
    assert "with its pages" not in capsys.readouterr().out


def test_a_draft_that_does_not_fit_is_refused() -> None:
    config = EngineConfig(model=str(BUNDLED), dtype="float32", num_pages=40)
    plan = plan_memory(config, HOST)
    tight = DeviceMemory("tight", "cpu", plan.weight_bytes + plan.step_bytes + plan.kv_bytes + 1000)
    assert plan_memory(config, tight).draft_bytes == 0
    folder = str(BUNDLED.with_name("penstock-tiny-draft"))
    with pytest.raises(ConfigError, match=r"takes .* with its pages, and tight has 1000 bytes left"):
        plan_memory(config, tight, draft_model=folder)


def test_config_json_alone_gives_the_same_sizes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copy(BUNDLED / "config.json", tmp_path)
    plans = []
    for model in (BUNDLED, tmp_path, tmp_path / "config.json"):
        assert main(["plan-memory", str(model), "--device", "cpu:2GiB", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    whole, *alone = plans
    assert [plan.pop("has_weights") for plan in plans] == [True, False, False]
    assert alone == [whole, whole]
    assert main(["plan-memory", str(tmp_path), "--device", "cpu:2GiB"]) == 0
    assert "There is no weight file" in capsys.readouterr().out


def test_quantized_weights_need_their_headers(tmp_path: Path) -> None:
    data = json.loads((BUNDLED / "config.json").read_text())
    data["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="does not say which of them are stored quantized; fetch the weight files"):
        plan_memory(EngineConfig(model=str(tmp_path)), HOST)


def test_the_flag_for_ranks_divides_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["plan-memory", str(BUNDLED), "--device", "H200", "--json"]
    plans = []
    for flags in ([], ["--tp", "2"]):
        assert main([*ask, *flags]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert [plan["num_ranks"] for plan in plans] == [1, 2]
    assert plans[1]["weight_bytes"] < plans[0]["weight_bytes"]


def test_a_hub_id_is_answered_with_how_to_download_it() -> None:
    with pytest.raises(CheckpointError, match=r"`hf download some/model-8B --local-dir model-8B` and give"):
        plan_memory(EngineConfig(model="some/model-8B"), HOST)


@pytest.mark.processes
def test_a_plan_needs_no_torch() -> None:
    code = (
        "import sys\nfrom cluster.cli.main import main\n"
        f"assert main(['plan-memory', {str(BUNDLED)!r}, '--device', 'H200']) == 0\n"
        "sys.exit(f'{heavy} was imported' if (heavy := {'torch', 'ray', 'numpy'} & set(sys.modules)) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "H200" in done.stdout
