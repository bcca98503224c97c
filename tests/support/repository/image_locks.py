"""Makes the lists of packages that the images install: every version and the hashes of its wheels.

`python -m tests.support.repository.image_locks --write` asks uv and PyPI, and writes deploy/docker/locks/. Versions are
those of constraints.txt; the CPU build of torch has a suffix.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ROOT / "deploy" / "docker" / "locks"
EXTRAS = {"cpu": ("serve", "tracing"), "cuda": ("serve", "tracing", "nixl")}
_CPU_WHEELS = os.environ.get("TORCH_CPU_WHEELS", "https://download.pytorch.org/whl/cpu/torch/")
_PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_31")
_HEADER = "# Made by `python -m tests.support.repository.image_locks --write`: change constraints.txt instead.\n"


def pins(text: str) -> dict[str, str]:
    """Returns versions by normalized name."""
    found = re.findall(r"(?m)^([A-Za-z0-9._-]+)==([^\s\\]+)", text)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def unhashed(text: str) -> list[str]:
    """Returns the packages of a list that have no hash."""
    entries = re.findall(r"(?m)^([A-Za-z0-9._-]+)==\S+((?: \\\n +--hash=sha256:[0-9a-f]{64})*)$", text)
    listed = set(pins(text))
    hashed = {re.sub(r"[-_.]+", "-", name).lower() for name, hashes in entries if hashes}
    return sorted(listed - hashed)


def make(variant: str) -> str:
    """Returns the list of one image. Blocks on the network; raises CalledProcessError with uv's message."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, build = ROOT / "constraints.txt", Path(folder, "build.txt")
        build.write_text("setuptools\n")  # builds the project itself, in an environment that can fetch nothing
        command = ["uv", "pip", "compile", "pyproject.toml", str(build), "--constraint", str(constraints), *_PLATFORM]
        command += ["--generate-hashes", "--only-binary", ":all:", "--no-header", "--no-annotate", "--quiet"]
        command += ["--default-index", "https://pypi.org/simple"]
        for extra in EXTRAS[variant]:
            command += ["--extra", extra]
        if variant == "cpu":
            command += ["--find-links", _CPU_WHEELS]
        return _HEADER + subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "usage: python -m tests.support.repository.image_locks --write"
    for name in EXTRAS:
        (LOCKS / f"{name}.txt").write_text(make(name))
