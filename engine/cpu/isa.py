"""The instruction sets that the C++ kernels are built for, and which of them this machine executes.

Each instruction set has its own library, compiled with only that set's flags, so the processor never meets an
instruction that it lacks. The best supported one is used; `PENSTOCK_CPU_ISA` forces another, so that each can be tested
and measured on a machine that supports better ones.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

VARIABLE = "PENSTOCK_CPU_ISA"


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set, the compiler's flags that select it, and the features of /proc/cpuinfo that it needs."""

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni", "avx512vbmi"}
_V4 = ("-march=x86-64-v4", "-mprefer-vector-width=512")

# The best comes first. The values of `-march` are those of GCC 11 and Clang 12.
ISAS: Mapping[str, Isa] = {
    isa.name: isa
    for isa in (
        Isa("amx", "x86_64", ("-march=sapphirerapids",), _AVX512_BF16 | {"amx_tile", "amx_bf16", "avx512_fp16"}),
        Isa("avx512_bf16", "x86_64", (*_V4, "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi"), _AVX512_BF16),
        Isa("avx512", "x86_64", _V4, _AVX512),
        Isa("avx2", "x86_64", ("-march=x86-64-v3",), _AVX2),
        Isa("neon_bf16", "aarch64", ("-march=armv8.2-a+bf16+dotprod",), frozenset({"asimd", "asimddp", "bf16"})),
        Isa("neon", "aarch64", ("-march=armv8-a",), frozenset({"asimd"})),
    )
}


@functools.cache
def supported() -> tuple[Isa, ...]:
    """Returns the instruction sets of this machine, the best first. Only the library knows whether the operating system
    lets a process use AMX (`NativeKernels.has_tiles`).
    """
    return choose(platform.machine(), _features())


def choose(machine: str, features: frozenset[str]) -> tuple[Isa, ...]:
    """Returns the instruction sets of a processor with these features, the best first."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())
    return tuple(isa for isa in ISAS.values() if isa.machine == machine and isa.needs <= features)


def candidates() -> tuple[Isa, ...]:
    """Returns the instruction sets to try in order: the one that `PENSTOCK_CPU_ISA` names, else all supported ones.

    Raises ConfigError if the variable names one that is unknown or that this machine lacks.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return supported()
    return (require(name),)


def require(name: str) -> Isa:
    """Returns the named instruction set. Raises ConfigError for one that is unknown or that this machine lacks."""
    names = ", ".join(isa.name for isa in supported()) or "none"
    if name not in ISAS:
        raise ConfigError(f"{VARIABLE} = {name!r} is not an instruction set; this machine has: {names}")
    if ISAS[name] not in supported():
        lacking = ", ".join(sorted(ISAS[name].needs - _features())) or f"a processor of the kind {ISAS[name].machine}"
        raise ConfigError(f"{VARIABLE} = {name!r}: this machine lacks {lacking}; it has: {names}")
    return ISAS[name]


@functools.cache
def _features() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux: assume what every processor of the kind has
        return _AVX2 if platform.machine().lower() in ("x86_64", "amd64") else frozenset({"asimd"})
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())
