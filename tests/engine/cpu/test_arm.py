"""Compares the kernels for ARM, cross-compiled and run in an emulator where both are installed, with torch on the
host."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.cpu import build, int8_products
from engine.cpu.build import ISAS
from engine.cpu.linear import pack_quads
from engine.kernels.reference import TorchAttention
from tests.engine.kernels.test_attention import TOLERANCE, Problem, make_problem
from tests.engine.weights.test_int8_activations import any_weight

_COMPILER, _EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_MISSING = [tool for tool in (_COMPILER, _EMULATOR) if shutil.which(tool) is None]
_ARM = [isa.name for isa in ISAS.values() if isa.machine == "aarch64"]
_TIMEOUT_S = 300.0

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        bool(_MISSING), reason=f"needs {' and '.join(_MISSING)} (Debian: g++-aarch64-linux-gnu, qemu-user)"
    ),
]


@pytest.mark.parametrize("isa", _ARM)
def test_products_and_attention_equal_torch_on_arm(isa: str, tmp_path: Path) -> None:
    weight_OI, rows_TI = whole_numbers(48, 160), whole_numbers(19, 160)
    problem = make_problem([(1, 70), (1, 16), (40, 100)], dtype=torch.bfloat16)
    problem.pool_layer = problem.pool_layer.contiguous()
    any_rows_TI = 3 * torch.randn(19, 160, generator=torch.Generator().manual_seed(1)).bfloat16()
    integers = {kind: any_weight(kind, 48, 160, 160) for kind in ("int8", "int4")}
    write_arrays(tmp_path, weight_OI, rows_TI, problem)
    write(tmp_path, "any_rows", any_rows_TI)
    write(tmp_path, "weight_float32", weight_OI.float())
    write(tmp_path, "rows_float32", rows_TI.float())
    for kind, weight in integers.items():
        write(tmp_path, f"{kind}_codes", pack_quads(weight))
        write(tmp_path, f"{kind}_scales", weight.scales_OG)
    run_on_arm(isa, tmp_path)

    # Small whole numbers make every sum exact in float32 in any order, so it is rounded once.
    product_TO = rows_TI.float() @ weight_OI.float().T
    assert torch.equal(read_bf16(tmp_path / "product").view(19, 48), product_TO.bfloat16())
    float32 = (tmp_path / "product_float32").read_bytes()
    assert torch.equal(torch.frombuffer(bytearray(float32), dtype=torch.float32).view(19, 48), product_TO)
    for kind, weight in integers.items():
        wanted = int8_products.multiply(any_rows_TI, weight, None)
        assert torch.equal(read_bf16(tmp_path / f"{kind}_product").view_as(wanted), wanted)
    expected = TorchAttention().paged_attention(problem.q_TNH, problem.pool_layer, problem.meta, 0.125, None)
    attended = read_bf16(tmp_path / "attended").view_as(expected)
    tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(attended, expected, atol=tolerance, rtol=tolerance)


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(shape[0])).bfloat16()


def write_arrays(folder: Path, weight_OI: torch.Tensor, rows_TI: torch.Tensor, problem: Problem) -> None:
    meta, pool = problem.meta, problem.pool_layer
    _, _, num_kv_heads, page_size, head_dim = pool.shape
    shape = [meta.num_sequences, meta.page_table_BP.shape[1], problem.q_TNH.shape[1], num_kv_heads, page_size, head_dim]
    arrays = {
        "linear_shape": torch.tensor([len(rows_TI), *weight_OI.shape], dtype=torch.int32),
        "weight": weight_OI,
        "rows": rows_TI,
        "attention_shape": torch.tensor(shape, dtype=torch.int32),
        "q": problem.q_TNH,
        "pool": pool,
        "table": meta.page_table_BP,
        "starts": meta.query_start_B1,
        "contexts": meta.context_lens_B,
    }
    for name, array in arrays.items():
        write(folder, name, array)


def write(folder: Path, name: str, array: torch.Tensor) -> None:
    (folder / name).write_bytes(array.contiguous().view(torch.uint8).numpy().tobytes())


def run_on_arm(isa: str, folder: Path) -> None:
    """Compiles the kernels and the driver for ARM with the library's flags but -O1, which compiles faster, and runs
    them."""
    flags = [flag for flag in build.FLAGS if flag != "-O3"] + ["-O1", *ISAS[isa].flags]
    kernels = build.SOURCES
    sources = [kernels / "linear.cpp", kernels / "paged_attention.cpp", Path(__file__).with_name("arm_driver.cpp")]
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    compile_one = [_COMPILER, *flags, f"-I{kernels}", "-c"]
    commands = [[*compile_one, str(source), "-o", made] for source, made in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(run, commands))
    run([_COMPILER, "-static", *objects, "-pthread", "-o", str(folder / "driver")])
    run([_EMULATOR, "-cpu", "max", str(folder / "driver"), str(folder)])


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr


def read_bf16(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.bfloat16)
