"""Tests faults on a Ray of several nodes: frozen and unplaceable workers, a node that dies, a head that is lost.

All tests share one deployment, and each leaves it whole. benchmarks/cluster/faults.py measures the times.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray

from cluster.ray.launch import CONTROLLER, RayDeployment, launch, running_controller
from cluster.ray.nodes import RayNodes
from penstock import Client
from penstock.config import DecodeConfig, PoolConfig, ServeConfig
from penstock.errors import ConfigError
from penstock.rpc.admin_token import find_token
from penstock.v1 import admin_pb2, admin_pb2_grpc
from tests.support.ray_nodes import LocalRayNodes, controller_process

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

MODEL = str(Path(__file__).resolve().parents[3] / "models" / "penstock-tiny")
PROMPT = "Once upon a time there was a careful boy named Paul. He lived in a small village. " * 3
WITHIN_S = 200.0  # on a busy machine, a process needs a while to start and to import torch


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[LocalRayNodes]:
    with LocalRayNodes() as several:
        several.add({"prefill": 1, "decode": 1})
        yield several


@pytest.fixture(scope="module")
def lesser_node(ray_nodes: LocalRayNodes) -> Any:
    """Adds a node with room for nothing but a decode worker."""
    return ray_nodes.add({"decode": 1})


@pytest.fixture(scope="module")
def deployment(ray_nodes: LocalRayNodes, lesser_node: Any) -> Iterator[RayDeployment]:
    config = ServeConfig(
        model=MODEL,
        http_port=0,
        grpc_port=0,
        admin_port=0,
        routers=1,
        address=ray_nodes.address,
        security=ray_nodes.security,
        prefill_pool=PoolConfig(replicas=1, num_cpus=0.1, resources={"prefill": 1}),
        decode_pool=PoolConfig(replicas=2, num_cpus=0.1, resources={"decode": 1}),
        decode=DecodeConfig(placement="remote"),
        engine={"kv_memory_bytes": 64 * 1024 * 1024},
        start_timeout_s=240,
    )
    with launch(config) as running:
        yield running


@pytest.fixture
def client(deployment: RayDeployment) -> Iterator[Client]:
    with Client(deployment.grpc_address, timeout_s=120) as each:
        yield each


Workers = dict[str, admin_pb2.WorkerStatus]


def until(deployment: RayDeployment, condition: Callable[[Workers], bool]) -> Workers:
    """Returns the workers by name, once the condition holds for them."""
    deadline_s = time.monotonic() + WITHIN_S
    version, status = -1, admin_pb2.StatusResponse()
    while time.monotonic() < deadline_s:
        version, status, _ = deployment.wait(version, 2.0)
        workers = {each.member.worker_id: each for each in status.workers}
        if condition(workers):
            return workers
    raise AssertionError(f"not within {WITHIN_S} s; the status is {status}")


def whole(deployment: RayDeployment) -> Workers:
    return until(deployment, _are_ready)


def _are_ready(workers: Workers) -> bool:
    return all(each.state == "ready" for each in workers.values())


def until_replaced(deployment: RayDeployment, lost: admin_pb2.WorkerStatus) -> Workers:
    name = lost.member.worker_id
    return until(deployment, lambda workers: workers[name].state == "ready" and workers[name].pid != lost.pid)


def ask(client: Client, max_tokens: int = 40) -> list[int]:
    result = client.complete(PROMPT, max_tokens=max_tokens, temperature=0.8, seed=5, ignore_eos=True)
    assert len(result.token_ids) == max_tokens
    return list(result.token_ids)


def test_the_controller_and_its_routers_are_on_the_requested_node(
    ray_nodes: LocalRayNodes, deployment: RayDeployment
) -> None:
    """Ray would place actors without a request on the node that has just joined."""
    router = whole(deployment)["router-0"]
    assert ray_nodes.node_of(controller_process(deployment).pid) is ray_nodes.node_of(router.pid) is ray_nodes.head


def test_each_worker_has_a_reservation_that_outlives_the_controller(deployment: RayDeployment) -> None:
    whole(deployment)
    groups = {
        each["name"]: each for each in ray.util.placement_group_table().values() if each["state"] not in {"REMOVED", ""}
    }
    assert set(groups) == {"prefill-0.1", "decode-0.1", "decode-1.1"}
    assert {(each["state"], each["strategy"]) for each in groups.values()} == {("CREATED", "STRICT_PACK")}
    assert groups["decode-1.1"]["bundles"][0] == {"CPU": 0.1, "decode": 1.0}
    assert groups["decode-0.1"]["bundles_to_node_id"] != groups["decode-1.1"]["bundles_to_node_id"]


def test_traffic_continues_while_the_head_is_lost(
    ray_nodes: LocalRayNodes, deployment: RayDeployment, client: Client
) -> None:
    """A dead worker leaves the membership while the head is away, and is replaced once the head is back."""
    before, tokens = whole(deployment), ask(client)
    ray_nodes.kill_head()
    try:
        assert ask(client) == tokens
        os.kill(before["decode-0"].pid, signal.SIGKILL)
        without = until(deployment, lambda workers: workers["decode-0"].state == "lost")
        assert without["decode-1"].state == without["prefill-0"].state == "ready"
        assert ask(client) == tokens
    finally:
        ray_nodes.restart_head()
    after = until(deployment, lambda workers: ray_nodes.replace_ended() or _are_ready(workers))
    assert after["decode-0"].num_restarts == before["decode-0"].num_restarts + 1
    assert (after["decode-1"].pid, after["prefill-0"].pid) == (before["decode-1"].pid, before["prefill-0"].pid)
    assert ask(client) == tokens


def test_a_worker_frozen_for_three_seconds_leaves_the_membership_and_returns(
    deployment: RayDeployment, client: Client
) -> None:
    tokens = ask(client)
    # It is replaced after three more seconds. A busy machine may need them for the answer; then it is frozen again.
    assert any(_returns_after_a_freeze(deployment, client, tokens) for _ in range(5))
    assert ask(client) == tokens


def _returns_after_a_freeze(deployment: RayDeployment, client: Client, tokens: list[int]) -> bool:
    """Freezes decode-0 until it has left the membership; returns whether it came back as the same process."""
    frozen = whole(deployment)["decode-0"]
    with ThreadPoolExecutor(1) as pool:
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            left = until(deployment, lambda workers: workers["decode-0"].state != "ready")["decode-0"]
            answer = pool.submit(ask, client)
            wait([answer], timeout=2.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(frozen.pid, signal.SIGCONT)
        assert answer.result() == tokens
    returned = whole(deployment)["decode-0"].pid == frozen.pid
    assert not returned or (left.state == "silent" and "no sign of life" in left.detail)
    return returned


def test_a_worker_that_stays_frozen_is_replaced(deployment: RayDeployment, client: Client) -> None:
    before, tokens = whole(deployment), ask(client)
    os.kill(before["decode-1"].pid, signal.SIGSTOP)
    until(deployment, lambda workers: workers["decode-1"].state == "silent")
    assert ask(client) == tokens
    replaced = until(
        deployment,
        lambda workers: workers["decode-1"].state == "ready" and workers["decode-1"].pid != before["decode-1"].pid,
    )
    assert replaced["decode-1"].member.epoch != before["decode-1"].member.epoch
    assert not Path(f"/proc/{before['decode-1'].pid}").exists() or _is_zombie(before["decode-1"].pid)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_node_dies_and_its_worker_waits_for_another_node(
    ray_nodes: LocalRayNodes, lesser_node: Any, deployment: RayDeployment, client: Client
) -> None:
    """The status reports the impossible placement, the other workers serve, and a new node is used."""
    before, tokens = whole(deployment), ask(client)
    ray_nodes.kill(lesser_node)
    assert ask(client) == tokens
    without = until(deployment, lambda workers: "unplaced" in {each.state for each in workers.values()})
    (unplaced,) = [each for each in without.values() if each.state == "unplaced"]
    assert "decode 1" in unplaced.detail
    # A fence over RDMA waits for this proof: Ray considers the killed node dead, and only that one.
    dead, alive = before[unplaced.member.worker_id].node, before["prefill-0"].node
    nodes, found = RayNodes(alive, asyncio.Event().wait), set[str]()
    until(deployment, lambda _: found.update(asyncio.run(nodes.find_dead([dead, alive]))) or bool(found))
    assert found == {dead}
    assert ask(client) == tokens
    ray_nodes.add({"decode": 1})
    after = until(deployment, lambda workers: ray_nodes.replace_ended() or _are_ready(workers))
    assert after["prefill-0"].pid == before["prefill-0"].pid
    assert ask(client) == tokens


def test_a_node_that_ray_drains_is_emptied_without_a_lost_token(
    ray_nodes: LocalRayNodes, deployment: RayDeployment, client: Client
) -> None:
    """A successor starts elsewhere, sequences migrate to it, and the node is empty in time."""
    before, tokens = whole(deployment), ask(client, max_tokens=300)
    fixed = before["router-0"].node
    going = next(before[name].node for name in ("decode-1", "decode-0") if before[name].node != fixed)
    leaving = {name for name, each in before.items() if each.node == going}
    token = (("authorization", f"Bearer {deployment.admin_token}"),)
    with ThreadPoolExecutor(6) as pool, grpc.insecure_channel(deployment.admin_address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        for name, problem in ((fixed, "Ray's head"), ("nowhere", "is none of them")):
            refused = admin.DrainNode(admin_pb2.DrainNodeRequest(node=name), metadata=token)
            with pytest.raises(grpc.RpcError, match=problem):
                next(refused)
        streams = [pool.submit(ask, client, 300) for _ in range(6)]
        ray_nodes.add({"decode": 1, "prefill": 1})
        request = admin_pb2.DrainNodeRequest(node=going[:16], within_s=WITHIN_S)
        reports = list(admin.DrainNode(request, timeout=2 * WITHIN_S, metadata=token))
        assert [each.result() for each in streams] == [tokens] * 6
    assert {each.worker_id for each in reports} == leaving
    for name in leaving:
        steps = [each for each in reports if each.worker_id == name]
        assert list(dict.fromkeys(each.stage for each in steps)) == ["waiting", "draining", "stopping", "ended"]
        assert steps[-1].num_cut_short == 0
    after = whole(deployment)
    assert len(after) == len(before)
    assert not leaving & set(after)
    assert going not in {each.node for each in after.values()}
    assert all(after[name].pid == before[name].pid for name in before if name not in leaving)
    assert ask(client) == tokens[:40]


def test_serve_attaches_to_a_running_deployment(deployment: RayDeployment, client: Client) -> None:
    """This happens after a restart of the head's node; without `attach` the start is refused."""
    before = whole(deployment)
    following = RayDeployment(deployment.config, [])
    following.start({}, time.monotonic(), lambda status: None, running_controller())
    assert {each.pid for each in following.status().workers} == {each.pid for each in before.values()}
    assert find_token(deployment.admin_address) == deployment.admin_token  # the valid token was not replaced
    with pytest.raises(ConfigError, match="runs in this Ray cluster already"):
        RayDeployment(deployment.config, []).start({}, time.monotonic(), lambda status: None)


def test_a_detached_controller_returns_and_recovers_the_workers(deployment: RayDeployment, client: Client) -> None:
    before, tokens = whole(deployment), ask(client)
    controller_process(deployment).kill()
    assert ask(client) == tokens
    after = whole(deployment)
    assert {(each.pid, each.member.epoch) for each in after.values()} == {
        (each.pid, each.member.epoch) for each in before.values()
    }
    name = next(each for each in after if each.startswith("decode"))
    os.kill(after[name].pid, signal.SIGKILL)
    assert ask(client) == tokens
    replaced = until_replaced(deployment, after[name])
    assert replaced[name].num_restarts == after[name].num_restarts + 1


def test_stop_leaves_no_actor_and_no_reservation(deployment: RayDeployment) -> None:
    whole(deployment)
    with grpc.insecure_channel(deployment.admin_address) as channel:
        token = (("authorization", f"Bearer {deployment.admin_token}"),)
        admin_pb2_grpc.AdminStub(channel).Stop(admin_pb2.StopRequest(), timeout=120, metadata=token)
    states = {each["state"] for each in ray.util.placement_group_table().values()}
    assert states <= {"REMOVED"}
    assert [name for name in ray.util.list_named_actors() if name != CONTROLLER] == []
