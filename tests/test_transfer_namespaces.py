"""NIXL over TCP between two network namespaces, whose link is cut or loses one way: both ends are told, and go on.

One-way loss is made with a wrong hardware address for the peer: frames leave and nobody takes them. Needs root, as
namespaces and virtual links do.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from kv_transfer import nixl_agent
from penstock.types import PageId
from tests.test_transfer_faults import NUM_MOVED, cut_up, draw_pages
from tests.transfer_child import OWN_NETWORK, Child, make_source
from tests.transfer_pair import key

NUM_PAGES, PAGE_BYTES = 64, 1 << 20
NOBODY = "02:00:00:00:00:99"
HOSTS = {"receiver": "10.77.0.1", "sender": "10.77.0.2"}
AFTER_S = 1.0  # for bytes that a kernel still holds to come, once the link is whole again
NEEDED = nixl_agent.is_installed() and os.geteuid() == 0 and shutil.which("ip") and shutil.which("nsenter")

pytestmark = pytest.mark.skipif(not NEEDED, reason="NIXL, root, ip and nsenter are needed")


class Net:
    """Two children on one link, each in a namespace of its own."""

    def __init__(self) -> None:
        environment = {"UCX_TLS": "tcp", OWN_NETWORK: "yes"}
        self.ends = {
            role: Child(role, "nixl", epoch, NUM_PAGES, PAGE_BYTES, UCX_NET_DEVICES=f"kv-{role}", **environment)
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
        """What this end sends is lost."""
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
    return subprocess.run([*(wrap or []), "ip", *arguments], check=check, capture_output=True, text=True, timeout=10)


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    yield made
    made.close()


@pytest.mark.parametrize("fault", ["cut", "lost to the receiver", "lost to the sender"])
def test_a_link_that_loses_one_way_or_is_cut(net: Net, fault: str) -> None:
    draw = random.Random(fault)
    source = make_source(NUM_PAGES, PAGE_BYTES)
    receiver, sender = net.ends["receiver"], net.ends["sender"]

    def begin(number: int) -> tuple[list[PageId], list[PageId]]:
        src, dst = draw_pages(draw)
        offer = receiver.call("open", key(number), dst)
        sender.tell("run", key(number), offer, cut_up(draw, src, dst))
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
    assert sender.reply(), "the sender takes pages for written that cannot be"
    landed, pages = receiver.call("ended", key(1), dst)
    assert pages == source[[src[index] for index in landed]].numpy().tobytes()
    receiver.tell("quiet", key(1), dst, AFTER_S + 1.0)
    net.heal()
    num_changed, _ = receiver.reply()
    assert num_changed == 0
    assert len(landed) < NUM_MOVED or fault == "lost to the sender"

    src, dst = begin(2)
    assert sender.reply() == []
    assert receiver.call("landed", key(2), dst) == source[src].numpy().tobytes()
