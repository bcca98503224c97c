"""Tests the NCCL branch of the torch.distributed transport: a silent or lost peer does not block the caller.

NCCL and the stream are fakes that behave like the real ones: calls return at once, and the stream completes when the
peer answers or the communicator is aborted.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from types import SimpleNamespace

import pytest
import torch

from kv_transfer.layout.pages import PageBuffer
from kv_transfer.transports.torch_group import SENDER, TorchPair

WAIT_S = 60.0


class FakeNccl:
    """Stands for a process group and the stream that its calls run on."""

    def __init__(self) -> None:
        self.rest = threading.Event()
        self.aborted_by: list[str] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)

    recv = send

    def abort(self) -> None:
        self.aborted_by.append(threading.current_thread().name)
        self.rest.set()

    def synchronize(self) -> None:
        assert self.rest.wait(WAIT_S), "nobody aborted"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return FakeNccl()


def group_of(fake: FakeNccl, timeout_s: float) -> TorchPair:
    group = TorchPair.__new__(TorchPair)
    group._peer, group._timeout, group._aborted = SENDER, datetime.timedelta(seconds=timeout_s), threading.Event()
    group._stream = group._group = fake  # type: ignore[assignment]
    return group


STAGED = PageBuffer(torch.zeros(2, 8))


@pytest.mark.parametrize("call", ["send", "receive"])
def test_a_silent_peer_times_out(call: str, fake: FakeNccl) -> None:
    group = group_of(fake, timeout_s=0.05)
    with pytest.raises(RuntimeError, match="silent for too long"):
        getattr(group, call)(STAGED)
    assert fake.aborted_by == ["kv-abort"]


def test_an_abort_from_another_thread_frees_the_waiting_call_without_blocking(fake: FakeNccl) -> None:
    group = group_of(fake, timeout_s=WAIT_S)
    errors: list[Exception] = []

    def send() -> None:
        try:
            group.send(STAGED)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    group.abort()
    group.abort()  # again: harmless
    thread.join(WAIT_S)
    assert len(errors) == 1
    assert fake.aborted_by == ["kv-abort"]


def test_a_call_that_ends_in_time_is_not_aborted(fake: FakeNccl) -> None:
    fake.rest.set()
    group = group_of(fake, timeout_s=WAIT_S)
    group.send(STAGED)
    group.receive(STAGED)
    assert fake.aborted_by == []
    assert "kv-abort" not in {thread.name for thread in threading.enumerate()}
