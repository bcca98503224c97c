"""Runs a test with the CPU kernels of each instruction set that this machine has.

Tests in `tests/engine` request the fixture `isa`; the kernels that they load are then those of that instruction set.
"""

from __future__ import annotations

import pytest

from engine.cpu.isa import VARIABLE, supported
from engine.cpu.library import load_native

__all__ = ["isa", "needs_native"]

needs_native = pytest.mark.skipif(load_native() is None, reason="needs a C++ compiler")


@pytest.fixture(params=[isa.name for isa in supported()])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(VARIABLE, request.param)
    kernels = load_native()
    if kernels is None:
        pytest.skip(f"the kernels for {request.param} cannot be built or executed here")
    name: str = request.param
    return name
