"""Tests `penstock serve` when its own Ray loses a daemon: streams continue, the output says what happened, and serving
resumes until Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock import Client
from penstock.client.results import ResultBuilder
from penstock.client.retry import RetryPolicy

pytestmark = [pytest.mark.processes, pytest.mark.timeout(800)]

ROOT = Path(__file__).resolve().parents[3]
PROMPT = "Once upon a time there was a careful boy named Paul. "
WITHIN_S = 240.0  # everything starts within this time on a busy machine
NO_RETRY = RetryPolicy(max_attempts=1)


class Serving:
    """Runs `penstock serve`, whose Ray loses a daemon while it starts, and records its output."""

    def __init__(self, folder: Path) -> None:
        config = folder / "serve.toml"
        config.write_text('routers = 1\ndrain_s = 120\n[engine]\nkv_memory_bytes = 67108864\ndtype = "bfloat16"\n')
        ports = ["--http-port", "0", "--grpc-port", "0", "--admin-port", "0"]
        model = ["--model", str(ROOT / "models" / "penstock-tiny"), "--colocated", "--config", str(config)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", "serve", *model, *ports],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A session of its own lets a signal reach each of its processes, as a terminal's Ctrl-C does. The handler
            # is reset because children of a background shell ignore SIGINT.
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        )
        self.printed = ""
        self._changed = threading.Condition()
        self._is_over = False
        threading.Thread(target=self._read, daemon=True).start()
        self.until("decode-0 is starting")  # the controller has asked Ray for the worker
        self.kill("raylet")
        self.until("Ctrl-C")
        address = re.search(r"gRPC +(\S+)", self.printed)
        assert address, self.printed
        self.address = address[1]

    @property
    def admin(self) -> str:
        """Returns host:port of the Admin service that was announced last."""
        return re.findall(r"admin +(\S+)", self.printed)[-1]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.printed += line
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def until(self, text: str, times: int = 1) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: self.printed.count(text) >= times or self._is_over, WITHIN_S)
        assert found, self.printed
        assert self.printed.count(text) >= times, self.printed

    def until_over(self) -> None:
        """Waits until the whole output has been read."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_over, WITHIN_S), self.printed

    def kill(self, name: str) -> None:
        """Kills the only process that runs this program."""
        found = _running(self, name)
        assert len(found) == 1, [each.as_dict(["pid", "ppid", "status", "num_threads", "cmdline"]) for each in found]
        found[0].kill()

    def answer(self, killing: str = "") -> list[int]:
        """Returns a long answer, carried by a single connection; `killing` names a process to end in the middle of
        it."""
        with Client(self.address, retry=NO_RETRY, timeout_s=WITHIN_S) as client:
            stream = client.generate(PROMPT, max_tokens=600, temperature=0.8, seed=5, ignore_eos=True)
            builder = ResultBuilder()
            builder.add(next(stream))
            if killing:
                self.kill(killing)
            for chunk in stream:
                builder.add(chunk)
        result = builder.result()
        assert result.timing is not None
        assert result.timing.num_redispatches == 0
        return list(result.token_ids)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    made = Serving(tmp_path_factory.mktemp("serving"))
    yield made
    family = psutil.Process(made.process.pid).children(recursive=True) if made.process.poll() is None else []
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait()
    for each in family:
        if each.is_running():
            each.kill()


@pytest.fixture(scope="module")
def undisturbed(serving: Serving) -> list[int]:
    return serving.answer()


def test_a_node_manager_lost_during_its_start_is_restarted(serving: Serving) -> None:
    reason = "Ray is lost before the deployment was ready: its node manager (raylet) ended"
    before, found, after = serving.printed.partition(reason)
    assert found, serving.printed
    assert "ready: " not in before
    assert "starting again" in after
    assert len(_running(serving, "raylet")) == 1


def begin_of_answer(client: Client) -> list[int]:
    """Returns the first tokens of the same answer; the client may retry."""
    result = client.complete(PROMPT, max_tokens=60, temperature=0.8, seed=5, ignore_eos=True, timeout_s=WITHIN_S)
    return list(result.token_ids)


def test_streams_continue_while_the_control_store_is_lost(serving: Serving, undisturbed: list[int]) -> None:
    assert serving.answer(killing="gcs_server") == undisturbed
    serving.until("control store (gcs_server) ended; it is restarted")
    for each in _descendants(serving):  # the new control store works if it starts a router and a worker
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended and waits for its parent
            if "ServerActor" in " ".join(each.cmdline()):
                each.kill()
    with Client(serving.address) as client:
        assert begin_of_answer(client) == undisturbed[:60]


def test_after_a_lost_node_manager_streams_end_well_and_serving_resumes_at_the_same_ports(
    serving: Serving, undisturbed: list[int]
) -> None:
    assert serving.answer(killing="raylet") == undisturbed
    serving.until("Ray is lost: its node manager (raylet) ended")
    with Client(serving.address) as client:  # waits for the new deployment
        assert begin_of_answer(client) == undisturbed[:60]
    serving.until("Ctrl-C stops it", times=2)
    assert len(_running(serving, "raylet")) == 1


def test_ctrl_c_ends_a_deployment_in_order(serving: Serving) -> None:
    # It is ready although Ray was lost before.
    assert serving.printed.count("ready: penstock-tiny, 0 prefill + 1 decode workers") == 2
    _check_commands(serving)
    _check_threads(serving)
    family, num_printed = _descendants(serving), len(serving.printed)
    os.killpg(serving.process.pid, signal.SIGINT)
    assert serving.process.wait(WITHIN_S) == 0
    serving.until_over()
    assert "Traceback" not in serving.printed[num_printed:]
    assert psutil.wait_procs(family, timeout=60)[1] == []


def _check_commands(serving: Serving) -> None:
    penstock = [sys.executable, "-m", "cluster.cli"]
    prompt = ["Once upon a time", "--server", serving.address, "--max-tokens", "5", "--timing"]
    done = _run([*penstock, "generate", *prompt])
    assert done.stdout.strip()
    assert "decode-0" in done.stderr
    done = _run([*penstock, "status", "--json", "--admin", serving.admin])
    assert json.loads(done.stdout)["ready"] is True


def _check_threads(serving: Serving) -> None:
    """Checks that the environment of each process sets its own number of threads."""
    servers = [each for each in _descendants(serving) if each.name().startswith("ray::ServerActor")]
    found = sorted(
        (environment["OMP_NUM_THREADS"], environment["OPENBLAS_NUM_THREADS"])
        for environment in map(psutil.Process.environ, servers)
    )
    worker = str(max(1, len(os.sched_getaffinity(0))))
    assert found == sorted([("1", "1"), (worker, worker)])  # the router and the decode worker


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)


def _running(serving: Serving, name: str) -> list[psutil.Process]:
    """Returns the descendants that run a program. A process that has ended has its name, too, as has a child that has
    not begun its own program yet; these have a single thread.
    """
    found = []
    for each in _descendants(serving):
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.name() == name and each.num_threads() > 1:
                found.append(each)
    return found


def _descendants(serving: Serving) -> list[psutil.Process]:
    return psutil.Process(serving.process.pid).children(recursive=True)
