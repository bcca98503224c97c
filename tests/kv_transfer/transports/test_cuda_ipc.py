"""Tests the transport between GPU pools over a double of the driver: handles that open, refusals, and unmapping."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from engine.cache.pool_memory import TRAILER_BYTES, allocate_pool, allocate_with_trailer, trailer
from kv_transfer.layout.pages import PageBuffer
from kv_transfer.session.handshake import parse_offer
from kv_transfer.transports.mapped import cuda_driver, cuda_ipc
from penstock.errors import ConfigError, TransferError
from penstock.types import Epoch, PageId
from tests.support.transfer import cuda_double
from tests.support.transfer.cuda_double import DriverDouble
from tests.support.transfer.transfer_child import Child, children, make_source
from tests.support.transfer.transfer_pair import PREFILL, Log, config, key, receiver, sender

NUM_PAGES, PAGE_BYTES = 6, 4096
CPU = torch.device("cpu")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> DriverDouble:
    return cuda_double.install(monkeypatch)


def pool() -> torch.Tensor:
    return cuda_double.allocate((NUM_PAGES, PAGE_BYTES), torch.uint8)


def test_a_pool_has_a_trailer_that_no_page_reaches() -> None:
    made = allocate_with_trailer((3, 5, 7), torch.bfloat16, CPU)
    end = trailer(made)
    assert end is not None
    end.fill_(255)
    assert made.shape == (3, 5, 7)
    assert made.is_contiguous()
    assert not made.any()
    assert end.data_ptr() == made.data_ptr() + made.nbytes
    assert len(end) == TRAILER_BYTES
    assert trailer(made[1]) is None
    assert trailer(torch.zeros(4, 4)) is None


def test_a_closed_link_leaves_nothing_mapped(driver: DriverDouble) -> None:
    source, target = pool().fill_(7), pool()
    arrivals, pushes = Log(), Log()
    to, origin = receiver(target, arrivals, config("cuda_ipc")), sender(source, pushes, config("cuda_ipc"))
    try:
        to.open(key(1), [PageId(2)])
        origin.open(key(1), to.offer(PREFILL, Epoch(1)))
        origin.push(key(1), 0, [PageId(0)], [PageId(2)])
        origin.finish(key(1))
        pushes.wait(lambda: pushes.done == [key(1)])
        assert target.sum() == 7 * PAGE_BYTES
        assert len(driver.mapped) == 1
    finally:
        origin.shutdown()
        to.shutdown()
    assert driver.mapped == []


@pytest.mark.parametrize("broken", ["mark", "size", "handle", "greeting"])
def test_memory_other_than_the_receivers_pool_is_closed_again(broken: str, driver: DriverDouble) -> None:
    target, own = pool(), pool()
    handle, offset = driver.export(target)
    mark = b"m" * 32
    end = trailer(target)
    assert end is not None
    end[:32] = torch.tensor(list(mark), dtype=torch.uint8)
    greeting: list[object] = [handle, offset, NUM_PAGES * PAGE_BYTES + TRAILER_BYTES, mark]
    sending = cuda_ipc.make_sender(PageBuffer(own), config("cuda_ipc"), lambda: None)
    sending._open_pool(greeting, NUM_PAGES).close()  # the correct greeting opens the pool
    expected = {
        "mark": (3, b"x" * 32, "another process's"),
        "size": (2, NUM_PAGES * PAGE_BYTES, r"offer\.num_pages: 6 of 4096"),
        "handle": (0, b"short", "no handle"),
        "greeting": (1, "zero", "want .handle, offset, bytes, mark"),
    }
    index, value, message = expected[broken]
    greeting[index] = value
    with pytest.raises(TransferError, match=message):
        sending._open_pool(greeting, NUM_PAGES)
    assert driver.mapped == []


def test_a_pool_on_a_cpu_cannot_use_cuda_ipc() -> None:
    target = allocate_pool((4, 512), torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"transport = 'cuda_ipc': the pool is not in device memory"):
        receiver(target, Log(), config("cuda_ipc"))
    with pytest.raises(ConfigError, match="a pool on a CUDA device"):
        sender(target, Log(), config("cuda_ipc"))


def test_auto_prefers_cuda_ipc_and_falls_back(driver: DriverDouble) -> None:
    """Offers a handle that cannot be opened, as across containers; the next transport carries the transfer."""
    source, target = pool().fill_(3), pool()
    arrivals, pushes = Log(), Log()
    to, origin = receiver(target, arrivals, config("auto")), sender(source, pushes, config("auto"))
    try:
        assert to.transports[0] == origin.transports[0] == "cuda_ipc"
        offer = parse_offer(to.offer(PREFILL, Epoch(1)))
        spoiled = tuple(
            (name, {**details, "num_pages": 1 << 40} if name == "cuda_ipc" else details)
            for name, details in offer.transports
            if name in ("cuda_ipc", "torch")
        )
        to.open(key(1), [PageId(2)])
        origin.open(key(1), replace(offer, transports=spoiled).encode())
        origin.push(key(1), 0, [PageId(0)], [PageId(2)])
        origin.finish(key(1))
        pushes.wait(lambda: pushes.done == [key(1)])
        assert pushes.failed == []
        assert origin.stats.num_fallbacks == 1
        assert target.sum() == 3 * PAGE_BYTES
    finally:
        origin.shutdown()
        to.shutdown()


class FakeLibrary:
    """Stands in for libcuda as far as `CudaDriver` calls it, with one allocation of 1 MiB at 1 << 20."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self.devices: list[object] = []
        self._failing = failing

    def __getattr__(self, name: str) -> object:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: object) -> int:
            self.calls.append(name)
            if name == "cuMemGetAddressRange_v2":
                arguments[0]._obj.value, arguments[1]._obj.value = 1 << 20, 1 << 20  # type: ignore[attr-defined]
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OF_THE_TEST"  # type: ignore[attr-defined]
            if name == "cuDeviceGet":
                self.devices.append(arguments[1])
            if name == "cuIpcGetMemHandle":
                assert arguments[1] == 1 << 20, "the driver has handles of whole allocations"
                arguments[0]._obj.reserved[:] = range(64)  # type: ignore[attr-defined]
            if name == "cuMemcpyDtoH_v2":
                assert arguments[1:] == ((1 << 20) + 512 + 7, 5)
                ctypes.memmove(arguments[0], b"bytes", 5)  # type: ignore[arg-type]
            return 201 if name == self._failing else 0

        setattr(self, name, call)
        return call


class FakeTensor:
    device = torch.device("cuda", 0)

    def data_ptr(self) -> int:
        return (1 << 20) + 512


def test_a_handle_identifies_the_allocation_and_the_offset_in_it() -> None:
    library = FakeLibrary()
    handle, offset = cuda_driver.CudaDriver(library).export(FakeTensor())  # type: ignore[arg-type]
    assert (handle, offset) == (bytes(range(64)), 512)
    assert library.calls.count("cuCtxPushCurrent_v2") == library.calls.count("cuCtxPopCurrent_v2") == 1
    assert library.calls.count("cuDevicePrimaryCtxRetain") == library.calls.count("cuDevicePrimaryCtxRelease_v2") == 1


def test_memory_of_another_device_is_read_in_this_devices_context() -> None:
    library = FakeLibrary()
    remote = FakeTensor()
    remote.device = torch.device("cuda", 0)
    assert cuda_driver.CudaDriver(library).read(remote, 7, 5, torch.device("cuda", 1)) == b"bytes"  # type: ignore[arg-type]
    assert library.devices == [1]


def test_no_tensor_of_the_opened_memory_reaches_a_kernel(driver: DriverDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch places it on the device that owns it, where this process must not launch kernels."""
    target, copied = pool(), list[torch.Tensor]()
    handle, offset = driver.export(target)
    end = trailer(target)
    assert end is not None
    end[:32] = 9
    monkeypatch.setattr(PageBuffer, "copy_from", lambda self, source, *pages: copied.append(source.tensor))
    sending = cuda_ipc.make_sender(PageBuffer(own := pool()), config("cuda_ipc"), lambda: None)
    opened = sending._open_pool([handle, offset, NUM_PAGES * PAGE_BYTES + TRAILER_BYTES, b"\t" * 32], NUM_PAGES)
    assert copied == []  # the driver reads the mark
    opened.write(PageBuffer(own), [PageId(0)], [PageId(1)])
    assert [tensor.data_ptr() for tensor in copied] == [own.data_ptr()]
    opened.close()


def test_memory_without_a_handle_is_a_typed_error_and_the_context_is_released() -> None:
    library = FakeLibrary("cuIpcGetMemHandle")
    with pytest.raises(TransferError, match=r"cuIpcGetMemHandle: CUDA_ERROR_OF_THE_TEST.*expandable_segments"):
        cuda_driver.CudaDriver(library).export(FakeTensor())  # type: ignore[arg-type]
    assert library.calls.count("cuCtxPopCurrent_v2") == library.calls.count("cuDevicePrimaryCtxRelease_v2") == 1


def test_an_offset_outside_the_allocation_is_unmapped_and_refused() -> None:
    library = FakeLibrary()
    opened = cuda_driver.CudaDriver(library)
    for offset, num_bytes in ((1 << 20, 1), (0, (1 << 20) + 1), (-1, 1)):
        with pytest.raises(TransferError, match="the allocation has 1048576"):
            opened.open(bytes(64), offset, num_bytes, FakeTensor.device)
    assert library.calls.count("cuIpcOpenMemHandle_v2") == library.calls.count("cuIpcCloseMemHandle") == 3
    with pytest.raises(TransferError, match="a handle of 5 bytes"):
        opened.open(b"short", 0, 1, FakeTensor.device)


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_processes_transfer_pages_on_one_device() -> None:
    """Moves scattered pages, then kills the sender and serves its successor. A receiver that dies during writes fails
    only its own transfer."""
    source = make_source(64, 1 << 20)
    target = allocate_pool((64, 1 << 20), torch.uint8, torch.device("cuda"))
    log, rng = Log(), random.Random(5)
    end = receiver(target, log, config("cuda_ipc"))
    try:
        first, second = (Child("sender", "cuda_ipc-gpu", epoch, 64, 1 << 20) for epoch in (1, 3))
        with children(first, second):
            for number, (epoch, child) in enumerate(((1, first), (1, first), (3, second))):
                target.zero_()
                torch.cuda.synchronize()
                moving = key(number, epoch)
                src, dst = ([PageId(page) for page in rng.sample(range(64), 40)] for _ in range(2))
                end.open(moving, dst)
                pushes = [(a, src[a:b], dst[a:b]) for a, b in pairwise((0, 3, 20, 40))]
                assert child.call("run", moving, end.offer(PREFILL, Epoch(epoch)), pushes) == []
                log.wait(lambda: len(log.landed.get(moving, ())) == 40)  # noqa: B023
                end.close(moving)
                assert torch.equal(target[dst].cpu(), source[src])
                assert not target[sorted(set(range(64)) - set(dst))].any()
                if number == 1:
                    first.kill()
    finally:
        end.shutdown()
    pushed = Log()
    origin = sender(source.cuda(), pushed, config("cuda_ipc", timeout_s=2.0))
    try:
        lost, fine = (Child("receiver", "cuda_ipc-gpu", epoch, 64, 1 << 20) for epoch in (4, 6))
        with children(lost, fine):
            for epoch, child in ((4, lost), (6, fine)):
                pages = [PageId(page) for page in range(32)]
                first, second = key(10, 1, epoch), key(11, 1, epoch)
                origin.open(first, child.call("open", first, pages))
                origin.push(first, 0, pages, pages)
                origin.finish(first)
                assert child.call("landed", first, pages) == source[pages].numpy().tobytes()
                if child is lost:
                    offer = child.call("open", second, pages)
                    origin.open(second, offer)
                    child.kill()
                    for _ in range(20):
                        origin.push(second, 0, pages, pages)
                    origin.finish(second)
                    pushed.wait(lambda: second in pushed.done)  # noqa: B023
    finally:
        origin.shutdown()
