"""Shares device memory between processes through CUDA's driver library: exports a handle of an allocation, and maps it.

Used by cuda_ipc.py. It calls the driver rather than torch's own sharing of storages, which counts references in files
that a killed process leaves behind, and which deserializes data from the peer. Memory of torch's expandable segments
has no such handle: then `export` raises, and pages take another transport. Nothing touches CUDA before `load` is called
for a pool on a device.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.errors import TransferError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class _Memory:
    """Device memory in the form that torch takes without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }


@functools.cache
def load() -> CudaDriver | None:
    """Returns the driver, or None if the library is missing."""
    try:
        return CudaDriver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):  # AttributeError: the library lacks a function
        return None


class CudaDriver:
    """Implements `cuda_ipc.DeviceMemoryDriver`. Safe from any thread."""

    def __init__(self, library: Any) -> None:
        pointer, size = ctypes.c_uint64, ctypes.c_size_t
        self._error_name = library.cuGetErrorName
        self._error_name.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
        arguments: dict[str, list[Any]] = {
            "cuInit": [ctypes.c_uint],
            "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
            "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
            "cuDevicePrimaryCtxRelease_v2": [ctypes.c_int],
            "cuCtxPushCurrent_v2": [ctypes.c_void_p],
            "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
            "cuMemGetAddressRange_v2": [ctypes.POINTER(pointer), ctypes.POINTER(size), pointer],
            "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), pointer],
            "cuIpcOpenMemHandle_v2": [ctypes.POINTER(pointer), _Handle, ctypes.c_uint],
            "cuIpcCloseMemHandle": [pointer],
            "cuMemcpyDtoH_v2": [ctypes.c_void_p, pointer, size],
        }
        self._functions = {name: _typed(getattr(library, name), types) for name, types in arguments.items()}
        self._call("cuInit", 0)

    def export(self, tensor: torch.Tensor) -> tuple[bytes, int]:
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        address = tensor.data_ptr()
        with self._context(tensor.device):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            try:
                self._call("cuIpcGetMemHandle", ctypes.byref(handle), base.value)  # whole allocations only
            except TransferError as error:
                raise TransferError(
                    f"{error}: the pool's memory cannot be shared with other processes; leave expandable_segments out "
                    "of PYTORCH_CUDA_ALLOC_CONF"
                ) from error
        return bytes(handle.reserved), address - base.value

    def open(self, handle: bytes, offset: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        if len(handle) != HANDLE_BYTES:
            raise TransferError(f"a handle of {len(handle)} bytes, want {HANDLE_BYTES}")
        mapped, base, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        with self._context(device):
            named = _Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(mapped), named, _LAZY_PEER_ACCESS)
            try:
                self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), mapped.value)
                if not 0 <= offset <= size.value - num_bytes:
                    raise TransferError(f"{num_bytes} bytes at {offset}, the allocation has {size.value}")
                opened = torch.as_tensor(_Memory(mapped.value + offset, num_bytes))
                if not opened.is_cuda or opened.data_ptr() != mapped.value + offset:
                    raise TransferError(f"torch places the memory on {opened.device}, at another address")
            except (RuntimeError, TransferError) as error:  # RuntimeError: torch's
                self._call("cuIpcCloseMemHandle", mapped.value)
                raise TransferError(f"memory of another process: {error}") from error
        return opened

    def read(self, opened: torch.Tensor, start: int, num_bytes: int, device: torch.device) -> bytes:
        found = ctypes.create_string_buffer(num_bytes)
        with self._context(device):
            self._call("cuMemcpyDtoH_v2", ctypes.addressof(found), opened.data_ptr() + start, num_bytes)
        return found.raw

    def close(self, opened: torch.Tensor, device: torch.device) -> None:
        """Unmaps the whole allocation that `opened` lies in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._context(device):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), opened.data_ptr())
            self._call("cuIpcCloseMemHandle", base.value)

    @contextmanager
    def _context(self, device: torch.device) -> Iterator[None]:
        """Makes torch's own context of a device current in this thread."""
        number, context, popped = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), device.index or 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number.value)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(popped))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", number.value)

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code:
            text = ctypes.c_char_p()
            self._error_name(code, ctypes.byref(text))
            raise TransferError(f"{name}: {(text.value or b'error %d' % code).decode()}")


def _typed(function: Any, arguments: list[Any]) -> Any:
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function
