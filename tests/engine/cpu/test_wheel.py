"""Tests that a wheel holds compiled kernels and serves with them on a machine without a compiler."""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine.cpu import build, library
from engine.cpu.isa import supported
from engine.engine import Engine
from engine.generate import generate
from penstock.config import EngineConfig
from tests.support.engine.isas import needs_native
from tests.support.serving import GREEDY, SALT

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "penstock-tiny"
PROMPT = [3 + i * i % 300 for i in range(40)]
_TIMEOUT_S = 280.0
_SERVE = f"""
from engine.cpu.library import load_native, needs_build
from engine.engine import Engine
from engine.generate import generate
from penstock.config import EngineConfig
from penstock.types import SamplingParams
kernels = load_native()
print(kernels.isa.name if kernels else None, needs_build())
engine = Engine.load(EngineConfig(model={str(MODEL)!r}, num_pages=16, num_threads=1, dtype="bfloat16"))
print(generate(engine, {PROMPT}, SamplingParams(max_tokens={GREEDY.max_tokens}, temperature=0.0, ignore_eos=True)))
"""


def make_wheel(folder: Path, isas: str, cache: Path) -> zipfile.ZipFile:
    """Builds a wheel of this checkout's packages as pip does, with this cache of compiled kernels."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("engine", "penstock", "models"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    variables = {**os.environ, "PENSTOCK_PREBUILD": isas, "XDG_CACHE_HOME": str(cache)}
    made = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)], env=variables, capture_output=True, timeout=_TIMEOUT_S
    )
    assert made.returncode == 0, made.stderr
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def needed(compiler: str | None) -> str:
    assert compiler is not None
    return compiler


def libraries(wheel: zipfile.ZipFile) -> list[str]:
    return [Path(name).name for name in wheel.namelist() if name.endswith(".so")]


@needs_native
@pytest.mark.processes
def test_a_wheel_serves_without_a_compiler(tmp_path: Path) -> None:
    isa = supported()[0] if library.load_native(supported()[0].name) is not None else supported()[1]
    compiled = build.cached_path(needed(shutil.which(os.environ.get("CXX", "g++"))), isa)
    known = tmp_path / "known" / "penstock"
    shutil.copytree(compiled.parent, known / compiled.parent.name)
    wheel = make_wheel(tmp_path / "made", isa.name, known.parent)
    assert [path.name for path in known.iterdir()] == [compiled.parent.name], "nothing was compiled again"
    assert libraries(wheel) == [build.prebuilt_path(isa).name]
    assert "-py3-none-linux_" in str(wheel.filename)
    wheel.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if name != "CXX"},
        "PATH": str(tmp_path / "empty"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(tmp_path / "installed"),
        "PENSTOCK_CPU_ISA": isa.name,
    }
    command = [sys.executable, "-c", _SERVE]
    served = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    assert served.returncode == 0, served.stderr
    engine = Engine.load(EngineConfig(model=str(MODEL), num_pages=16, num_threads=1, dtype="bfloat16"))
    assert served.stdout.splitlines() == [f"{isa.name} False", str(generate(engine, PROMPT, GREEDY, SALT))]
    assert not (tmp_path / "cache" / "penstock").exists(), "nothing was compiled"


def test_a_wheel_built_without_a_compiler_holds_only_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = runpy.run_path(str(ROOT / "setup.py"))["choose"]
    own = [isa.name for isa in build.ISAS.values() if isa.machine == build.machine_name(platform.machine())]
    monkeypatch.setenv("CXX", sys.executable)  # any executable that is not a compiler
    assert choose(build) == own
    monkeypatch.setenv("PENSTOCK_PREBUILD", own[-1])
    assert choose(build) == own[-1:]
    monkeypatch.setenv("PENSTOCK_PREBUILD", "mmx")
    with pytest.raises(SystemExit, match="PENSTOCK_PREBUILD names mmx; give some of "):
        choose(build)
    monkeypatch.setenv("PENSTOCK_PREBUILD", "")
    assert choose(build) == []
    monkeypatch.delenv("PENSTOCK_PREBUILD")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert choose(build) == []


def test_a_library_of_other_sources_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the library depends on the sources, so an edited source is not found."""
    isa = build.ISAS["avx2"]
    before = build.prebuilt_path(isa, tmp_path)
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    assert build.prebuilt_path(isa, tmp_path) == before
    with (tmp_path / "csrc" / "simd.h").open("a") as file:
        file.write("// edited\n")
    assert build.prebuilt_path(isa, tmp_path) != before
