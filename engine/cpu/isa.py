"""Chooses among the instruction sets that the C++ kernels are built for (`engine.cpu.build`).

Each instruction set has its own library, compiled with only that set's flags, so the processor never meets an
instruction that it lacks. The best supported one is used; `PENSTOCK_CPU_ISA` forces another, so that each can be tested
and measured on a machine that supports better ones.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

from engine.cpu.build import AVX2_FEATURES, ISAS, Isa, machine_name
from penstock.errors import ConfigError

VARIABLE = "PENSTOCK_CPU_ISA"


@functools.cache
def supported() -> tuple[Isa, ...]:
    """Returns the instruction sets of this machine, the best first. Only the library knows whether the operating system
    lets a process use AMX (`NativeKernels.has_tiles`).
    """
    return choose(platform.machine(), _features())


def choose(machine: str, features: frozenset[str]) -> tuple[Isa, ...]:
    """Returns the instruction sets of a processor with these features, the best first."""
    return tuple(isa for isa in ISAS.values() if isa.machine == machine_name(machine) and isa.needs <= features)


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
        return AVX2_FEATURES if platform.machine().lower() in ("x86_64", "amd64") else frozenset({"asimd"})
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())
