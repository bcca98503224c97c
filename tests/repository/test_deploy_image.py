"""Tests the image: its Dockerfile and its two scripts; the head's script runs against a real Ray."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
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
import ray.util

from cluster.local.ready_mark import leave_ready_mark, remove_ready_mark
from cluster.ray.launch import _free_port
from penstock import Client
from penstock.config import ServeConfig
from penstock.rpc.secret import ClusterSecret
from tests.support.key_files import Authority, write_secret
from tests.support.repository import image_locks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = DOCKER / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Returns (name, arguments) of each instruction, with continued lines joined and without comments."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines()]
    return [(name, rest) for name, rest in pairs]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    begin = max(number for number, (name, _) in enumerate(found) if name == "FROM")
    return found[begin:]


def test_the_image_does_not_run_as_root() -> None:
    users = [rest for name, rest in last_stage() if name == "USER"]
    assert users == ["1000:1000"], "by number: Kubernetes cannot tell whether a name is root's"


def test_the_builder_must_give_the_digest_of_the_base_image() -> None:
    found = instructions()
    (base,) = [rest for name, rest in found if name == "ARG" and rest.startswith("PYTHON_IMAGE=")]
    assert re.search(r":\d+\.\d+\.\d+-", base), "a tag that moves says nothing"
    assert ("ARG", "PYTHON_DIGEST") in found, "a default would be yesterday's image, or made up"
    assert {rest.split()[0] for name, rest in found if name == "FROM"} == {"${PYTHON_IMAGE}@${PYTHON_DIGEST}"}
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    for text in (workflow, (ROOT / "docs" / "deploy.md").read_text()):
        builds = re.findall(r"docker build (?:.*\\\n)*.*", text)
        assert builds
        assert all("PYTHON_DIGEST" in command for command in builds)
        assert f"imagetools inspect {base.partition('=')[2]}" in text


def test_every_package_of_the_image_is_checked_by_hash() -> None:
    installs = [rest for name, rest in instructions() if name == "RUN" and "pip install" in rest]
    assert len(installs) == 2
    assert "--require-hashes --only-binary :all:" in installs[0]
    assert "--no-index --no-deps --no-build-isolation" in installs[1], "the project itself fetches nothing"


@pytest.mark.parametrize("variant", image_locks.EXTRAS)
def test_the_images_packages_match_the_constraints(variant: str) -> None:
    text = (image_locks.LOCKS / f"{variant}.txt").read_text()
    locked, wanted = image_locks.pins(text), image_locks.pins((ROOT / "constraints.txt").read_text())
    assert image_locks.unhashed(text) == []
    both = (locked.keys() & wanted.keys()) - {"torch"}
    rewrite = "run `python -m tests.support.repository.image_locks --write`"
    assert {name: locked[name] for name in both} == {name: wanted[name] for name in both}, rewrite
    assert locked["torch"].partition("+")[0] == wanted["torch"], rewrite
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in image_locks.EXTRAS[variant] for line in project["optional-dependencies"][extra]]
    for requirement in [*project["dependencies"], *extras]:
        name = re.sub(r"[-_.]+", "-", re.split(r"[<>=; ]", requirement)[0]).lower()
        assert name in locked, rewrite
    assert "setuptools" in locked


def test_the_images_nixl_is_built_for_the_cuda_of_its_torch() -> None:
    locked = image_locks.pins((image_locks.LOCKS / "cuda.txt").read_text())
    majors = {name.rpartition("-cu")[2] for name in locked if name.startswith("nvidia-nccl-cu")}
    assert {name for name in locked if name.startswith("nixl")} == {f"nixl-cu{major}" for major in majors}


def test_a_package_without_a_hash_is_found() -> None:
    text = "a==1 \\\n    --hash=sha256:" + "0" * 64 + "\nb==2\nc_d==3 \\\n    --hash=sha256:short\n"
    assert image_locks.pins(text) == {"a": "1", "b": "2", "c-d": "3"}
    assert image_locks.unhashed(text) == ["b", "c-d"]


def test_the_image_copies_only_the_listed_sources() -> None:
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
    assert "**" in ignore, "the build sees only what is listed"
    assert {line[1:] for line in ignore if line.startswith("!")} == set(sources)


def test_every_package_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = {rest.split()[0] for name, rest in instructions() if name == "COPY"}
    assert packages <= copied


def test_the_image_exposes_the_public_ports_and_has_a_health_check() -> None:
    default = ServeConfig(model="m")
    found = dict(last_stage())
    assert set(found["EXPOSE"].split()) == {str(default.grpc_port), str(default.http_port)}
    assert "penstock-health" in found["HEALTHCHECK"]
    assert json.loads(found["CMD"])[:2] == ["penstock", "serve"]
    assert f":{default.http_port}/health" in (DOCKER / "penstock-health").read_text()


@pytest.mark.parametrize("script", ["penstock-certify", "penstock-head", "penstock-health"])
def test_scripts_are_executable(script: str) -> None:
    assert os.access(DOCKER / script, os.X_OK)


def certify(folder: Path, address: str) -> dict[str, str]:
    """Makes a pod's certificate as the chart's init container does; returns the paths as `security.tls` has them."""
    authority, made = Authority(folder / "authority"), folder / "pod-tls"
    for name in ("pem", "key"):
        (authority.folder / f"ca.{name}").rename(authority.folder / {"pem": "tls.crt", "key": "tls.key"}[name])
    made.mkdir()
    command = [str(DOCKER / "penstock-certify"), str(authority.folder), str(made), "penstock-head-svc.llm.svc"]
    environment = {**os.environ, "PENSTOCK_POD_IP": address, "PENSTOCK_CERTIFICATE_DAYS": "2"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    return {
        f"{kind}_file": str(made / name) for kind, name in (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key"))
    }


def test_a_pods_certificate_is_for_its_address_and_its_key_is_private(tmp_path: Path) -> None:
    files = certify(tmp_path, "10.1.2.3")
    shown = subprocess.run(
        ["openssl", "x509", "-noout", "-text", "-in", files["cert_file"]], check=True, capture_output=True, text=True
    ).stdout
    for name in ("IP Address:10.1.2.3", "IP Address:127.0.0.1", "DNS:localhost", "DNS:penstock-head-svc.llm.svc"):
        assert name in shown
    assert "CA:FALSE" in shown
    assert "TLS Web Server Authentication, TLS Web Client Authentication" in shown
    assert Path(files["key_file"]).stat().st_mode & 0o077 == 0
    assert len(list(Path(files["key_file"]).parent.iterdir())) == 3, "the authority's key is not among them"


class _Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(type(self).status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_script_reports_the_routers_health(status: int, code: int) -> None:
    handler = type("Handler", (_Health,), {"status": status})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert _health(server.server_port).returncode == code
        server.shutdown()


def test_a_refused_connection_is_not_healthy() -> None:
    ended = _health(_free_port("http_port", "127.0.0.1", set()))
    assert ended.returncode == 1
    assert "refused" in ended.stderr


def test_one_ready_router_of_several_is_enough() -> None:
    nobody = f"http://127.0.0.1:{_free_port('http_port', '127.0.0.1', set())}/health"
    with HTTPServer(("127.0.0.1", 0), _Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        somebody = f"http://127.0.0.1:{server.server_port}/health"
        assert _probe("ready", nobody, somebody).returncode == 0
        server.shutdown()
    assert _probe("ready", nobody, nobody).stderr.count("refused") == 2


def test_a_frozen_server_that_still_listens_is_not_live(tmp_path: Path) -> None:
    """The live server has no health service, but any answer shows that it is live."""
    serve = "import grpc, concurrent.futures as f; s = grpc.server(f.ThreadPoolExecutor(1))"
    script = f"{serve}; print(s.add_insecure_port('127.0.0.1:0'), flush=True); s.start(); s.wait_for_termination()"
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = f"127.0.0.1:{int(server.stdout.readline())}"
        assert _probe("live", address).returncode == 0
        server.send_signal(signal.SIGSTOP)
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=30).close()
        frozen = _probe("live", address)
        assert (frozen.returncode, "DEADLINE_EXCEEDED" in frozen.stderr) == (1, True)
    finally:
        server.kill()
        server.wait()
    assert "UNAVAILABLE" in _probe("live", address).stderr


def test_a_worker_is_ready_while_the_process_that_marked_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_READY_DIR", str(tmp_path / "ready"))
    assert _probe("worker", str(tmp_path / "ready")).returncode == 1
    leave_ready_mark("decode-0")
    assert _probe("worker", str(tmp_path / "ready")).returncode == 0
    (tmp_path / "ready" / "decode-0").write_text("999999999")
    assert "no worker" in _probe("worker", str(tmp_path / "ready")).stderr
    leave_ready_mark("decode-0")
    remove_ready_mark("decode-0")
    assert _probe("worker", str(tmp_path / "ready")).returncode == 1
    monkeypatch.delenv("PENSTOCK_READY_DIR")
    leave_ready_mark("decode-0")  # without the folder it does nothing


def _health(port: int) -> subprocess.CompletedProcess[str]:
    return _probe(PENSTOCK_HEALTH_URL=f"http://127.0.0.1:{port}/health")


def _probe(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DOCKER / "penstock-health"), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)


@contextmanager
def running_head(tmp_path: Path, model: Path) -> Iterator[tuple[subprocess.Popen[bytes], ServeConfig, Path]]:
    """Runs penstock-head with a Ray of its own on free ports, and removes everything that it leaves.

    As with the chart's `security.tls.caSecret`, Ray and all processes present certificates to each other.
    """
    tls = certify(tmp_path, ray.util.get_node_ip_address())
    security = {**write_secret(tmp_path / "secret", ClusterSecret.make()), "tls": tls}
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
        start_timeout_s=200,
    )
    file = tmp_path / "serve.json"
    pools = {
        name: {"replicas": 1, "num_cpus": 1, "resources": {f"penstock_{name}": 1}} for name in ("prefill", "decode")
    }
    settings = {"model", "http_port", "grpc_port", "admin_port", "engine", "start_timeout_s"}
    data = {**config.model_dump(mode="json", include=settings)}
    file.write_text(
        json.dumps({**data, "prefill_pool": pools["prefill"], "decode_pool": pools["decode"], "security": security})
    )
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "penstock").write_text(f'#!/bin/bash\nexec {sys.executable} -m cluster.cli "$@"\n')
    (bin_folder / "penstock").chmod(0o755)
    resources = json.dumps(json.dumps({"penstock_prefill": 1, "penstock_decode": 1}))
    scratch = tempfile.mkdtemp(prefix="head-", dir="/tmp")  # a short path, because Ray puts its sockets there
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
        # KubeRay sets these for `authOptions: {mode: token}`.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USE_TLS": "1",
        **{
            f"RAY_TLS_{name}": tls[key]
            for name, key in (("CA_CERT", "ca_file"), ("SERVER_CERT", "cert_file"), ("SERVER_KEY", "key_file"))
        },
        **{
            f"PENSTOCK_ADMIN_{name}": tls[key]
            for name, key in (("CA", "ca_file"), ("CERT", "cert_file"), ("CERT_KEY", "key_file"))
        },
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
            psutil.wait_procs(family, timeout=120)
        for each in family:
            if each.is_running():
                each.kill()
        process.wait(timeout=120)
        shutil.rmtree(scratch, ignore_errors=True)


def test_a_head_serves_and_leaves_no_process(tmp_path: Path) -> None:
    with running_head(tmp_path, ROOT / "models" / "penstock-tiny") as (process, config, log):
        deadline_s = time.monotonic() + 220
        while b"ready: penstock-tiny" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)
        with Client(f"127.0.0.1:{config.grpc_port}", timeout_s=60) as client:
            assert client.complete("Once upon a time", max_tokens=8, temperature=0.0).text
        environment = psutil.Process(process.pid).environ()
        gcs_port = re.search(r"--port=(\d+)", environment["KUBERAY_GEN_RAY_START_CMD"])
        assert gcs_port is not None
        tls = {name: value for name, value in environment.items() if name.startswith(("RAY_USE_TLS", "RAY_TLS_"))}
        live = _probe("live", f"127.0.0.1:{gcs_port[1]}", **tls)  # a caller without Ray's token
        assert live.returncode == 0, live.stderr
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("raylet" in each.name() for each in family)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
        assert psutil.wait_procs(family, timeout=120)[1] == []


def test_a_head_that_cannot_serve_exits_with_the_reason(tmp_path: Path) -> None:
    """The exit code makes the container runtime restart the head."""
    with running_head(tmp_path, tmp_path / "nothing") as (process, _, log):
        assert process.wait(timeout=200) == 2
        assert "nothing" in log.read_text()
        assert "penstock serve ended with 2" in log.read_text()
