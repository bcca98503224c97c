"""Builds the C++ kernels of `engine/cpu/csrc` once for each instruction set, loads them and declares their signatures.

The shared library lies in a cache folder under a digest of everything it depends on: sources, compiler and flags.
Processes that start together wait for one build. Where it cannot be built, the reason is logged and the next lower
instruction set is used, and finally the plain-torch versions. The kernels trust their arguments; the callers in this
room check them.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import itertools
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from engine.cpu.isa import Isa, candidates, require

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
# -ffp-contract: ISO mode would not fuse products and sums. No -ffast-math: it would break masking and rounding.
_FLAGS = ("-O3", "-std=c++20", "-ffp-contract=fast", "-pthread", "-fPIC", "-w")
_BUILD_TIMEOUT_S = 120
_BUILDER_TIMEOUT_S = 2 * _BUILD_TIMEOUT_S  # another process's build

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
    "penstock_add_adapters": [POINTER] * 7 + [LONG] * 2 + [INT] * 6,
    "penstock_mask_rows": [POINTER] * 3 + [LONG] + [INT] * 3,
    "penstock_decoder": [POINTER] + [INT] * 2 + [POINTER] + [INT] * 2,
}


class NativeKernels:
    """The functions of an instruction set's library with their C signatures, without the `penstock_` prefix."""

    def __init__(self, library: ctypes.CDLL, isa: Isa) -> None:
        self.isa = isa
        self.has_tiles = bool(library.penstock_has_tiles())
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
            setattr(self, name.removeprefix("penstock_"), function)

    def __getattr__(self, name: str) -> Any:  # only for names that `__init__` has not set
        raise AttributeError(f"the CPU kernels have no function {name!r}")


def load_native(isa: str | None = None) -> NativeKernels | None:
    """Returns the kernels of the named instruction set, else of the best one (`engine.cpu.isa.candidates`), building
    them first if needed, which blocks for some seconds; None where they cannot be built, which is logged.

    Raises ConfigError for an instruction set that this machine lacks.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    for wanted in candidates() if isa is None else (require(isa),):
        kernels = _load(compiler, wanted)
        if kernels is not None:
            return kernels
    return None


def needs_build() -> bool:
    """Returns whether `load_native` would build kernels first: there is a compiler and nothing that it has built."""
    compiler, isas = shutil.which(os.environ.get("CXX", "g++")), candidates()
    if compiler is None or not isas:
        return False
    try:
        return not _target(compiler, isas[0]).exists()
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
    if compiler is None:
        log.info("no C++ compiler (g++, or CXX): attention on CPU runs in plain torch, about 3 times slower")
        return None
    try:
        return ctypes.CDLL(str(_build(compiler, isa)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        log.warning("CPU kernels for %s cannot be built: %s", isa.name, detail)
        return None


def _build(compiler: str, isa: Isa) -> Path:
    target = _target(compiler, isa)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _only_builder(target.with_name("lock")):
        if not target.exists():
            log.info("building the CPU kernels for %s, once for this machine", isa.name)
            started_s = time.monotonic()
            _compile(compiler, (*_FLAGS, *isa.flags), target)
            log.info("built the CPU kernels in %.0f s: %s", time.monotonic() - started_s, target)
    return target


def _target(compiler: str, isa: Isa) -> Path:
    """Returns where the library of this source, compiler and instruction set is, or will be."""
    return _cache_folder() / f"{isa.name}-{_digest(compiler, (*_FLAGS, *isa.flags))}" / "kernels.so"


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    sources = sorted(_SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)  # long ones take longest
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        objects = [built.with_name(f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor() as pool:  # a compiler for each file
            compile_source = functools.partial(_run, compiler, *flags, "-c")
            list(pool.map(compile_source, map(str, sources), itertools.repeat("-o"), map(str, objects)))
        _run(compiler, *flags, "-shared", *map(str, objects), "-o", str(built))
        built.replace(target)  # atomic: whoever finds the file finds all of it


@contextmanager
def _only_builder(path: Path) -> Iterator[None]:
    """Holds the lock of a build. A builder that dies releases it at once. A builder that hangs is waited for only as
    long as a build may take, because two concurrent builds do no harm.
    """
    with path.open("w") as file:
        waiter = threading.Thread(target=_lock, args=(file,), daemon=True)
        waiter.start()
        waiter.join(_BUILDER_TIMEOUT_S)
        yield


def _lock(file: IO[str]) -> None:
    fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=10).stdout
    digest = blake2b(version + repr((compiler, flags)).encode(), digest_size=16)
    for file in sorted(_SOURCES.iterdir()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
