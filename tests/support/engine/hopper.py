"""Compiles Triton kernels for a GPU without having one: each launch inside `recording`, with the shapes of the call.

Nothing is computed: a launch compiles to machine code and reports the resources that it uses. `python -m
tests.support.engine.hopper` does so with the engine's kernels for a Hopper, and `... '[[86, 101376, ["decode"]]]'` with
some launches for other compute capabilities and their shared memory. It runs in its own process with
TRITON_INTERPRET=0, because Triton decides at import whether to interpret.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from engine.kernels.adapter_weights import AdapterRows, AdapterWeights
from engine.kernels.attention_interface import AttentionMetadata, KvLayer, QkNorms
from engine.kernels.expert_routing import RoutingRule
from engine.kernels.triton import common
from engine.kernels.triton.adapter_sum import add_adapters
from engine.kernels.triton.attention import tuning
from engine.kernels.triton.backend import TritonAttention, TritonOps
from engine.kernels.triton.copy_pages import copy_pages
from engine.kernels.triton.page_checksum import checksum_pages
from engine.kernels.triton.products.grouped_gemm import grouped_gemm
from engine.kernels.triton.products.quantize_rows import quantize_rows
from engine.kernels.triton.products.quantized_gemm import QuantizedGemm
from engine.kernels.triton.sample import sample_tokens
from engine.sampling.row_params import SamplingTensors
from engine.weights.quantized_weight import Kind, quantize_weight
from penstock.types import SamplingParams

_HOPPER = (90, tuning.HOPPER_SHARED_BYTES, [])  # compute capability, shared memory, all launches
_TARGET = GPUTarget("cuda", 90, 32)
_BACKEND = make_backend(_TARGET)
_QWEN3_MOE = RoutingRule("softmax", 8, normalize=True)
_DEEPSEEK_V3 = RoutingRule("sigmoid", 8, normalize=True, num_groups=8, num_chosen_groups=4, scaling=2.5)
_BINDERS: dict[JITFunction[Any], Any] = {}


@dataclass(frozen=True, slots=True)
class Compiled:
    kernel: str
    shared_bytes: int
    registers: int
    stack_bytes: int  # values that do not fit the registers
    has_wgmma: bool  # a Hopper's own matrix instruction
    has_wide_loads: bool  # copies of 16 bytes
    waits: bool  # for the kernel before it, during which it was launched


_BUILT: dict[tuple[str, str, str], Compiled] = {}  # by variant


@contextlib.contextmanager
def launching(note: Callable[[JITFunction[Any], tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Records launches instead of computing them."""

    def run(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        note(kernel, args, options)

    launch, JITFunction.run = JITFunction.run, run
    try:
        yield
    finally:
        JITFunction.run = launch


@contextlib.contextmanager
def recording() -> Iterator[list[Compiled]]:
    compiled: list[Compiled] = []
    with launching(lambda kernel, args, options: compiled.append(_compile(kernel, args, options))):
        yield compiled


def variant(kernel: JITFunction[Any], args: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, str, str]:
    """Returns a key that is equal for launches of the same compiled variant."""
    _, specialization, choices = _bind(kernel, args, options)
    return kernel.fn.__name__, str(specialization), str(choices)


def _bind(kernel: JITFunction[Any], args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any, Any]:
    if kernel not in _BINDERS:
        _BINDERS[kernel] = create_function_from_signature(kernel.signature, kernel.params, _BACKEND)
    bound: tuple[Any, Any, Any] = _BINDERS[kernel](*args, **options)
    return bound


def _compile(kernel: JITFunction[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Compiled:
    """Compiles each variant once."""
    bound, specialization, choices = _bind(kernel, args, options)
    key = variant(kernel, args, options)
    if key not in _BUILT:
        parsed, signature, constants, attributes = kernel._pack_args(_BACKEND, options, bound, specialization, choices)
        source = ASTSource(kernel, signature, constants, attributes)
        built = triton.compile(source, target=_TARGET, options=parsed.__dict__)
        registers, stack = _resources(built.asm["cubin"])
        code = built.asm["ptx"]
        is_wide = re.search(r"ld\.global\S*\.v(4\.b32|2\.b64)", code) is not None
        has_wgmma = "wgmma.mma_async" in code
        _BUILT[key] = Compiled(
            kernel.fn.__name__,
            built.metadata.shared,
            registers,
            stack,
            has_wgmma,
            is_wide,
            "griddepcontrol.wait" in code,
        )
    return _BUILT[key]


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [tool, "-res-usage", file]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _batch(num_decodes: int, chunk: int, context: int) -> AttentionMetadata:
    """Returns decodes, or one chunk if there are none."""
    num_sequences, num_tokens = max(1, num_decodes), max(num_decodes, chunk)
    return AttentionMetadata(
        page_table_BP=zeros(num_sequences, context // 16, dtype=torch.int32),
        query_start_B1=zeros(num_sequences + 1, dtype=torch.int32),
        context_lens_B=zeros(num_sequences, dtype=torch.int32),
        max_query_len=max(1, chunk),
        max_context_len=context,
        num_decodes=num_decodes,
        slot_page_T=zeros(num_tokens, dtype=torch.int64),
        slot_offset_T=zeros(num_tokens, dtype=torch.int64),
    )


def _attend(num_decodes: int, chunk: int, dim: int, stored: torch.dtype = torch.bfloat16) -> None:
    pool = zeros(4, 3, 2, 8, 16, dim).to(stored)[:, 1]
    scales = zeros(4, 2, 8, 16, dtype=torch.float32) if stored.itemsize == 1 else None
    query = zeros(max(num_decodes, chunk), 32, dim)
    TritonAttention().paged_attention(query, pool, _batch(num_decodes, chunk, 4096), 0.1, None, None, scales)


def _sample() -> None:
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.5)
    sample_tokens(zeros(4, 128_256), SamplingTensors.of([sampling] * 4, [1] * 4, 128_256, torch.device("cpu")))


def _experts(num_rows: int) -> None:
    starts = zeros(129, dtype=torch.int32)
    grouped_gemm(zeros(num_rows, 2048), zeros(128, 1536, 2048), starts, zeros(num_rows, dtype=torch.int64))


def _fp8_experts(num_rows: int) -> None:
    starts, scales = zeros(129, dtype=torch.int32), zeros(128, 16, 1536, dtype=torch.float32)
    codes = zeros(128, 1536, 2048).to(torch.float8_e4m3fn)
    rows = zeros(num_rows, dtype=torch.int64)
    grouped_gemm(zeros(num_rows, 2048), codes, starts, rows, scales_EGO=scales)


def _routes(num_tokens: int, num_experts: int, rule: RoutingRule) -> None:
    """Compiles routing, and the sum of the experts' outputs of width 2048."""
    ops, bias_E = TritonOps(), zeros(num_experts, dtype=torch.float32) if rule.scoring == "sigmoid" else None
    routing = ops.route_experts(zeros(num_tokens, num_experts), rule, bias_E)
    ops.combine_experts(zeros(num_tokens * rule.num_chosen, 2048), routing, is_weighted=True)


def _layer() -> None:
    ops = TritonOps()
    ops.add_rms_norm(zeros(8, 4096), zeros(8, 4096), zeros(4096), 1e-5)
    ops.silu_and_mul(zeros(8, 28672))
    layer = KvLayer(zeros(4, 3, 2, 8, 16, 128)[:, 1])
    angles = zeros(8, 2, 64, dtype=torch.float32)
    norms = QkNorms(zeros(128), zeros(128), 1e-6)
    TritonAttention().store_qkv(zeros(8, 48, 128), angles, norms, layer, _batch(8, 0, 64), ops)


def _early_norms() -> None:
    with mock.patch.object(common, "launches_early", return_value=_TARGET.arch >= 90):
        TritonOps().add_rms_norm(zeros(8, 4096), zeros(8, 4096), zeros(4096), 1e-5)
        TritonOps().rms_norm(zeros(8, 32, 128), zeros(128), 1e-5)


def _copy_pages() -> None:
    copy_pages(zeros(4, 4096, dtype=torch.int64), zeros(4, 4096, dtype=torch.int64), [1], [2])


def _adapters(rank: int) -> None:
    """Compiles what adds 8 adapters to the fused projection of an 8B Llama's queries, keys and values."""
    weights = AdapterWeights.zeros(9, rank, 4096, (4096, 5120, 6144), torch.bfloat16, zeros(1).device)
    add_adapters(zeros(64, 6144), zeros(64, 4096), weights, AdapterRows.by_slot(zeros(64, dtype=torch.int64), 9))


def _checksum_pages() -> None:
    checksum_pages(zeros(4, 4096, dtype=torch.int32), [1, 2])


def _quantized(kind: Kind, num_rows: int) -> None:
    QuantizedGemm(quantize_weight(zeros(4096, 1024), kind), None)(zeros(num_rows, 1024))


def _rows_in_fp8() -> None:
    for width in (4096, 14336):
        quantize_rows(zeros(8, width))


def _write_codes(stored: torch.dtype) -> None:
    pool, scales = zeros(4, 3, 2, 8, 16, 128).to(stored)[:, 1], zeros(4, 2, 8, 16, dtype=torch.float32)
    TritonAttention().write_kv(zeros(8, 8, 128), zeros(8, 8, 128), pool, _batch(8, 0, 64), scales)


def _latent(num_decodes: int, chunk: int) -> None:
    pool = zeros(4, 3, 2, 1, 64, 288)[:, 1]
    query = zeros(max(num_decodes, chunk), 128, 576)
    TritonAttention().latent_attention(query, pool, _batch(num_decodes, chunk, 4096), 0.1, 512)


LAUNCHES: dict[str, Callable[[], None]] = {
    "decode": lambda: _attend(4, 0, 128),
    "decode of 96": lambda: _attend(4, 0, 96),
    "decode of fp8": lambda: _attend(4, 0, 128, torch.float8_e4m3fn),
    "prefill": lambda: _attend(0, 2048, 128),
    "prefill of 64": lambda: _attend(0, 2048, 64),
    "prefill of 96": lambda: _attend(0, 2048, 96),
    "prefill of 256": lambda: _attend(0, 2048, 256),
    "prefill of fp8": lambda: _attend(0, 2048, 128, torch.float8_e4m3fn),
    "prefill of fp8, 64": lambda: _attend(0, 2048, 64, torch.float8_e4m3fn),
    "latents": lambda: _latent(4, 0),
    "latents of a chunk": lambda: _latent(0, 2048),
    "layer": _layer,
    "norms, launched early": _early_norms,
    "sampling": _sample,
    "copies of pages": _copy_pages,
    "checksums of pages": _checksum_pages,
    "adapters of rank 8": lambda: _adapters(8),
    "adapters of rank 64": lambda: _adapters(64),
    "experts, few rows": lambda: _experts(16),
    "experts, many rows": lambda: _experts(128 * 128),
    "experts of fp8": lambda: _fp8_experts(128 * 128),
    "routes of few tokens": lambda: _routes(4, 128, _QWEN3_MOE),
    "routes of 32 tokens": lambda: _routes(32, 128, _QWEN3_MOE),
    "routes of many tokens": lambda: _routes(8192, 128, _QWEN3_MOE),
    "routes in groups": lambda: _routes(8192, 256, _DEEPSEEK_V3),
    "int4, few rows": lambda: _quantized("int4", 1),
    "int4, 64 rows": lambda: _quantized("int4", 64),
    "int4, many rows": lambda: _quantized("int4", 256),
    "int8, few rows": lambda: _quantized("int8", 1),
    "fp8, many rows": lambda: _quantized("fp8", 256),
    "rows in fp8": _rows_in_fp8,
    "writes of fp8": lambda: _write_codes(torch.float8_e4m3fn),
    "writes of int8": lambda: _write_codes(torch.int8),
}


def compile_launches(gpu: tuple[int, int, Sequence[str]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the compiled variants by the name of the launch. Turns this process to that GPU for good."""
    global _TARGET, _BACKEND
    capability, shared_bytes, names = gpu
    _TARGET = GPUTarget("cuda", capability, 32)
    _BACKEND = make_backend(_TARGET)
    found = {}
    tuning.shared_bytes = lambda device: shared_bytes  # type: ignore[assignment]  # else that of the device, a CPU
    for name in names or LAUNCHES:
        with recording() as compiled, mock.patch.object(common, "num_multiprocessors", return_value=132):
            LAUNCHES[name]()
        found[name] = [asdict(kernel) for kernel in compiled]
    return found


def main(gpus: Sequence[tuple[int, int, Sequence[str]]]) -> int:
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # a process for each
        json.dump(pool.map(compile_launches, gpus, chunksize=1), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else [_HOPPER]))
