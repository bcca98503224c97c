"""Tests the whole system on a local Ray with the bundled model: serves, kills each kind of process, stops. No fakes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
import ray

from cluster.cli import main
from cluster.ray.launch import RayDeployment, launch
from penstock import Client
from penstock.client.results import GenerateResult, ResultBuilder
from penstock.config import DecodeConfig, KeeperConfig, PoolConfig, ServeConfig
from penstock.metrics.worker_metrics import KEPT_PAGES
from penstock.rpc.admin_token import find_token
from penstock.rpc.secret import PEER, ClusterSecrets
from penstock.types import FinishReason
from penstock.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.prefork.module_process import forked_ray_workers
from tests.support.ray_nodes import controller_process

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[3]
MODEL = str(ROOT / "models" / "penstock-tiny")
PROMPT = "Once upon a time there was a careful boy named Paul. He lived in a small village. " * 3
_NUMBERS = itertools.count()
REPLACED_WITHIN_S = 200.0  # on a busy machine, a process needs a while to start and to import torch


@pytest.fixture(scope="module")
def deployment() -> Iterator[RayDeployment]:
    config = ServeConfig(
        model=MODEL,
        http_port=0,
        grpc_port=0,
        admin_port=0,
        routers=2,
        prefill_pool=PoolConfig(replicas=1),
        decode_pool=PoolConfig(replicas=2),
        decode=DecodeConfig(placement="remote"),
        engine={"kv_memory_bytes": 64 * 1024 * 1024, "dtype": "bfloat16"},
        keeper=KeeperConfig(name=f"test-{uuid.uuid4().hex}"),
        start_timeout_s=240,
    )
    with forked_ray_workers(), launch(config) as running:
        yield running


@pytest.fixture
def client(deployment: RayDeployment) -> Iterator[Client]:
    with Client(deployment.grpc_address, timeout_s=120) as each:
        yield each


@pytest.fixture(scope="module")
def long_answers(deployment: RayDeployment) -> dict[int, tuple[int, ...]]:
    """Returns, by seed, what an undisturbed deployment answers to `_ask_long`."""
    with Client(deployment.grpc_address, timeout_s=120) as client:
        return {seed: _ask_long(client, seed).token_ids for seed in range(2)}


def worker(status: admin_pb2.StatusResponse, worker_id: str) -> admin_pb2.WorkerStatus:
    return next(each for each in status.workers if each.member.worker_id == worker_id)


def until(deployment: RayDeployment, condition: Callable[[admin_pb2.StatusResponse], bool]) -> admin_pb2.StatusResponse:
    """Follows the status until the condition holds."""
    deadline_s = time.monotonic() + REPLACED_WITHIN_S
    version, status = -1, admin_pb2.StatusResponse()
    while time.monotonic() < deadline_s:
        version, status, _ = deployment.wait(version, 2.0)
        if condition(status):
            return status
    raise AssertionError(f"not within {REPLACED_WITHIN_S} s; the status is {status}")


def until_replaced(deployment: RayDeployment, lost: admin_pb2.WorkerStatus) -> admin_pb2.WorkerStatus:
    def replaced(status: admin_pb2.StatusResponse) -> bool:
        now = worker(status, lost.member.worker_id)
        return status.ready and now.state == "ready" and now.pid != lost.pid

    return worker(until(deployment, replaced), lost.member.worker_id)


def ask(client: Client, max_tokens: int = 60) -> GenerateResult:
    return client.complete(PROMPT, max_tokens=max_tokens, temperature=0.8, seed=5, ignore_eos=True)


def test_a_ready_deployment_answers_with_both_pools(deployment: RayDeployment, client: Client) -> None:
    status = deployment.status()
    assert status.ready
    assert {each.state for each in status.workers if each.member.worker_id != "router-1"} == {"ready"}
    until(deployment, lambda status: {each.state for each in status.workers} == {"ready"})
    assert [each.member.role for each in status.workers] == ["prefill", "decode", "decode", "router", "router"]
    assert _prefilled_by(client, "prefill-0")  # the routers learn of it at different times
    result = ask(client)
    assert (result.usage.completion_tokens, result.finish_reason) == (60, FinishReason.LENGTH)
    assert result.timing.prefill_worker == "prefill-0"
    assert result.timing.decode_worker in {"decode-0", "decode-1"}
    assert result.timing.pages_moved > 0
    assert [model.id for model in client.list_models()] == ["penstock-tiny"]
    times_s = (deployment.start_up.ray_s, deployment.start_up.workers_s, deployment.start_up.first_request_s)
    assert min(times_s) > 0


def test_workers_listen_only_on_loopback(deployment: RayDeployment) -> None:
    assert all(each.member.address.startswith("127.0.0.1:") for each in deployment.status().workers)


def test_a_killed_decode_worker_is_replaced_and_its_stream_continues(deployment: RayDeployment, client: Client) -> None:
    undisturbed = ask(client, max_tokens=300)
    _decode_workers(deployment, busy=0)
    builder = ResultBuilder()
    with client.generate(PROMPT, max_tokens=300, temperature=0.8, seed=5, ignore_eos=True) as stream:
        builder.add(next(stream))
        (victim,) = _decode_workers(deployment, busy=1)
        os.kill(victim.pid, signal.SIGKILL)
        for chunk in stream:
            builder.add(chunk)
    result = builder.result()
    assert result.token_ids == undisturbed.token_ids
    assert result.text == undisturbed.text
    assert result.timing.num_redispatches == 1
    successor = until_replaced(deployment, victim)
    assert successor.num_restarts == 1
    assert successor.member.epoch != victim.member.epoch
    wait_for_kept_pages(deployment, successor)


def wait_for_kept_pages(deployment: RayDeployment, successor: admin_pb2.WorkerStatus) -> None:
    """Waits until a worker has taken back pages of its predecessor."""
    deadline_s = time.monotonic() + REPLACED_WITHIN_S
    while time.monotonic() < deadline_s:
        workers = deployment.status().workers
        (found,) = (each for each in workers if each.member.worker_id == successor.member.worker_id)
        if found.load.metrics[KEPT_PAGES.name] > 0:
            return
        time.sleep(0.1)
    raise AssertionError(f"{successor.member.worker_id} has taken no page back")


def _decode_workers(deployment: RayDeployment, busy: int) -> list[admin_pb2.WorkerStatus]:
    """Returns the decode workers that run a sequence, once `busy` of them do; loads are up to a second old."""
    deadline_s = time.monotonic() + REPLACED_WITHIN_S
    while time.monotonic() < deadline_s:
        workers = deployment.status().workers
        running = [each for each in workers if each.member.role == "decode" and each.load.num_running > 0]
        if len(running) == busy:
            return running
        time.sleep(0.05)
    raise AssertionError(f"{len(running)} decode workers are busy, not {busy}")


def test_a_killed_prefill_worker_is_replaced_and_no_request_fails(deployment: RayDeployment, client: Client) -> None:
    undisturbed = ask(client)
    victim = worker(deployment.status(), "prefill-0")
    os.kill(victim.pid, signal.SIGKILL)
    assert ask(client).token_ids == undisturbed.token_ids
    successor = until_replaced(deployment, victim)
    assert successor.num_restarts == 1
    assert _prefilled_by(client, "prefill-0")


def _prefilled_by(client: Client, worker_id: str) -> bool:
    """Returns whether the worker prefills again, once the router knows it. Each prompt is new to every cache."""
    deadline_s = time.monotonic() + REPLACED_WITHIN_S
    while time.monotonic() < deadline_s:
        prompt = f"{next(_NUMBERS)} things that no cache holds, so that they are prefilled."
        if client.complete(prompt, max_tokens=1).timing.prefill_worker == worker_id:
            return True
        time.sleep(0.1)
    return False


def test_a_killed_router_refuses_nobody_and_returns_at_the_same_ports(
    deployment: RayDeployment, client: Client
) -> None:
    undisturbed = ask(client)
    before = until(deployment, lambda status: all(each.state == "ready" for each in status.workers))
    for number in range(2):  # the client's connection may lead to either router
        victim = worker(deployment.status(), f"router-{number}")
        with client.generate(PROMPT, max_tokens=60, temperature=0.8, seed=5, ignore_eos=True) as stream:
            tokens = next(stream).token_ids
            os.kill(victim.pid, signal.SIGKILL)
            for chunk in stream:
                tokens += chunk.token_ids
        assert tokens == undisturbed.token_ids
        host, _, port = deployment.http_address.rpartition(":")
        while worker(deployment.status(), f"router-{number}").pid == victim.pid:
            socket.create_connection((host, int(port)), timeout=REPLACED_WITHIN_S).close()
        until_replaced(deployment, victim)
    assert deployment.status().endpoints == before.endpoints
    assert ask(client).token_ids == undisturbed.token_ids


def test_a_router_that_gets_sigterm_finishes_its_streams_and_returns(deployment: RayDeployment) -> None:
    router = worker(deployment.status(), "router-0")
    with Client(router.member.address, timeout_s=120) as client:
        undisturbed = client.complete(PROMPT, max_tokens=300, temperature=0.8, seed=5, ignore_eos=True)
        with client.generate(PROMPT, max_tokens=300, temperature=0.8, seed=5, ignore_eos=True) as stream:
            builder = ResultBuilder()
            builder.add(next(stream))
            os.kill(router.pid, signal.SIGTERM)
            for chunk in stream:
                builder.add(chunk)
        assert builder.result().token_ids == undisturbed.token_ids
        until_replaced(deployment, router)
    with Client(deployment.grpc_address, timeout_s=120) as client:
        assert ask(client).usage.completion_tokens == 60


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_controller_returns_and_disturbs_no_process(
    deployment: RayDeployment, client: Client, number: signal.Signals
) -> None:
    before = until(deployment, lambda status: all(each.state == "ready" for each in status.workers))
    undisturbed = ask(client, max_tokens=300)
    controller = controller_process(deployment)
    with client.generate(PROMPT, max_tokens=300, temperature=0.8, seed=5, ignore_eos=True) as stream:
        builder = ResultBuilder()
        builder.add(next(stream))
        controller.send_signal(number)
        for chunk in stream:
            builder.add(chunk)
    assert builder.result().token_ids == undisturbed.token_ids
    assert builder.result().timing.num_redispatches == 0
    after = until(deployment, lambda status: status.ready)
    assert after.uptime_s < before.uptime_s  # another controller answers
    assert [(each.member.epoch, each.pid, each.num_restarts) for each in after.workers] == [
        (each.member.epoch, each.pid, each.num_restarts) for each in before.workers
    ]
    assert ask(client).usage.completion_tokens == 60
    victim = next(each for each in after.workers if each.member.role == "prefill")
    os.kill(victim.pid, signal.SIGKILL)
    assert until_replaced(deployment, victim).member.epoch != victim.member.epoch  # it replaces dead workers


def test_a_frozen_decode_worker_is_replaced(deployment: RayDeployment, client: Client) -> None:
    victim = worker(deployment.status(), "decode-1")
    os.kill(victim.pid, signal.SIGSTOP)
    lost = until(deployment, lambda status: worker(status, "decode-1").pid != victim.pid)
    assert ask(client).usage.completion_tokens == 60
    until_replaced(deployment, victim)
    assert worker(lost, "decode-1").member.worker_id == "decode-1"
    assert not psutil.pid_exists(victim.pid) or psutil.Process(victim.pid).status() == psutil.STATUS_ZOMBIE


def test_a_decode_worker_is_drained_under_load_and_no_request_fails(
    deployment: RayDeployment,
    client: Client,
    long_answers: dict[int, tuple[int, ...]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Running sequences migrate with their KV, and the tokens equal those of an undisturbed run."""
    _decode_workers(deployment, busy=0)
    with ThreadPoolExecutor(8) as pool:
        asked = {index: pool.submit(_ask_long, client, index % 2) for index in range(8)}
        victim = _busiest_decode_worker(deployment)
        assert (
            main.main(["drain", victim.member.worker_id, "--replace", "--json", "--admin", deployment.admin_address])
            == 0
        )
        results = {index: each.result() for index, each in asked.items()}
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["stage"] for each in reports][-2:] == ["stopping", "ended"]
    assert reports[-1]["num_cut_short"] == 0
    for index, result in results.items():
        assert result.token_ids == long_answers[index % 2]
        assert result.timing.num_redispatches == 0
    assert sum(result.timing.num_migrations for result in results.values()) == reports[-1]["num_migrated"] > 0
    replaced = until_replaced(deployment, victim)
    assert replaced.num_restarts == 0


def test_a_worker_flips_its_role_in_its_process(
    deployment: RayDeployment, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = ask(client).token_ids
    before = worker(deployment.status(), "prefill-0")
    admin = ["--admin", deployment.admin_address]
    assert main.main(["flip", "prefill-0", "decode", "--json", *admin]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (reports[-1]["stage"], reports[-1]["worker_id"]) == ("ready", "decode-2")
    assert worker(deployment.status(), "decode-2").pid == before.pid
    assert ask(client).token_ids == undisturbed
    assert main.main(["flip", "decode-2", "prefill", *admin]) == 0
    assert "decode-2 serves as prefill-0" in capsys.readouterr().out
    assert worker(deployment.status(), "prefill-0").pid == before.pid
    assert ask(client).token_ids == undisturbed


def test_callers_without_the_secret_are_refused_and_no_log_holds_a_secret(
    deployment: RayDeployment, client: Client
) -> None:
    """This is the default, and holds for Ray's own logs too."""
    marker = "xylophone-7361"
    client.complete(f"{marker} said the fox. " * 12, max_tokens=4)
    for each in deployment.status().workers:
        if each.member.role != "router":
            with grpc.insecure_channel(each.member.address) as channel, pytest.raises(grpc.RpcError) as caught:
                worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with grpc.insecure_channel(deployment.admin_address) as channel, pytest.raises(grpc.RpcError) as caught:
        admin_pb2_grpc.AdminStub(channel).Stop(admin_pb2.StopRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert find_token(deployment.admin_address) == deployment.admin_token
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    logs = [
        path.read_bytes() for path in session.rglob("*.*") if path.is_file() and path.suffix in (".log", ".out", ".err")
    ]
    assert len(logs) > 5
    secrets = ClusterSecrets.of(deployment.config.security)
    assert secrets is not None
    secret = secrets.current
    for hidden in (marker, secret.reveal(), deployment.admin_token, secret.token(PEER)):
        assert not any(hidden.encode() in log for log in logs)


def _busiest_decode_worker(deployment: RayDeployment) -> admin_pb2.WorkerStatus:
    """Returns the decode worker with the most sequences, once it runs a few."""
    deadline_s = time.monotonic() + REPLACED_WITHIN_S
    while time.monotonic() < deadline_s:
        decode = [each for each in deployment.status().workers if each.member.role == "decode"]
        busiest = max(decode, key=lambda each: each.load.num_running)
        if busiest.load.num_running >= 2:
            return busiest
        time.sleep(0.05)
    raise AssertionError("no decode worker runs two sequences")


def test_a_worker_that_gets_sigterm_is_drained_and_replaced(
    deployment: RayDeployment, client: Client, long_answers: dict[int, tuple[int, ...]]
) -> None:
    """Sends SIGTERM to the process, as a machine does that shuts down: sequences migrate, and nothing is recomputed."""
    until(deployment, lambda status: all(each.state == "ready" for each in status.workers))
    _decode_workers(deployment, busy=0)
    with ThreadPoolExecutor(8) as pool:
        asked = {index: pool.submit(_ask_long, client, index % 2) for index in range(8)}
        victim = _busiest_decode_worker(deployment)
        prefill = worker(deployment.status(), "prefill-0")
        os.kill(victim.pid, signal.SIGTERM)
        os.kill(prefill.pid, signal.SIGTERM)
        left = until(deployment, lambda status: _of_pid(status, victim.pid) is None)
        results = {index: each.result() for index, each in asked.items()}
    for index, result in results.items():
        assert result.token_ids == long_answers[index % 2]
        assert result.timing.num_redispatches == 0
    assert sum(result.timing.num_migrations for result in results.values()) > 0
    whole = until(deployment, lambda status: _is_whole(status) and _of_pid(status, prefill.pid) is None)
    assert {each.member.role for each in whole.workers} == {each.member.role for each in left.workers}
    assert _prefilled_by(client, next(each.member.worker_id for each in whole.workers if each.member.role == "prefill"))


def _of_pid(status: admin_pb2.StatusResponse, pid: int) -> admin_pb2.WorkerStatus | None:
    return next((each for each in status.workers if each.pid == pid), None)


def _is_whole(status: admin_pb2.StatusResponse) -> bool:
    roles = [each.member.role for each in status.workers if each.state == "ready"]
    return sorted(roles) == ["decode", "decode", "prefill", "router", "router"] and len(status.workers) == len(roles)


def _ask_long(client: Client, seed: int) -> GenerateResult:
    return client.complete(PROMPT, max_tokens=450, temperature=0.8, seed=seed, ignore_eos=True)


def test_stop_leaves_no_process(deployment: RayDeployment) -> None:
    processes = deployment.processes()
    assert len(processes) > 5
    with grpc.insecure_channel(deployment.admin_address) as channel:
        admin_pb2_grpc.AdminStub(channel).Stop(
            admin_pb2.StopRequest(), timeout=120, metadata=(("authorization", f"Bearer {deployment.admin_token}"),)
        )
    deployment.wait_until_stopped()
    deployment.stop()
    _, alive = psutil.wait_procs(processes, timeout=60)  # until init has reaped the orphans
    assert alive == []
