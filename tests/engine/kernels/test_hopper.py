"""Compiles every kernel for a Hopper GPU, without having one: each fits shared memory and registers, and uses its
matrix units."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.checkpoints import make_checkpoint

pytestmark = pytest.mark.processes

SHARED_BYTES = 227 * 1024  # of a multiprocessor, available to programs
ROOT = Path(__file__).resolve().parents[3]


def run(module: str, *arguments: str) -> Any:
    """Runs a module in a process that compiles instead of interpreting, and returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# These launches have the largest tiles. Codes in fp8 need compute capability 8.9.
WIDEST = ["decode", "prefill", "prefill of 256", "latents of a chunk", "experts, many rows", "int4, many rows"]
FEW_ROWS = ["int4, few rows", "int8, few rows"]
EARLY = "norms, launched early"
GPUS: dict[str, tuple[int, int, list[str]]] = {
    "H100": (90, SHARED_BYTES, []),  # every launch
    "A100": (80, 163 << 10, [*WIDEST, *FEW_ROWS, EARLY]),
    "L40S": (89, 99 << 10, [*WIDEST, *FEW_ROWS, EARLY, "prefill of fp8", "fp8, many rows"]),
    "B200": (100, 227 << 10, [*WIDEST, *FEW_ROWS, EARLY]),
}


@pytest.fixture(scope="module")
def compiled_for() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Returns the compiled variants by the GPU and the name of the launch. One process imports for all."""
    return dict(zip(GPUS, run("tests.support.engine.hopper", json.dumps([*GPUS.values()])), strict=True))


@pytest.fixture(scope="module")
def compiled(compiled_for: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the compiled variants of a Hopper by the name of the launch."""
    return compiled_for["H100"]


def test_every_launch_fits_a_multiprocessor(compiled: dict[str, list[dict[str, Any]]]) -> None:
    kernels = {kernel["kernel"] for launches in compiled.values() for kernel in launches}
    assert kernels >= {
        "_decode_kernel", "_plan_kernel", "_join_items_kernel", "_prefill_kernel", "_latent_kernel", "_join_kernel",
        "_gemm_kernel", "_norm_kernel",
        "_rope_kernel", "_swiglu_kernel", "_scan_kernel", "_weigh_kernel", "_narrow_kernel", "_mass_kernel",
        "_pick_kernel", "_write_quantized_kernel", "_rows_kernel", "_sum_kernel", "_route_kernel", "_place_kernel",
        "_combine_kernel", "_expand_kernel",
    }  # fmt: skip
    for name, launches in compiled.items():
        for kernel in launches:
            assert kernel["shared_bytes"] <= SHARED_BYTES, name
            assert kernel["stack_bytes"] == 0, f"{name} spills registers"


def test_wide_tiles_use_the_matrix_units_of_a_hopper(compiled: dict[str, list[dict[str, Any]]]) -> None:
    wide = [name for name in compiled if name.startswith("prefill")] + ["latents of a chunk", "experts, many rows"]
    for name in wide:
        assert compiled[name][0]["has_wgmma"], name


@pytest.mark.parametrize("gpu", [name for name in GPUS if name != "H100"])
def test_the_widest_launches_fit_the_shared_memory_of_other_gpus(
    gpu: str, compiled_for: dict[str, dict[str, list[dict[str, Any]]]]
) -> None:
    """`python -m tests.support.engine.hopper '[[CAPABILITY, BYTES, []]]'` compiles all launches, in half a minute."""
    compiled, (_, shared_bytes, names) = compiled_for[gpu], GPUS[gpu]
    assert compiled.keys() == set(names)
    for name, launches in compiled.items():
        for kernel in launches:
            assert kernel["shared_bytes"] <= shared_bytes, name


def test_pages_are_copied_in_wide_words(compiled: dict[str, list[dict[str, Any]]]) -> None:
    """The kernel takes addresses as plain numbers, whose alignment the compiler cannot know."""
    assert compiled["copies of pages"][0]["has_wide_loads"]


def test_three_decode_programs_fit_a_multiprocessor(compiled: dict[str, list[dict[str, Any]]]) -> None:
    """Three programs per multiprocessor hide the latency of memory."""
    for name in ("decode", "decode of 96", "decode of fp8"):
        kernel = compiled[name][0]
        assert kernel["shared_bytes"] <= SHARED_BYTES / 3, name
        assert kernel["registers"] * 128 * 3 <= 65536, name


@pytest.mark.parametrize("gpu", GPUS)
def test_seven_programs_of_a_product_of_few_rows_fit_a_multiprocessor(
    gpu: str, compiled_for: dict[str, dict[str, list[dict[str, Any]]]]
) -> None:
    """A multiprocessor then has 21 KiB of int4 codes in flight."""
    for name in FEW_ROWS:
        (kernel,) = compiled_for[gpu][name]
        assert kernel["shared_bytes"] * 7 <= GPUS[gpu][1], name
        assert kernel["registers"] * 128 * 7 <= 65536, name
        assert kernel["stack_bytes"] == 0, name


@pytest.mark.parametrize(("gpu", "waits"), [("H100", True), ("B200", True), ("A100", False), ("L40S", False)])
def test_norms_wait_for_the_kernel_before_them_where_they_are_launched_early(
    gpu: str, waits: bool, compiled_for: dict[str, dict[str, list[dict[str, Any]]]]
) -> None:
    assert [kernel["waits"] for kernel in compiled_for[gpu][EARLY]] == [waits, waits]


def test_no_step_needs_a_kernel_that_was_not_compiled_at_the_start(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "head_dim": 64, "hidden_size": 128}
    make_checkpoint("llama", tmp_path / "llama", max_position_embeddings=8192, **heads)
    make_checkpoint("mistral", tmp_path / "mistral", max_position_embeddings=1500, sliding_window=700)
    asked = [f"{tmp_path}/llama,fp8,none", f"{tmp_path}/mistral,auto,none"]
    for name, (num_variants, missing) in run("tests.support.engine.hopper_steps", *asked).items():
        assert num_variants > 20, name
        assert missing == [], name
