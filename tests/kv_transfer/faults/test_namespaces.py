"""Tests transfers between two network namespaces, which stand in for hosts without RDMA.

NIXL refuses, and torch survives a broken link. A wrong hardware address for the peer loses frames in one direction: no
host accepts them. Namespaces and virtual links need root.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from kv_transfer.transports import nixl_agent
from penstock.types import PageId
from tests.kv_transfer.faults.test_faults import NUM_MOVED, cut_pushes, pick_pages
from tests.support.transfer.transfer_child import HOST, OWN_NETWORK, Child, make_source
from tests.support.transfer.transfer_pair import key

NUM_PAGES, PAGE_BYTES = 64, 1 << 20
NOBODY = "02:00:00:00:00:99"
HOSTS = {"receiver": "10.77.0.1", "sender": "10.77.0.2"}
AFTER_S = 1.0  # within this time, bytes that a kernel still holds arrive once the link works again
NEEDED = os.geteuid() == 0 and shutil.which("ip") and shutil.which("nsenter")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not NEEDED, reason="root, ip and nsenter are needed"),
]


class Net:
    """Runs two children on one link, each in its own network namespace."""

    def __init__(self, transport: str) -> None:
        self.ends = {
            role: Child(role, transport, epoch, NUM_PAGES, PAGE_BYTES, **{OWN_NETWORK: "yes", HOST: HOSTS[role]})
            for role, epoch in (("receiver", 2), ("sender", 1))
        }
        pids = {role: child.process.pid for role, child in self.ends.items()}
        if [child.reply() for child in self.ends.values()] != ["alone", "alone"]:
            self.close()
            pytest.skip("no namespaces here")
        receiver, sender = (f"kv-{role} netns {pids[role]}" for role in ("receiver", "sender"))
        made = _ip(*f"link add {receiver} type veth peer name {sender}".split(), check=False)
        if made.returncode:
            self.close()
            pytest.skip(f"no virtual links here: {made.stderr.strip()}")
        for role in self.ends:
            self.ip(role, f"addr add {HOSTS[role]}/24 dev kv-{role}")
            self.ip(role, f"link set kv-{role} up")
            self.ip(role, "link set lo up")
        self.hardware = {role: self.ip(role, f"-br link show kv-{role}").split()[2] for role in self.ends}
        for child in self.ends.values():
            child._pipe.send("go")
            assert child.reply() == "ready"

    def ip(self, role: str, command: str) -> str:
        pid = self.ends[role].process.pid
        return _ip(*command.split(), wrap=["nsenter", "-t", str(pid), "-n"]).stdout

    def lose(self, role: str) -> None:
        """Loses every frame that this end sends."""
        self.point(role, NOBODY)

    def heal(self) -> None:
        for role, other in (("receiver", "sender"), ("sender", "receiver")):
            self.ip(role, f"link set kv-{role} up")
            self.point(role, self.hardware[other])

    def cut(self) -> None:
        self.ip("sender", "link set kv-sender down")

    def point(self, role: str, hardware: str) -> None:
        other = "receiver" if role == "sender" else "sender"
        self.ip(role, f"neigh replace {HOSTS[other]} lladdr {hardware} dev kv-{role} nud permanent")

    def close(self) -> None:
        for child in self.ends.values():
            child.kill()


def _ip(*arguments: str, wrap: list[str] | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*(wrap or []), "ip", *arguments], check=check, capture_output=True, text=True, timeout=60)


@pytest.fixture
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    made = Net(request.param)
    yield made
    made.close()


@pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")
@pytest.mark.parametrize("net", ["nixl"], indirect=True)
def test_nixl_is_not_used_between_hosts_without_rdma(net: Net) -> None:
    offer = net.ends["receiver"].call("open", key(0), [PageId(0)])
    (error,) = net.ends["sender"].call("run", key(0), offer, [(0, [PageId(0)], [PageId(0)])])
    assert "no common transport" in error


@pytest.mark.parametrize("net", ["torch"], indirect=True)
@pytest.mark.parametrize("fault", ["cut", "lost to the receiver", "lost to the sender"])
def test_a_transfer_ends_when_its_link_loses_one_direction_or_is_cut(net: Net, fault: str) -> None:
    rng = random.Random(fault)
    source = make_source(NUM_PAGES, PAGE_BYTES)
    receiver, sender = net.ends["receiver"], net.ends["sender"]

    def begin(number: int) -> tuple[list[PageId], list[PageId]]:
        src, dst = pick_pages(rng)
        offer = receiver.call("open", key(number), dst)
        sender.send("run", key(number), offer, cut_pushes(rng, src, dst))
        return src, dst

    src, dst = begin(0)
    assert sender.reply() == []
    assert receiver.call("landed", key(0), dst) == source[src].numpy().tobytes()

    {
        "cut": net.cut,
        "lost to the receiver": lambda: net.lose("sender"),
        "lost to the sender": lambda: net.lose("receiver"),
    }[fault]()
    src, dst = begin(1)
    assert sender.reply(), "the sender counts pages as written that cannot be"
    landed, pages = receiver.call("ended", key(1), dst)
    assert pages == source[[src[index] for index in landed]].numpy().tobytes()
    receiver.send("lift", key(1), dst, AFTER_S + 1.0)
    net.heal()
    num_changed, _ = receiver.reply()
    assert num_changed == 0
    assert len(landed) < NUM_MOVED or fault == "lost to the sender"

    src, dst = begin(2)
    assert sender.reply() == []
    assert receiver.call("landed", key(2), dst) == source[src].numpy().tobytes()
