"""Tests which paths UCX may take, and how long a fence outlives its sender while bytes may be in the network."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from kv_transfer.receive.receiver import TransferReceiver
from kv_transfer.transports import nixl_agent
from kv_transfer.transports.mapped.ends import MappedReceiver
from kv_transfer.transports.nixl import NixlReceiver
from kv_transfer.transports.nixl_agent import _configure_ucx
from penstock.errors import TransferError
from penstock.types import Epoch, PageId
from tests.support.transfer.transfer_child import make_target
from tests.support.transfer.transfer_pair import PREFILL, Log, config, key, receiver, sender


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("tls", [None, "^tcp", "^ud,tcp", "rc,sm,self"])
def test_with_rdma_ucx_must_not_use_tcp(tls: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if tls is not None:
        monkeypatch.setenv("UCX_TLS", tls)
    _configure_ucx(uses_rdma=True)
    for wrong in ("all", "tcp", "rc,tcp", "^ud"):
        monkeypatch.setenv("UCX_TLS", wrong)
        with pytest.raises(TransferError, match="pages must not travel over TCP"):
            _configure_ucx(uses_rdma=True)


@pytest.mark.parametrize("tls", [None, "all", "tcp,sm", "tcp,cma", "^rc"])
def test_without_rdma_pages_must_travel_over_cma(tls: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if tls is not None:
        monkeypatch.setenv("UCX_TLS", tls)
    _configure_ucx(uses_rdma=False)
    for wrong in ("tcp", "tcp,posix", "^cma", "^sm"):
        monkeypatch.setenv("UCX_TLS", wrong)
        with pytest.raises(TransferError, match="without RDMA pages must travel over CMA"):
            _configure_ucx(uses_rdma=False)


@pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")
def test_nixl_is_refused_where_neither_rdma_nor_cma_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "has_rdma", lambda: False)
    monkeypatch.setattr(nixl_agent, "has_cma", lambda: False)
    with pytest.raises(TransferError, match="no RDMA port is active and process_vm_writev is not permitted"):
        nixl_agent.NixlAgent(receiver(make_target(4, 64), Log(), config("torch"))._pages, config("nixl"))


def test_a_fence_outlives_its_sender_while_bytes_may_be_in_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback follows a poll that starts after the last packet must have arrived."""
    polls: list[float] = []
    polled = {"stray_s": 0.2, "poll": lambda self: polls.append(0.0) or [], "heard_from": lambda self: frozenset()}  # type: ignore[func-returns-value]
    for name, value in polled.items():
        monkeypatch.setattr(MappedReceiver, name, value, raising=False)
    end = receiver(make_target(4, 64), Log(), config("shm"))
    try:
        lifted = threading.Event()
        end.after_stray_writes(lifted.set)
        assert not lifted.is_set()
        assert lifted.wait(60.0)
        assert polls, "nothing was polled before the callback"
    finally:
        end.shutdown()


def test_without_stray_writes_the_fence_is_lifted_at_once() -> None:
    end = receiver(torch.zeros(4, 64), Log(), config("torch"))
    assert isinstance(end, TransferReceiver)
    try:
        lifted = threading.Event()
        end.after_stray_writes(lifted.set)
        assert lifted.is_set()
    finally:
        end.shutdown()


@pytest.mark.parametrize(
    ("cuda", "installed", "chosen"),
    [
        (None, ["nixl_cu12"], "nixl_cu12"),
        ("13.0", ["nixl_cu12", "nixl_cu13"], "nixl_cu13"),
        ("12.8", ["nixl", "nixl_cu12", "nixl_cu13"], "nixl_cu12"),
        ("13.0", ["nixl"], "nixl"),
    ],
)
def test_the_build_of_nixl_matches_torchs_cuda(
    cuda: str | None, installed: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    assert nixl_agent.module_name() == chosen


def test_a_build_of_nixl_for_another_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would load but register no GPU memory, because its UCX has modules for a CUDA that is absent."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name == "nixl_cu12" else None)
    assert nixl_agent.is_installed(), "so that the transports say why it is left out"
    with pytest.raises(TransferError, match=r"nixl_cu12, but torch has CUDA 13; pip install 'penstock\[nixl\]'"):
        nixl_agent.module_name()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not nixl_agent.is_installed()
    with pytest.raises(TransferError, match=r"NIXL is not installed; pip install 'penstock\[nixl\]'"):
        nixl_agent.module_name()


def test_error_messages_of_nixl_and_ucx_are_logged() -> None:
    _configure_ucx(uses_rdma=True)
    assert (os.environ["UCX_LOG_LEVEL"], os.environ["NIXL_LOG_LEVEL"]) == ("error", "ERROR")


@pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")
def test_a_transfer_that_moves_no_bytes_is_detected_at_connect() -> None:
    """The receiver's probe holds other bytes than it announces, as if the read had ended without effect."""
    to, origin = receiver(make_target(4, 64), Log(), config("nixl")), None
    try:
        (transport,) = to._transports
        assert isinstance(transport, NixlReceiver)
        transport._probe.tensor.zero_()
        log = Log()
        origin = sender(make_target(4, 64), log, config("nixl"))
        to.open(key(1), [PageId(2)])
        origin.open(key(1), to.offer(PREFILL, Epoch(1)))
        origin.push(key(1), 0, [PageId(1)], [PageId(2)])
        log.wait(lambda: bool(log.failed))
        assert "DRAM memory was read, but the bytes have not arrived" in str(log.failed[0][1])
    finally:
        if origin is not None:
            origin.shutdown()
        to.shutdown()


def test_an_agent_for_gpu_memory_sets_what_ucx_needs() -> None:
    agent = object.__new__(nixl_agent.NixlAgent)
    agent.memory = "VRAM"
    assert all(name in agent.advice for name in ("UCX_TLS", "cuda_copy", "UCX_MODULE_DIR", "transfer.transport"))
    agent.memory = "DRAM"
    assert agent.advice == ""
