"""Tests products with quantized weights whose inputs several programs share: the same values, in one order of sums."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.triton import common
from engine.kernels.triton.products import quantized_gemm
from engine.kernels.triton.products.gemm_launch import GemmLaunch, choose_launch
from engine.kernels.triton.products.quantized_gemm import QuantizedGemm
from engine.weights.quantized_weight import Kind, quantize_weight
from tests.engine.kernels.products.test_grouped_gemm import DEVICE, uniform_dot

__all__ = ["uniform_dot"]
_HOPPER, _STEP_BYTES = 132, {"int4": 1024, "int8": 2048}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[GemmLaunch]:
    """Returns the launches chosen in the test, as for a device with 132 multiprocessors."""
    found: list[GemmLaunch] = []

    def choose(*args: int) -> GemmLaunch:
        found.append(choose_launch(*args))
        return found[-1]

    monkeypatch.setattr(common, "num_multiprocessors", lambda device: _HOPPER)
    monkeypatch.setattr(quantized_gemm, "choose_launch", choose)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_parts_of_the_inputs_add_up_to_the_dequantized_product(
    kind: Kind, dtype: torch.dtype, launches: list[GemmLaunch]
) -> None:
    torch.manual_seed(3)
    weight = quantize_weight(torch.randn(75, 1152) / 34, kind).to(DEVICE)
    bias_O = torch.randn(75, device=DEVICE).to(dtype)
    product = QuantizedGemm(weight, bias_O)
    for num_rows in (1, 16, 17, 33, 65, 129):
        x_TI = torch.randn(num_rows, 1152, device=DEVICE).to(dtype)
        wanted = x_TI.float() @ weight.dequantize(dtype).float().T + bias_O.float()
        tolerance = 2e-5 if dtype == torch.float32 else 3e-2  # the interpreter truncates to bf16, while a GPU rounds
        for _ in range(2):  # the second call finds the counters as the first one left them
            torch.testing.assert_close(product(x_TI).float(), wanted, rtol=tolerance, atol=tolerance)
    assert [launch.parts for launch in launches[::2]] == [4, 4, 4, 4, 4, 1]


@pytest.mark.usefixtures("uniform_dot")
def test_a_row_has_the_same_bits_in_every_batch_of_up_to_64_rows(launches: list[GemmLaunch]) -> None:
    torch.manual_seed(4)
    product = QuantizedGemm(quantize_weight(torch.randn(40, 768), "int4").to(DEVICE), None)
    x_TI = torch.randn(64, 768, device=DEVICE)
    all_TO = product(x_TI)
    for first, last in ((0, 1), (63, 64), (5, 21), (0, 32), (9, 60)):
        assert torch.equal(product(x_TI[first:last]), all_TO[first:last])
    assert {launch.parts for launch in launches} == {3}


def test_products_of_an_8b_model_fill_a_hopper() -> None:
    """Names the projections of Llama-3.1-8B by outputs and inputs."""

    def parts(num_rows: int, kind: str) -> list[int]:
        shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
        return [choose_launch(num_rows, out, ins // 64, _STEP_BYTES[kind], _HOPPER).parts for out, ins in shapes]

    assert parts(1, "int4") == parts(16, "int4") == parts(64, "int4") == [5, 8, 1, 8]
    assert parts(1, "int8") == [3, 4, 1, 4]
    assert parts(128, "int4") == [2, 4, 1, 4]
    assert parts(129, "int4") == parts(8192, "int8") == [1, 1, 1, 1]


@pytest.mark.parametrize("num_multiprocessors", [1, 16, 84, 108, 142, 148])
def test_every_part_has_inputs_on_every_device(num_multiprocessors: int) -> None:
    for width_out in (1, 33, 1024, 151936):
        for num_steps in (1, 3, 4, 7, 64, 448):
            for num_rows in (1, 40, 100, 1000):
                launch = choose_launch(num_rows, width_out, num_steps, 1024, num_multiprocessors)
                assert 1 <= launch.parts <= max(1, num_steps // 4)
                assert launch.tile_m >= min(num_rows, 128)
                assert launch.parts == 1 or launch.tile_m >= num_rows, "counters are of one tile of rows"
