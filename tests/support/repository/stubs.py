"""Generates the gRPC stubs under penstock/v1 from proto/, or checks that they are fresh.

`python -m tests.support.repository.stubs` fails when a stub is stale; with `--write` it regenerates all of them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import google.rpc

ROOT = Path(__file__).resolve().parents[3]
STUBS = Path("penstock/v1")
# The generator writes its own version into the file; stubs made by another patch release are just as fresh.
_VERSIONS = re.compile(r"(?m)^# Protobuf Python Version: .*$|GRPC_GENERATED_VERSION = '.*'|^    \d+,$")


def generate(into: Path) -> None:
    """Writes every stub below `into`."""
    includes = [ROOT / "proto", Path(next(iter(google.rpc.__path__))).parent.parent]
    protos = sorted(str(path) for path in (ROOT / "proto").rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", *(f"-I{path}" for path in includes)]
    outputs = [f"--{kind}_out={into}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, *outputs, *protos], check=True, timeout=60)


def stale() -> list[str]:
    """Lists stubs that differ from what proto/ generates, including missing and left-over ones."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name: path.read_text() for path in (Path(folder) / STUBS).iterdir()}
    held = {path.name: path.read_text() for path in (ROOT / STUBS).glob("*_pb2*")}
    return [name for name in sorted(fresh | held) if _essence(fresh.get(name)) != _essence(held.get(name))]


def _essence(text: str | None) -> str | None:
    return None if text is None else _VERSIONS.sub("", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="regenerate the stubs")
    if parser.parse_args().write:
        generate(ROOT)
        return 0
    names = stale()
    for name in names:
        print(f"{STUBS / name} is stale: run `make proto` and commit it", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
