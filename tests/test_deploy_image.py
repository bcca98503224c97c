"""The image: what the Dockerfile says, and the two scripts in it, of which the head's is run against a real Ray."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from cluster.launch import _free_port
from penstock import Client
from penstock.config import ServeConfig

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = DOCKER / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(name, what follows) of each, continued lines joined and comments gone."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines()]
    return [(name, rest) for name, rest in pairs]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    begin = max(number for number, (name, _) in enumerate(found) if name == "FROM")
    return found[begin:]


def test_it_does_not_run_as_root() -> None:
    users = [rest for name, rest in last_stage() if name == "USER"]
    assert users == ["1000:1000"], "by number: Kubernetes cannot tell whether a name is root's"


def test_everything_is_pinned() -> None:
    found = instructions()
    (base,) = [rest for name, rest in found if name == "ARG" and rest.startswith("PYTHON_IMAGE=")]
    assert re.search(r":\d+\.\d+\.\d+-", base), "a tag that moves is no pin"
    assert {rest.split()[0] for name, rest in found if name == "FROM"} == {"${PYTHON_IMAGE}"}
    installs = [rest for name, rest in found if name == "RUN" and "pip install" in rest]
    assert installs
    assert all("--constraint constraints.txt" in rest for rest in installs)


def test_it_copies_what_it_names_and_nothing_else() -> None:
    found = instructions()
    assert not [name for name, _ in found if name == "ADD"]
    sources = []
    for rest in [rest for name, rest in found if name == "COPY" and "--from" not in rest]:
        words = [word for word in rest.split() if not word.startswith("--")]
        sources += words[:-1]
    assert "." not in sources
    for source in sources:
        assert (ROOT / source).exists(), source
    ignore = (DOCKER / "Dockerfile.dockerignore").read_text().split("\n")
    assert "**" in ignore, "the build sees what is named alone"
    assert {line[1:] for line in ignore if line.startswith("!")} == set(sources)


def test_every_package_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = {rest.split()[0] for name, rest in instructions() if name == "COPY"}
    assert packages <= copied


def test_it_opens_the_public_ports_and_asks_for_health() -> None:
    default = ServeConfig(model="m")
    found = dict(last_stage())
    assert set(found["EXPOSE"].split()) == {str(default.grpc_port), str(default.http_port)}
    assert "penstock-health" in found["HEALTHCHECK"]
    assert json.loads(found["CMD"])[:2] == ["penstock", "serve"]
    assert f":{default.http_port}/health" in (DOCKER / "penstock-health").read_text()


@pytest.mark.parametrize("script", ["penstock-head", "penstock-health"])
def test_scripts_may_be_run(script: str) -> None:
    assert os.access(DOCKER / script, os.X_OK)


class _Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(type(self).status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_health_is_what_the_router_says(status: int, code: int) -> None:
    handler = type("Handler", (_Health,), {"status": status})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert _health(server.server_port).returncode == code
        server.shutdown()


def test_nobody_there_is_not_healthy() -> None:
    ended = _health(_free_port("http_port", "127.0.0.1", set()))
    assert ended.returncode == 1
    assert "refused" in ended.stderr


def _health(port: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PENSTOCK_HEALTH_URL": f"http://127.0.0.1:{port}/health"}
    command = [sys.executable, str(DOCKER / "penstock-health")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)


@contextmanager
def running_head(tmp_path: Path, model: Path) -> Iterator[tuple[subprocess.Popen[bytes], ServeConfig, Path]]:
    """penstock-head with a Ray of its own on free ports; everything that it left is gone afterwards."""
    taken: set[int] = set()
    for _ in range(4):
        taken.add(_free_port("port", "127.0.0.1", taken))
    gcs, http, grpc, admin = taken
    config = ServeConfig(
        model=str(model),
        http_port=http,
        grpc_port=grpc,
        admin_port=admin,
        engine={"kv_memory_bytes": 32 * 1024 * 1024, "device": "cpu"},
        start_timeout_s=90,
    )
    file = tmp_path / "serve.json"
    pools = {
        name: {"replicas": 1, "num_cpus": 1, "resources": {f"penstock_{name}": 1}} for name in ("prefill", "decode")
    }
    data = {**config.model_dump(mode="json", include={"model", "http_port", "grpc_port", "admin_port", "engine"})}
    file.write_text(json.dumps({**data, "prefill_pool": pools["prefill"], "decode_pool": pools["decode"]}))
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "penstock").write_text(f'#!/bin/bash\nexec {sys.executable} -m cluster.cli "$@"\n')
    (bin_folder / "penstock").chmod(0o755)
    resources = json.dumps(json.dumps({"penstock_prefill": 1, "penstock_decode": 1}))
    scratch = tempfile.mkdtemp(prefix="head-", dir="/tmp")  # a short path: Ray's sockets lie in it
    start_ray = [
        f"ray start --head --block --port={gcs} --temp-dir={scratch} --num-cpus=2 --num-gpus=0 --resources={resources}",
        "--include-dashboard=false --disable-usage-stats --object-store-memory=100000000",
    ]
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "PENSTOCK_GCS_PORT": str(gcs),
        "PENSTOCK_ADMIN_PORT": str(admin),
        # As KubeRay sets them for `authOptions: {mode: token}`.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "KUBERAY_GEN_RAY_START_CMD": " ".join(start_ray),
    }
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(DOCKER / "penstock-head"), str(file)], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    family = [psutil.Process(process.pid)]
    try:
        yield process, config, log
    finally:
        if process.poll() is None:
            family += family[0].children(recursive=True)
            process.send_signal(signal.SIGTERM)
            psutil.wait_procs(family, timeout=20)
        for one in family:
            if one.is_running():
                one.kill()
        process.wait(timeout=10)
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.mark.cluster
def test_a_head_serves_whenever_it_starts_and_leaves_nothing(tmp_path: Path) -> None:
    with running_head(tmp_path, ROOT / "models" / "penstock-tiny") as (process, config, log):
        deadline_s = time.monotonic() + 100
        while b"ready: penstock-tiny" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)
        with Client(f"127.0.0.1:{config.grpc_port}", timeout_s=60) as client:
            assert client.complete("Once upon a time", max_tokens=8, temperature=0.0).text
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("raylet" in one.name() for one in family)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        assert psutil.wait_procs(family, timeout=15)[1] == []


@pytest.mark.cluster
def test_a_head_that_cannot_serve_ends_and_says_why(tmp_path: Path) -> None:
    """Whoever runs the container sees that it failed, and starts it again."""
    with running_head(tmp_path, tmp_path / "nothing") as (process, _, log):
        assert process.wait(timeout=90) == 2
        assert "nothing" in log.read_text()
        assert "penstock serve ended with 2" in log.read_text()
