"""Builds the C++ kernels of `engine/kernels/cpu` for this very machine, once, and loads them.

The library lies in a cache folder under a digest of everything that it depends on: sources, compiler, flags, processor.
Where it cannot be built the reason is logged and the plain-torch twins serve.
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

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "cpu"
# -ffp-contract: ISO mode would keep products and sums apart. No -ffast-math: it would break masking and rounding.
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-ffp-contract=fast", "-pthread", "-fPIC", "-w")
_BUILD_TIMEOUT_S = 120


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The kernels, built where they are not yet, for some seconds; None where that is impossible."""
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
            compile_one = functools.partial(_run, compiler, "-c")
            list(pool.map(compile_one, map(str, sources), itertools.repeat("-o"), map(str, objects)))
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
    """What -march=native goes by: a home folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(
        next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags", "Features")
    )


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
