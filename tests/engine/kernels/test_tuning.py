"""Tests that measured configurations are stored and found, and that models step on Triton kernels as on plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton

from engine.engine import Engine
from engine.generate import generate
from engine.kernels.triton.attention import tuning
from engine.kernels.triton.attention.tuning import KernelConfig, save_tuned, select_config
from engine.kernels.triton.common import cdiv, next_power_of_2
from penstock.config import EngineConfig
from penstock.types import SamplingParams
from tests.support.engine.checkpoints import make_checkpoint

DEFAULT = KernelConfig(16, 64, 4, 5)
MEASURED = KernelConfig(16, 32, 8, 3)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the tuning file of the device that this machine pretends to have."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "device_name", lambda _: "NVIDIA_H999")
    tuning.load_tuned.cache_clear()
    return tuning.tuned_file("NVIDIA_H999")


def select(shape: str) -> KernelConfig:
    tuning.load_tuned.cache_clear()
    return select_config("paged_decode", shape, DEFAULT, torch.device("cuda"))


def test_measured_shapes_are_found_and_others_use_the_default(file: Path) -> None:
    assert select("heads of 128") == DEFAULT
    save_tuned(file, {"paged_decode": {"heads of 128": MEASURED}})
    save_tuned(file, {"paged_decode": {"heads of 64": DEFAULT}, "paged_prefill": {"heads of 128": DEFAULT}})
    assert select("heads of 128") == MEASURED
    assert select("heads of 96") == DEFAULT
    assert select_config("paged_decode", "heads of 128", DEFAULT, torch.device("cpu")) == DEFAULT


@pytest.mark.parametrize("text", ["{", '{"paged_decode": {"heads of 128": {"rows": 1}}}', '["no table"]'])
def test_an_invalid_file_is_reported_and_left_unchanged(
    text: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert select("heads of 128") == DEFAULT
    assert f"{file} is invalid" in caplog.text


def test_sizes_equal_tritons_own() -> None:
    for number in (1, 2, 3, 4, 5, 31, 32, 33, 4097, 128_256):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        for divisor in (1, 2, 7, 4096):
            assert cdiv(number, divisor) == triton.cdiv(number, divisor)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_models_step_on_triton_as_on_plain_torch(family: str, tmp_path: Path) -> None:
    """Runs a prompt in chunks, then decodes, on heads with norms and on latents with experts."""
    folder = make_checkpoint(family, tmp_path, num_hidden_layers=2)
    prompt, greedy = list(range(2, 30)), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    tokens = []
    for attention in ("torch", "triton"):
        engine = Engine.load(
            EngineConfig(model=str(folder), attention=attention, num_pages=8, page_size=16, num_threads=1)
        )
        tokens.append(generate(engine, prompt, greedy, chunk_tokens=17))
    assert tokens[0] == tokens[1]
