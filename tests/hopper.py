"""Compiles Triton kernels for a Hopper without one: what is launched inside `recording`, with the shapes of the call.

Run in a process of its own with TRITON_INTERPRET=0, since the choice to interpret is made when a kernel is imported.
Nothing is computed: a launch compiles to machine code and says what that takes.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

SHARED_BYTES = 227 * 1024  # what a program may have of a multiprocessor
_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", torch.int8: "*i8", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compiled:
    kernel: str
    shared_bytes: int
    registers: int
    stack_bytes: int  # what does not fit the registers
    has_wgmma: bool  # a Hopper's own matrix instruction


@contextlib.contextmanager
def recording() -> Iterator[list[Compiled]]:
    compiled: list[Compiled] = []

    def run(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(_compile(kernel, args, options))

    launch, JITFunction.run = JITFunction.run, run
    try:
        yield compiled
    finally:
        JITFunction.run = launch


def _compile(kernel: JITFunction[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Compiled:
    names = [parameter.name for parameter in kernel.params]
    values = dict(zip(names, args, strict=False)) | {name: options[name] for name in names if name in options}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value == 1 if not isinstance(value, torch.Tensor) else False:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    choices = {name: value for name, value in options.items() if name in ("num_warps", "num_stages")}
    built = triton.compile(source, GPUTarget("cuda", 90, 32), options=choices)
    registers, stack = _resources(built.asm["cubin"])
    return Compiled(kernel.fn.__name__, built.metadata.shared, registers, stack, "wgmma.mma_async" in built.asm["ptx"])


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [tool, "-res-usage", file]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])
