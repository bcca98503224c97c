"""Builds the C++ kernels of `engine/cpu/csrc` once for this machine, loads them and declares their signatures.

The shared library lies in a cache folder under a digest of everything it depends on: sources, compiler, flags and
processor. Where it cannot be built, the reason is logged and the plain-torch versions serve. The kernels trust their
arguments; the callers in this room check them.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
# -ffp-contract: ISO mode would not fuse products and sums. No -ffast-math: it would break masking and rounding.
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-ffp-contract=fast", "-pthread", "-fPIC", "-w")
_BUILD_TIMEOUT_S = 120

POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "penstock_paged_attention": [POINTER] * 6 + [LONG] * 2 + [INT] * 7 + [FLOAT] + [INT] * 3,
    "penstock_write_kv": [POINTER] * 5 + [LONG] * 4 + [INT] * 4,
    "penstock_write_kv_quantized": [POINTER] * 5 + [LONG] * 4 + [INT] * 6,
    "penstock_rms_norm": [POINTER] * 3 + [LONG] + [INT] * 2 + [LONG, FLOAT] + [INT] * 2,
    "penstock_add_rms_norm": [POINTER] * 3 + [LONG, INT, FLOAT] + [INT] * 2,
    "penstock_silu_and_mul": [POINTER] * 2 + [LONG] + [INT] * 3,
    "penstock_rope": [POINTER] * 3 + [LONG] + [INT] * 2 + [LONG] + [INT] * 2,
}
# Present only where the library is built for a processor with AMX.
_TILE_SIGNATURES: dict[str, list[Any]] = {
    "penstock_pack_linear": [POINTER] * 2 + [INT] * 3,
    "penstock_linear": [POINTER] * 3 + [INT, LONG, INT],
    "penstock_decoder": [POINTER] + [INT] * 2 + [POINTER] + [INT] * 2,
}


class NativeKernels:
    """The library's functions with their C signatures, without the `penstock_` prefix."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._bind(library, _SIGNATURES)
        self.has_tiles = bool(library.penstock_has_tiles())
        if self.has_tiles:
            self._bind(library, _TILE_SIGNATURES)

    def _bind(self, library: ctypes.CDLL, signatures: dict[str, list[Any]]) -> None:
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
            setattr(self, name.removeprefix("penstock_"), function)

    def __getattr__(self, name: str) -> Any:  # only for names that `_bind` has not set
        raise AttributeError(f"the CPU kernels have no function {name!r} on this machine")


def load_native() -> NativeKernels | None:
    """Returns the kernels, or None where this machine cannot build them (`load_library` logs why)."""
    library = load_library()
    return NativeKernels(library) if library is not None else None


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Returns the shared library, building it first if needed, which blocks for some seconds; None where that fails."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        log.info("no C++ compiler (g++, or CXX): attention on CPU runs in plain torch, about 3 times slower")
        return None
    try:
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        log.warning("CPU kernels cannot be built, plain torch serves instead: %s", detail)
        return None


def _build(compiler: str) -> Path:
    sources = sorted(_SOURCES.glob("*.cpp"))
    target = _cache_folder() / _digest(compiler) / "kernels.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        objects = [built.with_name(f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor() as pool:  # a compiler for each file
            compile_source = functools.partial(_run, compiler, "-c")
            list(pool.map(compile_source, map(str, sources), itertools.repeat("-o"), map(str, objects)))
        _run(compiler, "-shared", *map(str, objects), "-o", str(built))
        built.replace(target)  # atomic: workers that start together may all build, and each finds a whole file
    log.info("built the CPU kernels: %s", target)
    return target


def _run(compiler: str, *arguments: str) -> None:
    command = [compiler, *_FLAGS, *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=10).stdout
    digest = blake2b(version + repr((compiler, _FLAGS, platform.machine(), _processor())).encode(), digest_size=16)
    for file in sorted(_SOURCES.iterdir()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """Identifies the processor that -march=native compiles for, because machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(
        next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags", "Features")
    )


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
