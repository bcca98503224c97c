"""Tests a wheel installed outside the checkout: it serves the bundled model, and its client needs neither torch nor
Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools to build a wheel"),
]

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("penstock", "engine", "kv_transfer", "worker", "prefill_worker", "decode_worker", "router", "cluster")
TIMEOUT_S = 240.0
CLIENT = """
import sys
sys.modules.update(dict.fromkeys(("torch", "ray", "numpy", "fastapi", "tokenizers", "uvicorn")))  # their import fails
from penstock import AsyncClient, Client
from cluster.cli.main import main
import penstock
print(penstock.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy, so that no build folder is left in the checkout."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*SOURCES, "simulator", "models"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(copy)], out)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a virtual environment with the wheel; everything else comes from the environment that runs the tests."""
    home = tmp_path_factory.mktemp("venv")
    run([sys.executable, "-m", "venv", "--without-pip", str(home)], home)
    installed = home / "bin" / "python"
    run(
        [sys.executable, "-m", "pip", "--python", str(installed), "install", "--no-deps", "--no-index", str(wheel)],
        home,
    )
    (site,) = home.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return installed


def run(command: list[str], folder: Path) -> str:
    """Returns the output of a command that must succeed."""
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    """Returns the variables of this process without those through which Python would find the checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def test_the_wheel_holds_kernels_page_and_model_but_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    kernels = {f"engine/cpu/csrc/{path.name}" for path in (ROOT / "engine" / "cpu" / "csrc").iterdir()}
    page = {f"router/live/page/{path.name}" for path in (ROOT / "router" / "live" / "page").iterdir()}
    model = {f"models/penstock-tiny/{path.name}" for path in (ROOT / "models" / "penstock-tiny").iterdir()}
    assert kernels | page | model | {"penstock/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "models/train/"))]


def test_the_client_of_the_wheel_needs_neither_torch_nor_ray(python: Path, tmp_path: Path) -> None:
    found = Path(run([str(python), "-c", CLIENT], tmp_path).strip())
    assert found.is_relative_to(python.parents[1])


def test_the_wheel_serves_the_bundled_model(python: Path, tmp_path: Path) -> None:
    ports = ["--http-port", "0", "--grpc-port", "0", "--admin-port", "0"]
    command = [str(python.parent / "penstock"), "serve", "--model", "penstock-tiny", "--colocated", "--routers", "1"]
    log = tmp_path / "log"
    with log.open("wb") as output:
        served = subprocess.Popen(
            [*command, *ports], cwd=tmp_path, env=environment(), stdout=output, stderr=output, start_new_session=True
        )
    try:
        limit_s = time.monotonic() + TIMEOUT_S
        while not (found := re.search(r"(?s)ready: penstock-tiny.*?(http://[\w.]+:\d+)", log.read_text())):
            assert served.poll() is None, log.read_text()
            assert time.monotonic() < limit_s, log.read_text()
            time.sleep(0.1)
        body = json.dumps({"model": "penstock-tiny", "prompt": "Once upon a time", "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{found[1]}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
    finally:
        served.send_signal(signal.SIGINT)
        try:
            served.wait(60.0)
        except subprocess.TimeoutExpired:
            os.killpg(served.pid, signal.SIGKILL)
            served.wait(60.0)
