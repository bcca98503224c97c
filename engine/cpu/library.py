"""Loads the C++ kernels of `engine/cpu/csrc` and declares their signatures.

The library of an instruction set comes from the wheel, or is built once for this machine (`engine.cpu.build`). If
neither works, the reason is logged and the next lower instruction set is tried, and finally the plain-torch versions.
The kernels trust their arguments; the callers in this room check them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
from typing import Any

from engine.cpu import build
from engine.cpu.isa import VARIABLE, Isa, candidates, require

log = logging.getLogger(__name__)

POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "penstock_paged_attention": [POINTER] * 6 + [LONG] * 2 + [INT] * 7 + [FLOAT] + [INT] * 3,
    "penstock_write_kv": [POINTER] * 5 + [LONG] * 4 + [INT] * 4,
    "penstock_write_kv_quantized": [POINTER] * 5 + [LONG] * 4 + [INT] * 6,
    "penstock_rms_norm": [POINTER] * 3 + [LONG] + [INT] * 2 + [LONG, FLOAT] + [INT] * 2,
    "penstock_add_rms_norm": [POINTER] * 3 + [LONG, INT, FLOAT] + [INT] * 2,
    "penstock_silu_and_mul": [POINTER] * 2 + [LONG] + [INT] * 3,
    "penstock_rope": [POINTER] * 3 + [LONG] + [INT] * 2 + [LONG] + [INT] * 2,
    "penstock_pack_linear": [POINTER] * 2 + [INT] * 3,
    "penstock_linear": [POINTER] * 3 + [INT, LONG, INT],
    "penstock_add_adapters": [POINTER] * 4 + [LONG] * 2 + [INT] * 3,
    "penstock_mask_rows": [POINTER] * 3 + [LONG] + [INT] * 3,
    "penstock_sample": [POINTER, INT],
    "penstock_decoder": [POINTER] + [INT] * 2 + [POINTER] + [INT] * 2,
}
_ANSWERING = {"penstock_decoder"}  # functions that return an int


class NativeKernels:
    """The functions of an instruction set's library with their C signatures, without the `penstock_` prefix."""

    def __init__(self, library: ctypes.CDLL, isa: Isa) -> None:
        self.isa = isa
        self.has_tiles = bool(library.penstock_has_tiles())
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, INT if name in _ANSWERING else None
            setattr(self, name.removeprefix("penstock_"), function)

    def __getattr__(self, name: str) -> Any:  # only for names that `__init__` has not set
        raise AttributeError(f"the CPU kernels have no function {name!r}")


def load_native(isa: str | None = None) -> NativeKernels | None:
    """Returns the kernels of the named instruction set, else of the best one (`engine.cpu.isa.candidates`), building
    them first if needed, which blocks for seconds. Returns None if they cannot be built, which is logged.

    Raises ConfigError for an instruction set that this machine lacks.
    """
    return _load_best(os.environ.get("CXX", "g++"), os.environ.get("PATH"), os.environ.get(VARIABLE), isa)


@functools.cache
def _load_best(cxx: str, path: str | None, forced: str | None, isa: str | None) -> NativeKernels | None:
    """Remembers the choice, because looking for a compiler takes 30 us. The parameters are what it depends on."""
    compiler = shutil.which(cxx, path=path)
    for wanted in candidates() if isa is None else (require(isa),):
        kernels = _load(compiler, wanted)
        if kernels is not None:
            return kernels
    return None


def needs_build() -> bool:
    """Returns whether `load_native` would build kernels first: neither the wheel nor the cache has them, and there is a
    compiler."""
    compiler, isas = shutil.which(os.environ.get("CXX", "g++")), candidates()
    if compiler is None or not isas or build.prebuilt_path(isas[0]).exists():
        return False
    try:
        return not build.cached_path(compiler, isas[0]).exists()
    except (OSError, subprocess.SubprocessError):  # a compiler that does not run builds nothing
        return False


def load_library() -> ctypes.CDLL | None:
    """Returns the shared library that `load_native` chooses."""
    kernels = load_native()
    return None if kernels is None else _open(shutil.which(os.environ.get("CXX", "g++")), kernels.isa)


@functools.cache
def _load(compiler: str | None, isa: Isa) -> NativeKernels | None:
    library = _open(compiler, isa)
    if library is None:
        return None
    kernels = NativeKernels(library, isa)
    if isa.name == "amx" and not kernels.has_tiles:
        log.info("the operating system refuses AMX: the CPU kernels use other instructions")
        return None
    log.info("the CPU kernels use %s", isa.name)
    return kernels


@functools.cache
def _open(compiler: str | None, isa: Isa) -> ctypes.CDLL | None:
    prebuilt = build.prebuilt_path(isa)
    if prebuilt.exists():
        try:
            return ctypes.CDLL(str(prebuilt))
        except OSError as error:  # made for another C library than this machine's
            log.warning("the wheel's CPU kernels for %s cannot be loaded: %s", isa.name, error)
    if compiler is None:
        log.info("no C++ compiler (g++, or CXX): attention on CPU runs in plain torch, about 3 times slower")
        return None
    try:
        return ctypes.CDLL(str(build.build(compiler, isa)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        log.warning("CPU kernels for %s cannot be built: %s", isa.name, detail)
        return None
