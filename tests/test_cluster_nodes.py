"""Faults on a Ray of several nodes: workers killed, frozen and unplaceable, a node that dies, a head that is lost.

One deployment for all of them; each leaves it whole. Timings are measured by benchmarks/faults.py, not asserted here.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import ray

from cluster.launch import CONTROLLER, RayDeployment, launch
from cluster.raylets import Raylets
from penstock import Client
from penstock.config import DecodeConfig, PoolConfig, ServeConfig
from penstock.v1 import admin_pb2, admin_pb2_grpc

pytestmark = pytest.mark.cluster

MODEL = str(Path(__file__).resolve().parent.parent / "models" / "penstock-tiny")
PROMPT = "Once upon a time there was a careful boy named Paul. He lived in a small village. " * 3
WITHIN_S = 40.0  # a process start and the import of torch, on a busy machine


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    with Raylets() as several:
        several.add({"prefill": 1, "decode": 1})
        yield several


@pytest.fixture(scope="module")
def lesser_node(raylets: Raylets) -> Any:
    """It holds a decode worker alone."""
    return raylets.add({"decode": 1})


@pytest.fixture(scope="module")
def deployment(raylets: Raylets, lesser_node: Any) -> Iterator[RayDeployment]:
    config = ServeConfig(
        model=MODEL,
        http_port=0,
        grpc_port=0,
        admin_port=0,
        address=raylets.address,
        prefill_pool=PoolConfig(replicas=1, num_cpus=0.1, resources={"prefill": 1}),
        decode_pool=PoolConfig(replicas=2, num_cpus=0.1, resources={"decode": 1}),
        decode=DecodeConfig(placement="remote"),
        engine={"kv_memory_bytes": 64 * 1024 * 1024},
        start_timeout_s=90,
    )
    with launch(config) as running:
        yield running


@pytest.fixture
def client(deployment: RayDeployment) -> Iterator[Client]:
    with Client(deployment.grpc_address, timeout_s=60) as one:
        yield one


Workers = dict[str, admin_pb2.WorkerStatus]


def until(deployment: RayDeployment, condition: Callable[[Workers], bool]) -> Workers:
    """The workers by name, once the condition holds of them."""
    deadline_s = time.monotonic() + WITHIN_S
    version, status = -1, admin_pb2.StatusResponse()
    while time.monotonic() < deadline_s:
        version, status, _ = deployment.wait(version, 2.0)
        workers = {one.member.worker_id: one for one in status.workers}
        if condition(workers):
            return workers
    raise AssertionError(f"not within {WITHIN_S} s; the status is {status}")


def whole(deployment: RayDeployment) -> Workers:
    return until(deployment, lambda workers: all(one.state == "ready" for one in workers.values()))


def until_replaced(deployment: RayDeployment, lost: admin_pb2.WorkerStatus) -> Workers:
    name = lost.member.worker_id
    return until(deployment, lambda workers: workers[name].state == "ready" and workers[name].pid != lost.pid)


def ask(client: Client, max_tokens: int = 40) -> list[int]:
    result = client.complete(PROMPT, max_tokens=max_tokens, temperature=0.8, seed=5, ignore_eos=True)
    assert len(result.token_ids) == max_tokens
    return list(result.token_ids)


def test_the_controller_and_its_routers_are_where_they_were_asked_for(
    raylets: Raylets, deployment: RayDeployment
) -> None:
    """And not on a node that has just joined, to which Ray hands an actor that asks for nothing."""
    router = whole(deployment)["router-0"]
    assert raylets.node_of(_controller(deployment).pid) is raylets.node_of(router.pid) is raylets.head


def test_each_worker_has_a_reservation_that_outlives_the_controller(deployment: RayDeployment) -> None:
    whole(deployment)
    groups = {
        one["name"]: one for one in ray.util.placement_group_table().values() if one["state"] not in {"REMOVED", ""}
    }
    assert set(groups) == {"prefill-0.1", "decode-0.1", "decode-1.1"}
    assert {(one["state"], one["strategy"]) for one in groups.values()} == {("CREATED", "STRICT_PACK")}
    assert groups["decode-1.1"]["bundles"][0] == {"CPU": 0.1, "decode": 1.0}
    assert groups["decode-0.1"]["bundles_to_node_id"] != groups["decode-1.1"]["bundles_to_node_id"]


def test_traffic_does_not_notice_that_the_head_is_lost(
    raylets: Raylets, deployment: RayDeployment, client: Client
) -> None:
    """While it is away a dead worker leaves the membership all the same; when it is back the worker is replaced."""
    before, tokens = whole(deployment), ask(client)
    raylets.kill_head()
    try:
        assert ask(client) == tokens
        os.kill(before["decode-0"].pid, signal.SIGKILL)
        without = until(deployment, lambda workers: workers["decode-0"].state == "lost")
        assert without["decode-1"].state == without["prefill-0"].state == "ready"
        assert ask(client) == tokens
    finally:
        raylets.restart_head()
    after = whole(deployment)
    assert after["decode-0"].num_restarts == before["decode-0"].num_restarts + 1
    assert (after["decode-1"].pid, after["prefill-0"].pid) == (before["decode-1"].pid, before["prefill-0"].pid)
    assert ask(client) == tokens


def test_a_worker_that_is_frozen_for_three_seconds_is_left_out_and_comes_back(
    deployment: RayDeployment, client: Client
) -> None:
    before, tokens = whole(deployment), ask(client)
    os.kill(before["decode-0"].pid, signal.SIGSTOP)
    try:
        silent = until(deployment, lambda workers: workers["decode-0"].state != "ready")
        assert silent["decode-0"].state == "silent"
        assert "no sign of life" in silent["decode-0"].detail
        assert ask(client) == tokens
    finally:
        os.kill(before["decode-0"].pid, signal.SIGCONT)
    assert whole(deployment)["decode-0"].pid == before["decode-0"].pid
    assert ask(client) == tokens


def test_a_worker_that_stays_frozen_is_replaced(deployment: RayDeployment, client: Client) -> None:
    before, tokens = whole(deployment), ask(client)
    os.kill(before["decode-1"].pid, signal.SIGSTOP)
    until(deployment, lambda workers: workers["decode-1"].state == "silent")
    assert ask(client) == tokens
    replaced = until(
        deployment,
        lambda workers: workers["decode-1"].state == "ready" and workers["decode-1"].pid != before["decode-1"].pid,
    )
    assert replaced["decode-1"].member.epoch > before["decode-1"].member.epoch
    assert not Path(f"/proc/{before['decode-1'].pid}").exists() or _is_zombie(before["decode-1"].pid)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_node_dies_and_its_worker_waits_for_another(
    raylets: Raylets, lesser_node: Any, deployment: RayDeployment, client: Client
) -> None:
    """Placement that cannot be satisfied is told, the other workers serve, and a new node is taken."""
    before, tokens = whole(deployment), ask(client)
    raylets.kill(lesser_node)
    assert ask(client) == tokens
    without = until(deployment, lambda workers: "unplaced" in {one.state for one in workers.values()})
    (unplaced,) = [one for one in without.values() if one.state == "unplaced"]
    assert "decode 1" in unplaced.detail
    assert ask(client) == tokens
    raylets.add({"decode": 1})
    after = whole(deployment)
    assert after["prefill-0"].pid == before["prefill-0"].pid
    assert ask(client) == tokens


def test_a_node_that_ray_drains_is_left_without_a_lost_token(
    raylets: Raylets, deployment: RayDeployment, client: Client
) -> None:
    """As for a spot notice: a successor starts elsewhere first, what runs moves there, the node is empty in time."""
    before, tokens = whole(deployment), ask(client, max_tokens=400)
    fixed = before["router-0"].node
    going = next(before[name].node for name in ("decode-1", "decode-0") if before[name].node != fixed)
    leaving = {name for name, one in before.items() if one.node == going}
    token = (("authorization", f"Bearer {deployment.admin_token}"),)
    with ThreadPoolExecutor(6) as pool, grpc.insecure_channel(deployment.admin_address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        for name, problem in ((fixed, "holds the controller and the routers"), ("nowhere", "is none of them")):
            refused = admin.DrainNode(admin_pb2.DrainNodeRequest(node=name), metadata=token)
            with pytest.raises(grpc.RpcError, match=problem):
                next(refused)
        streams = [pool.submit(ask, client, 400) for _ in range(6)]
        raylets.add({"decode": 1, "prefill": 1})
        request = admin_pb2.DrainNodeRequest(node=going[:16], within_s=WITHIN_S)
        told = list(admin.DrainNode(request, timeout=2 * WITHIN_S, metadata=token))
        assert [one.result() for one in streams] == [tokens] * 6
    assert {one.worker_id for one in told} == leaving
    for name in leaving:
        steps = [one for one in told if one.worker_id == name]
        assert list(dict.fromkeys(one.stage for one in steps)) == ["waiting", "draining", "stopping", "ended"]
        assert steps[-1].num_cut_short == 0
    after = whole(deployment)
    assert len(after) == len(before)
    assert not leaving & set(after)
    assert going not in {one.node for one in after.values()}
    assert all(after[name].pid == before[name].pid for name in before if name not in leaving)
    assert ask(client, max_tokens=400) == tokens


def test_a_detached_controller_comes_back_and_takes_over_what_runs(deployment: RayDeployment, client: Client) -> None:
    before, tokens = whole(deployment), ask(client)
    _controller(deployment).kill()
    assert ask(client) == tokens
    after = whole(deployment)
    assert {(one.pid, one.member.epoch) for one in after.values()} == {
        (one.pid, one.member.epoch) for one in before.values()
    }
    name = next(one for one in after if one.startswith("decode"))
    os.kill(after[name].pid, signal.SIGKILL)
    assert ask(client) == tokens
    replaced = until_replaced(deployment, after[name])
    assert replaced[name].num_restarts == after[name].num_restarts + 1


def _controller(deployment: RayDeployment) -> psutil.Process:
    (found,) = [one for one in psutil.process_iter(["cmdline", "ppid"]) if _is_controller_of(one, deployment)]
    return found


def _is_controller_of(process: psutil.Process, deployment: RayDeployment) -> bool:
    """The one that listens at the deployment's Admin port."""
    if "ControllerActor" not in " ".join(process.info["cmdline"] or []):
        return False
    port = int(deployment.admin_address.rpartition(":")[2])
    return any(one.laddr.port == port for one in process.net_connections() if one.status == psutil.CONN_LISTEN)


def test_stop_leaves_no_actor_and_no_reservation(deployment: RayDeployment) -> None:
    whole(deployment)
    with grpc.insecure_channel(deployment.admin_address) as channel:
        token = (("authorization", f"Bearer {deployment.admin_token}"),)
        admin_pb2_grpc.AdminStub(channel).Stop(admin_pb2.StopRequest(), timeout=40, metadata=token)
    states = {one["state"] for one in ray.util.placement_group_table().values()}
    assert states <= {"REMOVED"}
    assert [name for name in ray.util.list_named_actors() if name != CONTROLLER] == []
