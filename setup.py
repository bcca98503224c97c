"""Puts compiled CPU kernels into the wheel, so that it serves at full speed without a compiler.

`PENSTOCK_PREBUILD` names the instruction sets to compile, separated by commas ("" for none); the default is all of the
machine's kind. Without a C++ compiler (`g++`, or `CXX`) the wheel holds sources only and suits every machine; kernels
are then compiled when a server first starts. Everything else is in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

VARIABLE = "PENSTOCK_PREBUILD"
ROOM = Path("engine", "cpu")


def load_build() -> ModuleType:
    """Loads `engine.cpu.build` by itself: the packages that `engine` imports are not installed here."""
    spec = importlib.util.spec_from_file_location("kernel_build", Path(__file__).parent / ROOM / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def choose(build: ModuleType) -> list[str]:
    """Returns the instruction sets to compile. Exits where the variable names one that this machine cannot compile."""
    machine = build.machine_name(platform.machine())
    own = [isa.name for isa in build.ISAS.values() if isa.machine == machine]
    wanted = [name for name in os.environ.get(VARIABLE, ",".join(own)).split(",") if name]
    if unknown := sorted(set(wanted) - set(own)):
        raise SystemExit(f"{VARIABLE} names {', '.join(unknown)}; give some of {', '.join(own)}")
    return wanted if find_compiler() else []


def find_compiler() -> str | None:
    """Returns the compiler's path: by it the machine's cache knows the kernels that were compiled before."""
    return shutil.which(os.environ.get("CXX", "g++"))


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        build = load_build()
        folder = Path(self.build_lib) / ROOM / build.PREBUILT.name
        shutil.rmtree(folder, ignore_errors=True)  # of other sources
        if (wanted := choose(build)) and (compiler := find_compiler()):
            build.prebuild(compiler, [build.ISAS[name] for name in wanted], folder)


class DistributionWithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(choose(load_build()))


class WheelOfOneMachine(bdist_wheel):
    """A wheel with libraries is for one kind of machine, but for every Python: nothing in them is Python's."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    setup(distclass=DistributionWithKernels, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfOneMachine})
