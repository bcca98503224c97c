"""Every command of every runbook, page after page, against a live deployment; graphs name metrics that exist."""

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
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster import cli
from cluster.launch import RayDeployment, launch
from penstock import Client
from penstock.config import PoolConfig, ServeConfig
from router.index_metrics import IndexCollector
from router.metrics import RouterMetrics
from router.prediction_metrics import PredictionCollector
from router.predictions import WorkerErrors
from router.prefix_index import PrefixIndex

ROOT = Path(__file__).resolve().parent.parent
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
    "upgrade-a-model",
)
KILLED = {"pool-is-down": "prefill-0", "router-lost": "router-0"}  # before the page is followed


@dataclass(frozen=True)
class Step:
    command: str
    expected: str  # "..." stands for anything


def steps_of(page: str) -> list[Step]:
    steps = []
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for part in re.split(r"(?m)^\$ ", block)[1:]:
            command, _, expected = part.partition("\n")
            steps.append(Step(command, expected.strip()))
    return steps


def matches(expected: str, output: str) -> bool:
    """Whether the output begins so. A line "..." stands for any lines, "..." within a line for anything there; white
    space counts once, empty lines not at all."""
    return _begins([" ".join(line.split()) for line in output.splitlines() if line.strip()], expected.splitlines())


def _begins(output: list[str], expected: list[str]) -> bool:
    if not expected:
        return True
    first, *rest = expected
    if first == "...":
        return any(_begins(output[skipped:], rest) for skipped in range(len(output) + 1))
    pattern = re.escape(first.strip()).replace(re.escape("..."), ".*")
    return bool(output) and re.fullmatch(pattern, output[0]) is not None and _begins(output[1:], rest)


def test_expected_output_is_compared_with_care() -> None:
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
        num_waiting=no_value, num_out=no_value, saturation=no_value, level=no_value, retries_left=no_value
    )
    names = set(re.findall(r"(?m)^# TYPE (\S+) ", metrics.render().decode()))
    for collector in (
        IndexCollector("m", PrefixIndex(), lambda: 0),
        PredictionCollector("m", lambda: {"w": WorkerErrors()}),  # type: ignore[dict-item]
    ):
        names |= {family.name + "_total" * (family.type == "counter") for family in collector.collect()}
    return names


def test_graphs_name_metrics_that_exist() -> None:
    names = metric_names()
    for name in PAGES:
        for graph in re.findall(r"```promql\n(.*?)```", (FOLDER / f"{name}.md").read_text(), re.DOTALL):
            assert graph.count("(") == graph.count(")")
            used = {re.sub(r"_bucket$", "", one) for one in re.findall(r"(?:vllm|penstock):\w+", graph)}
            assert used
            assert used <= names, name


@pytest.fixture(scope="module")
def deployment() -> Iterator[RayDeployment]:
    pool = PoolConfig(replicas=2)
    config = ServeConfig(
        model=str(ROOT / "models" / "penstock-tiny"),
        http_port=0,
        grpc_port=0,
        admin_port=0,
        prefill_pool=pool,
        decode_pool=pool,
        engine={"kv_memory_bytes": 64 * 1024 * 1024},
        start_timeout_s=110,
    )
    with launch(config) as running:
        yield running


def run(command: str, http_address: str) -> tuple[int, str]:
    """`penstock` in this process, which need not import it anew each time; everything else in a shell."""
    words = shlex.split(command)
    if words[0] != "penstock" or "|" in words:
        command = command.replace("localhost:8000", http_address)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = cli.main(words[1:])
    return status, printed.getvalue()


@contextlib.contextmanager
def traffic(address: str) -> Iterator[None]:
    """Requests from a few callers, each prompt new to every cache; none may fail."""
    ended = threading.Event()

    def ask(caller: int) -> None:
        with Client(address, timeout_s=60) as client:
            for number in itertools.count():
                if ended.is_set():
                    return
                client.complete(f"{caller} and {number} little pigs went to the market.", max_tokens=20)

    with ThreadPoolExecutor() as pool:
        callers = [pool.submit(ask, caller) for caller in range(4)]
        try:
            yield
        finally:
            ended.set()
    for one in callers:
        one.result()


@pytest.fixture(scope="module")
def next_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model under another revision."""
    folder = tmp_path_factory.mktemp("models") / "penstock-tiny"
    shutil.copytree(ROOT / "models" / "penstock-tiny", folder)
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    return folder


def kill(deployment: RayDeployment, worker_id: str) -> None:
    """Returns once the controller has noticed."""
    victim = next(one for one in deployment.status().workers if one.member.worker_id == worker_id)
    os.kill(victim.pid, signal.SIGKILL)
    version, gone = -1, False
    while not gone:
        version, status, _ = deployment.wait(version, 20.0)
        gone = victim.pid not in [one.pid for one in status.workers if one.state == "ready"]


@pytest.mark.cluster
@pytest.mark.parametrize("name", PAGES)
def test_the_commands_do_what_the_page_says(
    name: str, deployment: RayDeployment, next_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ADMIN", deployment.admin_address)
    monkeypatch.setenv("PENSTOCK_SERVER", deployment.grpc_address)
    if name in KILLED:
        kill(deployment, KILLED[name])
    around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if name == "upgrade-a-model":  # with half the workers, each of which is started anew
        for pool in ("prefill", "decode"):
            assert run(f"penstock scale {pool} 1 --wait 60", "")[0] == 0
        around = traffic(deployment.grpc_address)
    with around:
        for step in steps_of((FOLDER / f"{name}.md").read_text()):
            command = step.command.replace("/models/next", str(next_model))
            status, output = run(command, deployment.http_address)
            assert matches(step.expected, output), f"$ {command}\n{output}\n--- is not ---\n{step.expected}"
            assert status == 0, output
