"""Tests the NCCL branch of the torch.distributed transport: pushes overlap, and a silent or lost peer blocks nobody.

NCCL and streams are fakes that behave like the real ones: calls return at once, and their work completes when the peer
answers or the communicator is aborted.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kv_transfer.layout.pages import PageBuffer
from kv_transfer.transports.channel import Channel
from kv_transfer.transports.torch_dist import MAX_NCCL_PUSH_BYTES, TorchLink
from kv_transfer.transports.torch_group import SENDER, TorchPair, Watchdog
from penstock.errors import TransferError
from penstock.types import PageId, TransferKey
from tests.support.transfer.transfer_pair import config, key

WAIT_S = 60.0
STAGED = PageBuffer(torch.zeros(2, 8))


class FakeEvent:
    """Occurs once the peer has answered the calls before it, or the communicator is aborted."""

    def __init__(self, rest: threading.Event) -> None:
        self._rest = rest

    def synchronize(self) -> None:
        assert self._rest.wait(WAIT_S), "nobody aborted"


class FakeNccl:
    """Stands in for a process group and the streams that its calls run on."""

    def __init__(self) -> None:
        self.rest = threading.Event()
        self.aborted_by: list[str] = []
        self.calls: list[tuple[str, int]] = []
        self.changed = threading.Condition()
        self.options: Any = None
        self.priorities: list[int] = []

    def _call(self, kind: str, tensors: list[torch.Tensor]) -> SimpleNamespace:
        with self.changed:
            self.calls.append((kind, tensors[0].data_ptr()))
            self.changed.notify_all()
        return SimpleNamespace(wait=lambda: None)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> SimpleNamespace:
        return self._call("send", tensors)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> SimpleNamespace:
        return self._call("recv", tensors)

    def abort(self) -> None:
        self.aborted_by.append(threading.current_thread().name)
        self.rest.set()

    def make_stream(self, device: torch.device, priority: int = 0) -> SimpleNamespace:
        self.priorities.append(priority)
        return SimpleNamespace(record_event=lambda: FakeEvent(self.rest), synchronize=lambda: None)

    def join(self, store: object, rank: int, size: int, options: Any) -> FakeNccl:
        self.options = options
        return self


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    nccl = FakeNccl()
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", nccl.make_stream)
    double: Any = nccl.join
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _with_options(double), raising=False)
    return nccl


def _with_options(join: Any) -> Any:
    def make(*arguments: Any) -> Any:
        return join(*arguments)

    make.Options = SimpleNamespace  # type: ignore[attr-defined]
    return make


def group_of(timeout_s: float) -> TorchPair:
    store: Any = SimpleNamespace(set_timeout=lambda timeout: None)
    pages: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    return TorchPair(store, SENDER, pages, "localhost", config("torch", timeout_s=timeout_s))


def watchdogs() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kv-watchdog"}


@pytest.mark.parametrize("call", ["start_send", "start_receive"])
def test_a_silent_peer_times_out(call: str, fake: FakeNccl) -> None:
    group = group_of(timeout_s=0.05)
    with pytest.raises(RuntimeError, match="silent for too long"):
        getattr(group, call)(STAGED).wait()
    assert fake.aborted_by == ["kv-abort"]


def test_an_abort_from_another_thread_frees_the_waiting_call_without_blocking(fake: FakeNccl) -> None:
    group = group_of(timeout_s=WAIT_S)
    errors: list[Exception] = []

    def send() -> None:
        try:
            group.start_send(STAGED).wait()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    group.abort()
    group.abort()  # a second abort does nothing
    thread.join(WAIT_S)
    assert len(errors) == 1
    assert fake.aborted_by == ["kv-abort"]


def test_one_watchdog_serves_all_calls_of_a_group_and_ends_with_it(fake: FakeNccl) -> None:
    fake.rest.set()
    before = watchdogs()  # watchdogs of earlier tests, which may end at any moment
    group = group_of(timeout_s=WAIT_S)
    for _ in range(20):
        group.start_send(STAGED).wait()
        group.start_receive(STAGED).wait()
    assert fake.aborted_by == []
    (thread,) = watchdogs() - before
    assert thread is group._watchdog._thread
    gone = weakref.ref(group)
    del group
    assert gone() is None, "the watchdog must not keep the group: it ends where it is used"
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_watchdog_counts_calls_in_their_order() -> None:
    late = threading.Event()
    watchdog = Watchdog(0.2, late.set)
    watchdog.begin()
    watchdog.begin()
    watchdog.end()
    assert late.wait(WAIT_S), "the second call goes on"
    watchdog.stop()


def test_copies_and_nccl_have_streams_of_high_priority(fake: FakeNccl) -> None:
    group_of(timeout_s=WAIT_S)
    assert fake.options.is_high_priority_stream
    assert min(fake.priorities) < 0


class QuietChannel(Channel):
    """Stands in for a receiver that acknowledges nothing, and records what is announced."""

    def __init__(self) -> None:
        self.notices: list[object] = []
        self._hung_up = threading.Event()

    def send(self, frame: list[object]) -> None:
        self.notices.append(frame)

    def receive(self) -> list[object]:
        assert self._hung_up.wait(WAIT_S)
        raise TransferError("the peer closed the connection")

    def close(self) -> None:
        self._hung_up.set()


def test_a_push_is_packed_while_another_travels_and_the_third_waits(fake: FakeNccl) -> None:
    """There are two staging tensors, so the third push would overwrite what the first still sends."""
    from kv_transfer.transports.transport import Arrival

    pages, channel = PageBuffer(torch.arange(64, dtype=torch.int64).view(8, 8)), QuietChannel()
    group = group_of(timeout_s=WAIT_S)
    link = TorchLink(pages, channel, group, lambda: None)
    moving: TransferKey = key(1)
    for number in range(3):
        link.push(Arrival(moving, number, 1), [PageId(number)], [PageId(number)])
    with fake.changed:
        assert fake.changed.wait_for(lambda: len(fake.calls) == 2, WAIT_S)
    assert len({address for _, address in fake.calls}) == 2
    fake.rest.set()
    with fake.changed:
        assert fake.changed.wait_for(lambda: len(fake.calls) == 3, WAIT_S)
    assert fake.calls[2] == fake.calls[0], "in the first one's tensor"
    assert len(channel.notices) == 3
    del group
    link.close()
    for thread in link.threads:
        thread.join(WAIT_S)


def test_pushes_between_gpus_are_large() -> None:
    assert 32 << 20 <= MAX_NCCL_PUSH_BYTES <= 64 << 20
