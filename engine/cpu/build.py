"""Compiles the C++ kernels of `engine/cpu/csrc` for an instruction set, once for each machine, or into a wheel.

The shared library has a C interface and needs neither Python nor torch. It is kept in a cache folder under a digest of
everything that it depends on: sources, compiler and flags. Processes that start together wait for one build. `setup.py`
puts the libraries of all instruction sets into a wheel, under a digest of sources and flags, so that a library is used
only with the sources that it was made from.

This module imports only the standard library, because `setup.py` loads it where nothing else is installed.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
# -ffp-contract: ISO mode would not fuse products and sums. No -ffast-math: it would break masking and rounding.
FLAGS = ("-O3", "-std=c++20", "-ffp-contract=fast", "-pthread", "-fPIC", "-w")
_LINK_FLAGS = ("-s", "-static-libstdc++", "-static-libgcc")  # the library may be loaded where no compiler is installed
_BUILD_TIMEOUT_S = 120
_BUILDER_TIMEOUT_S = 2 * _BUILD_TIMEOUT_S  # another process's build


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set, the compiler's flags that select it, and the features of /proc/cpuinfo that it needs."""

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]


AVX2_FEATURES = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = AVX2_FEATURES | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni", "avx512vbmi"}
_V4 = ("-march=x86-64-v4", "-mprefer-vector-width=512")

# The best comes first. The values of `-march` are those of GCC 11 and Clang 12.
ISAS: Mapping[str, Isa] = {
    isa.name: isa
    for isa in (
        Isa("amx", "x86_64", ("-march=sapphirerapids",), _AVX512_BF16 | {"amx_tile", "amx_bf16", "avx512_fp16"}),
        Isa("avx512_bf16", "x86_64", (*_V4, "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi"), _AVX512_BF16),
        Isa("avx512", "x86_64", _V4, _AVX512),
        Isa("avx2", "x86_64", ("-march=x86-64-v3",), AVX2_FEATURES),
        Isa("neon_bf16", "aarch64", ("-march=armv8.2-a+bf16+dotprod",), frozenset({"asimd", "asimddp", "bf16"})),
        Isa("neon", "aarch64", ("-march=armv8-a",), frozenset({"asimd"})),
    )
}


def machine_name(machine: str) -> str:
    """Returns the name that `Isa.machine` has for what `platform.machine()` returned."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())


def prebuilt_path(isa: Isa, folder: Path = PREBUILT) -> Path:
    """Returns where a wheel has the library of these sources, whether it does or not."""
    return folder / f"{isa.name}-{_digest(repr((FLAGS, isa.flags)).encode())}.so"


def prebuild(compiler: str, isas: Iterable[Isa], folder: Path) -> list[Path]:
    """Builds the libraries of these instruction sets into a folder. Blocks for about ten seconds each, unless this
    machine has built them before. Returns their paths; one that cannot be built is logged and left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for isa in isas:
        try:
            library = build(compiler, isa)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("no CPU kernels for %s: %s", isa.name, getattr(error, "stderr", None) or error)
            continue
        made.append(prebuilt_path(isa, folder))
        made[-1].write_bytes(library.read_bytes())
    return made


def build(compiler: str, isa: Isa) -> Path:
    """Returns the library of this machine's cache, and builds it first if it is not there. Raises OSError or
    SubprocessError if it cannot be built."""
    target = cached_path(compiler, isa)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _only_builder(target.with_name("lock")):
        if not target.exists():
            log.info("building the CPU kernels for %s, once for this machine", isa.name)
            started_s = time.monotonic()
            _compile(compiler, (*FLAGS, *isa.flags), target)
            log.info("built the CPU kernels in %.0f s: %s", time.monotonic() - started_s, target)
    return target


def cached_path(compiler: str, isa: Isa) -> Path:
    """Returns where the library of this source, compiler and instruction set is, or will be."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=10).stdout
    digest = _digest(version + repr((compiler, FLAGS, isa.flags, _LINK_FLAGS)).encode())
    return _cache_folder() / f"{isa.name}-{digest}" / "kernels.so"


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)  # long ones take longest
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        objects = [built.with_name(f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor() as pool:  # a compiler for each file
            compile_source = partial(_run, compiler, *flags, "-c")
            list(pool.map(compile_source, map(str, sources), itertools.repeat("-o"), map(str, objects)))
        _run(compiler, *flags, "-shared", *_LINK_FLAGS, *map(str, objects), "-o", str(built))
        built.replace(target)  # atomic: whoever finds the file finds all of it


@contextmanager
def _only_builder(path: Path) -> Iterator[None]:
    """Holds the lock of a build. A builder that dies releases it at once. Waits for a builder that hangs only as long
    as a build may take, because two concurrent builds do no harm.
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


def _digest(more: bytes) -> str:
    """Returns a digest of the sources and of `more`."""
    digest = blake2b(more, digest_size=16)
    for file in sorted(path for path in SOURCES.iterdir() if path.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _cache_folder() -> Path:
    """Raises OSError for an account without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    except RuntimeError as error:
        raise FileNotFoundError(f"{error}; set XDG_CACHE_HOME to a folder for compiled kernels") from error
