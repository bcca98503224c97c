"""Tests the choice of an instruction set, and builds of its kernels by several processes at once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cpu import build, library
from engine.cpu.build import ISAS
from engine.cpu.isa import VARIABLE, choose, supported
from engine.cpu.library import load_native
from penstock.errors import ConfigError
from tests.support.engine.isas import needs_native

_DEADLINE_S = 120.0


def names(machine: str, features: set[str]) -> list[str]:
    return [isa.name for isa in choose(machine, frozenset(features))]


def test_a_processor_supports_its_instruction_set_and_all_lower_ones() -> None:
    for name in ("amx", "avx512_bf16", "avx512", "avx2"):
        own = names("x86_64", set(ISAS[name].needs))
        assert own[0] == name
        assert own == [isa for isa in ("amx", "avx512_bf16", "avx512", "avx2") if isa in own]
    assert names("x86_64", {"avx2"}) == []  # FMA is missing
    assert names("AMD64", set(ISAS["avx512"].needs)) == ["avx512", "avx2"]
    assert names("arm64", {"asimd", "asimddp", "bf16"}) == ["neon_bf16", "neon"]
    assert names("aarch64", {"asimd"}) == ["neon"]
    assert names("riscv64", {"asimd", "avx2"}) == []


def test_higher_instruction_sets_need_the_features_of_lower_ones() -> None:
    """A set that lists fewer features than a lower one would be chosen on processors that cannot execute it."""
    assert ISAS["avx2"].needs < ISAS["avx512"].needs < ISAS["avx512_bf16"].needs < ISAS["amx"].needs
    assert ISAS["neon"].needs < ISAS["neon_bf16"].needs


@pytest.mark.usefixtures("isa")
def test_the_configured_instruction_set_is_used(isa: str) -> None:
    kernels = load_native()
    assert kernels is not None
    assert kernels.isa.name == isa
    assert kernels.has_tiles == (isa == "amx")


@pytest.mark.parametrize("name", [isa for isa in ISAS if isa not in [isa.name for isa in supported()]])
def test_a_missing_instruction_set_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(ConfigError, match=f"PENSTOCK_CPU_ISA = '{name}': this machine lacks"):
        load_native()


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "mmx")
    with pytest.raises(ConfigError, match="PENSTOCK_CPU_ISA = 'mmx' is not an instruction set; this machine has: "):
        load_native()


@needs_native
@pytest.mark.processes
@pytest.mark.parametrize("dies", [False, True])
def test_processes_that_start_together_build_once(tmp_path: Path, dies: bool) -> None:
    """The compiler is a script that counts its links and makes empty files; the first builder may be killed halfway."""
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo one; exit; fi\n'
        f'case "$*" in *-shared*) echo link >> {calls};; esac\n'
        f"if [ -e {tmp_path}/die ]; then rm {tmp_path}/die; kill -9 $PPID; fi\n"
        "for last; do :; done\n"
        'echo > "$last"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    if dies:
        (tmp_path / "die").touch()
    code = "from engine.cpu import build, isa; build.build(build.os.environ['CXX'], isa.supported()[0])"
    environment = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    workers = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    codes = sorted(worker.wait(_DEADLINE_S) for worker in workers)
    assert codes == ([-9, 0, 0] if dies else [0, 0, 0])
    assert calls.read_text().split() == ["link"]
    assert len(list((tmp_path / "cache").rglob("kernels.so"))) == 1


def test_a_build_is_needed_until_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho compiler 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    isas = supported()
    assert library.needs_build() is bool(isas)
    if isas:
        target = build.cached_path(str(compiler), isas[0])
        target.parent.mkdir(parents=True)
        target.touch()
        assert not library.needs_build()
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert not library.needs_build(), "nothing can be built"


@pytest.mark.processes
def test_an_account_without_a_home_gets_a_warning_and_plain_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(build, "prebuilt_path", lambda isa: tmp_path / "none.so")
    monkeypatch.setattr(library.shutil, "which", lambda name: sys.executable)  # answers --version as a compiler does
    isa = ISAS["avx2"]
    assert library._open.__wrapped__(sys.executable, isa) is None
    assert "set XDG_CACHE_HOME" in caplog.text
    assert not library.needs_build()
