"""Runs every command of every runbook against a live deployment, and checks that graphs name existing metrics."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.ray.launch import RayDeployment, launch
from penstock import Client
from penstock.config import PoolConfig, RouterConfig, ServeConfig
from penstock.config.security import SecurityConfig, TlsConfig
from penstock.metrics.worker_metrics import METRICS
from penstock.rpc.secret import ClusterSecret, digest_of, make_api_key
from penstock.sizing.model_shape import find_shape
from penstock.types import Role, WorkerId, WorkerLoad
from penstock.v1 import worker_pb2
from router.metrics.collectors import CredentialCollector, IndexCollector, PredictionCollector
from router.metrics.metrics import RouterMetrics
from router.routing.costs.predictions import WorkerPredictionErrors
from router.routing.index.prefix_index import PrefixIndex
from tests.support.key_files import Authority, write_secret
from tests.support.plain_processes import Deployment
from tests.support.prefork.module_process import forked_ray_workers
from tests.support.serving import worker_config
from worker.metrics.collector import WorkerCollector
from worker.metrics.model_work import ModelWork
from worker.metrics.page_use import PageUse
from worker.metrics.step_metrics import SpeculationMetrics, StepMetrics

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "runbooks"
PAGES = (
    "hit-rate-fell",
    "scale-a-pool",
    "change-the-pd-ratio",
    "ttft-is-burning",
    "itl-is-burning",
    "pages-exhausted",
    "transfer-failures",
    "drain-a-node",
    "pool-is-down",
    "router-lost",
    "ray-head-lost",
    "tenant-abuse",
    "replace-weights",
    "upgrade-a-model",
    "rotate-keys",
)
_BETWEEN_REQUESTS_S = 0.15
KILLED = {"pool-is-down": "prefill-0", "router-lost": "router-0"}  # run before the page's commands


@dataclass(frozen=True)
class Step:
    command: str
    expected: str  # "..." stands for any text


def steps_of(page: str) -> list[Step]:
    steps = []
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for part in re.split(r"(?m)^\$ ", block)[1:]:
            command, _, expected = part.partition("\n")
            steps.append(Step(command, expected.strip()))
    return steps


def matches(expected: str, output: str) -> bool:
    """Returns whether the output begins as expected. A line "..." matches any lines, "..." within a line any text; runs
    of white space count as one space, and empty lines do not count."""
    return _begins([" ".join(line.split()) for line in output.splitlines() if line.strip()], expected.splitlines())


def _begins(output: list[str], expected: list[str]) -> bool:
    if not expected:
        return True
    first, *rest = expected
    if first == "...":
        return any(_begins(output[skipped:], rest) for skipped in range(len(output) + 1))
    pattern = re.escape(first.strip()).replace(re.escape("..."), ".*")
    return bool(output) and re.fullmatch(pattern, output[0]) is not None and _begins(output[1:], rest)


def test_matches_compares_every_line() -> None:
    assert matches("a ... c", "a   b  c")
    assert matches("...\nb: ... ms", "x\ny\nb: 3 ms\nmore")
    assert not matches("...\nb: ... ms", "x\ny\nc: 3 ms")
    assert not matches("b", "a\nb")
    assert not matches("decode: 2 -> 3 workers", "decode: 2 -> 4 workers")
    assert matches("...", "")


def test_every_page_is_listed_and_has_its_parts() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.md")) == sorted([*PAGES, "README"])
    index = (FOLDER / "README.md").read_text()
    for name in PAGES:
        assert f"({name}.md)" in index
        page = (FOLDER / f"{name}.md").read_text()
        headings = re.findall(r"(?m)^## (.*)$", page)
        assert headings == ["Symptom", "Graph", "Commands", "Roll-back"], name
        assert steps_of(page)
        assert "```promql" in page


def metric_names() -> set[str]:
    metrics = RouterMetrics("m")
    no_value: Callable[..., float] = lambda *_: 0.0  # noqa: E731
    metrics.watch(
        num_running=no_value,
        num_waiting=no_value,
        cache_usage=no_value,
        open_circuits=no_value,
        tier_hits=no_value,
        num_workers=no_value,
    )
    metrics.admission.watch(
        num_waiting=no_value,
        queue_bytes=no_value,
        num_out=no_value,
        saturation=no_value,
        level=no_value,
        retries_left=no_value,
    )
    load, use = WorkerLoad(metrics=dict.fromkeys(METRICS, 0.0)), PageUse({"free": 1}, 0, 0.0, {"free": 1})
    metrics.watch_ends(no_value)
    metrics.watch_workers(lambda: {WorkerId("w"): load})
    names = set(re.findall(r"(?m)^# TYPE (\S+) ", metrics.render().decode()))
    for collector in (
        CredentialCollector("m", lambda: []),
        IndexCollector("m", PrefixIndex(), lambda: 0),
        PredictionCollector("m", lambda: {"w": WorkerPredictionErrors()}),  # type: ignore[dict-item]
        WorkerCollector(
            worker_pb2.WorkerDescription(),
            lambda: load,
            ModelWork(find_shape("llama-3.1-8b")),
            "H100",
            0.0,
            lambda: use,
            lambda: {"a": 1},
        ),
        StepMetrics(worker_pb2.WorkerDescription()).registry,
        SpeculationMetrics(worker_pb2.WorkerDescription()).registry,
    ):
        suffix = {"counter": "_total", "info": "_info"}
        names |= {family.name + suffix.get(family.type, "") for family in collector.collect()}
    return names


def test_graphs_name_metrics_that_exist() -> None:
    names = metric_names()
    for name in PAGES:
        for graph in re.findall(r"```promql\n(.*?)```", (FOLDER / f"{name}.md").read_text(), re.DOTALL):
            assert graph.count("(") == graph.count(")")
            used = {re.sub(r"_bucket$", "", each) for each in re.findall(r"(?:vllm|penstock):\w+", graph)}
            assert used
            assert used <= names, name


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the key files of the deployments, and those that rotate-keys replaces them with."""
    folder = tmp_path_factory.mktemp("keys")
    write_secret(folder / "secret", ClusterSecret.make())
    (folder / "old.key").write_text(make_api_key())
    (folder / "tenants.toml").write_text(
        f'[tenants.acme]\nkeys = ["{digest_of((folder / "old.key").read_text())}"]\nlane = "standard"\n'
    )
    authority = Authority(folder / "authority")
    for name in ("tls", "tls.next"):
        (folder / name).mkdir()
        made = authority.issue(name, "DNS:localhost,IP:127.0.0.1")
        for path, target in ((made.cert_file, "tls.crt"), (made.key_file, "tls.key"), (authority.ca, "ca.crt")):
            shutil.copy(path, folder / name / target)
    return folder


@contextlib.contextmanager
def front_with_tenants(keys: Path) -> Iterator[str]:
    """Yields the HTTP address of a router with tenants and TLS, over a worker of its own; both read `keys`."""
    security = SecurityConfig(secret_file=str(keys / "secret"))
    with Deployment() as processes:
        worker = worker_config(Role.DECODE, ROOT / "models" / "penstock-tiny", decode={"placement": "local"})
        (decode,) = processes.start_workers([worker.model_copy(update={"security": security})])
        router = RouterConfig(
            model=str(ROOT / "models" / "penstock-tiny"),
            grpc_port=0,
            http_port=0,
            workers=(decode.address,),
            tenants_file=str(keys / "tenants.toml"),
            tls=TlsConfig(cert_file=str(keys / "tls" / "tls.crt"), key_file=str(keys / "tls" / "tls.key")),
            security=security,
        )
        yield processes.start_router(router).http


@pytest.fixture(scope="module")
def deployment(keys: Path) -> Iterator[RayDeployment]:
    pool = PoolConfig(replicas=2)
    config = ServeConfig(
        model=str(ROOT / "models" / "penstock-tiny"),
        http_port=0,
        grpc_port=0,
        admin_port=0,
        routers=1,  # the metrics at the public port are those of one router
        prefill_pool=pool,
        decode_pool=pool,
        engine={"kv_memory_bytes": 64 * 1024 * 1024, "dtype": "bfloat16"},
        security=SecurityConfig(secret_file=str(keys / "secret")),
        start_timeout_s=240,
    )
    with forked_ray_workers(), launch(config) as running:
        yield running


def run(command: str, http_address: str) -> tuple[int, str]:
    """Runs `penstock` in this process, which saves its imports, and everything else in a shell."""
    words = shlex.split(command)
    if words[0] != "penstock" or {"|", ">"} & set(words):
        command = command.replace("localhost:8000", http_address)
        whole = f'penstock() {{ {shlex.quote(sys.executable)} -m cluster.cli "$@"; }}; {command}'
        done = subprocess.run(["bash", "-c", whole], cwd=ROOT, capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout + done.stderr
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main.main(words[1:])
    return status, printed.getvalue()


@contextlib.contextmanager
def traffic(address: str) -> Iterator[None]:
    """Sends requests from a few callers, each prompt new to every cache; none may fail. Leaves the cores to others."""
    ended = threading.Event()

    def ask(caller: int) -> None:
        with Client(address, timeout_s=120) as client:
            for number in itertools.count():
                if ended.wait(_BETWEEN_REQUESTS_S):
                    return
                client.complete(f"{caller} and {number} little pigs went to the market.", max_tokens=20)

    with ThreadPoolExecutor() as pool:
        callers = [pool.submit(ask, caller) for caller in range(4)]
        try:
            yield
        finally:
            ended.set()
    for each in callers:
        each.result()


@pytest.fixture(scope="module")
def next_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a copy of the bundled model with another revision."""
    folder = tmp_path_factory.mktemp("models") / "penstock-tiny"
    shutil.copytree(ROOT / "models" / "penstock-tiny", folder)
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    return folder


def kill(deployment: RayDeployment, worker_id: str) -> None:
    """Kills a worker and returns once the controller has noticed."""
    victim = next(each for each in deployment.status().workers if each.member.worker_id == worker_id)
    os.kill(victim.pid, signal.SIGKILL)
    version, gone = -1, False
    while not gone:
        version, status, _ = deployment.wait(version, 20.0)
        gone = victim.pid not in [each.pid for each in status.workers if each.state == "ready"]


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_do_what_the_page_claims(
    name: str, deployment: RayDeployment, next_model: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ADMIN", deployment.admin_address)
    monkeypatch.setenv("PENSTOCK_SERVER", deployment.grpc_address)
    if name in KILLED:
        kill(deployment, KILLED[name])
    around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if name == "upgrade-a-model":  # half of the workers, because each of them is restarted
        for pool in ("prefill", "decode"):
            assert run(f"penstock scale {pool} 1 --wait 240", "")[0] == 0
        around = traffic(deployment.grpc_address)
    with contextlib.ExitStack() as stack:
        stack.enter_context(around)
        http_address = deployment.http_address
        if name == "rotate-keys":
            monkeypatch.setenv("KEYS", str(keys))
            http_address = stack.enter_context(front_with_tenants(keys))
            stack.enter_context(traffic(deployment.grpc_address))
        for step in steps_of((FOLDER / f"{name}.md").read_text()):
            command = step.command.replace("/models/next", str(next_model))
            command = re.sub(r"--(wait|timeout) \d+", r"--\1 240", command)  # operators' machines are less busy
            status, output = run(command, http_address)
            assert matches(step.expected, output), f"$ {command}\n{output}\n--- is not ---\n{step.expected}"
            assert status == 0, output
