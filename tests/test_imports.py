"""The arrows between the root folders: who may import whom, and what the bare client may need."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# folder -> the root folders that it may import besides itself
ARROWS: dict[str, set[str]] = {
    "penstock": set(),
    "engine": {"penstock"},
    "kv_transfer": {"penstock", "engine"},
    "prefill_worker": {"penstock", "engine", "kv_transfer"},
    "decode_worker": {"penstock", "engine", "kv_transfer"},
    "router": {"penstock"},
    "simulator": {"penstock", "engine", "kv_transfer", "prefill_worker", "decode_worker", "router", "cluster"},
    "cluster": {"penstock", "engine", "kv_transfer", "prefill_worker", "decode_worker", "router"},
}

# folder -> libraries that it must not import
FORBIDDEN: dict[str, set[str]] = {
    "penstock": {"torch", "ray", "numpy", "fastapi", "uvloop", "tokenizers"},
    "engine": {"ray", "grpc"},
    "kv_transfer": {"ray", "grpc"},
    "prefill_worker": {"ray"},
    "decode_worker": {"ray"},
    "router": {"torch", "ray"},
    "simulator": {"ray", "torch"},
    "cluster": set(),
}


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; name the module in full"
            yield node.module or ""


@pytest.mark.parametrize("folder", ARROWS)
def test_a_folder_imports_only_what_the_plan_allows(folder: str) -> None:
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for module in imported_modules(path):
            top = module.split(".")[0]
            stray_folder = top in ARROWS and top != folder and top not in ARROWS[folder]
            if stray_folder or top in FORBIDDEN[folder] or top in {"tests", "benchmarks"}:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_every_root_folder_has_its_arrows() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "models"}
    assert packages == set(ARROWS)


def test_only_cluster_imports_ray() -> None:
    users = {
        path.relative_to(ROOT).parts[0]
        for folder in [*ARROWS, "benchmarks", "models"]
        for path in (ROOT / folder).rglob("*.py")
        if any(module.split(".")[0] == "ray" for module in imported_modules(path))
    }
    assert users <= {"cluster"}


def test_the_simulator_runs_without_torch_and_ray() -> None:
    code = (
        "import sys, simulator.replay, simulator.check\n"
        "heavy = {'torch', 'ray', 'numpy', 'uvloop', 'tokenizers', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'the simulator pulls in {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_client_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys, penstock; penstock.Client, penstock.AsyncClient\n"
        "heavy = {'torch', 'ray', 'numpy', 'uvloop', 'tokenizers', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'the client pulls in {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
