"""Converts tensors, including oneDNN's packed ones, to bytes and back, so that weights can be kept in shared memory.

A packed tensor has no strides. Its bytes and an opaque description are reassembled over other memory by torch's C
interface for compiled models, which stores packed constants in the same way.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

_PLAIN, _PACKED = "", "onednn"


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns what `on_memory` needs besides the bytes, as JSON values."""
    known: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}
    if not tensor.is_mkldnn:
        return known | {"layout": _PLAIN, "bytes": tensor.numel() * tensor.itemsize}
    opaque = bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(tensor).numpy())
    return known | {"layout": _PACKED, "bytes": int(torch.ops.mkldnn._nbytes(tensor)), "opaque": opaque.hex()}


def content(tensor: torch.Tensor) -> Any:
    """Returns the tensor's bytes, as a buffer over its memory where that is contiguous."""
    if not tensor.is_mkldnn:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    num_bytes = int(torch.ops.mkldnn._nbytes(tensor))
    return (ctypes.c_char * num_bytes).from_address(torch.ops.mkldnn.data_ptr(tensor))


def on_memory(memory: torch.Tensor, entry: dict[str, Any]) -> torch.Tensor:
    """Returns the tensor over the bytes at `entry["offset"]` of `memory`, without a copy. The owner of a packed tensor
    must keep `memory` alive."""
    dtype: torch.dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
    data = memory[entry["offset"] : entry["offset"] + entry["bytes"]]
    if entry["layout"] == _PLAIN:
        return data.view(dtype).view(entry["shape"])
    packed = _over(data.data_ptr(), entry["shape"], dtype, bytes.fromhex(entry["opaque"]))
    packed.penstock_memory = memory  # type: ignore[attr-defined]
    return packed


def _over(address: int, shape: list[int], dtype: torch.dtype, opaque: bytes) -> torch.Tensor:
    library = _library()
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    numbers = ctypes.c_int64 * len(shape)
    handle = ctypes.c_void_p()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(len(shape)),
        numbers(*shape),
        numbers(*strides),
        ctypes.c_int64(0),
        getattr(library, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")(),
        library.aoti_torch_device_type_cpu(),
        0,
        ctypes.byref(handle),
        library.aoti_torch_layout__mkldnn(),
        opaque,
        ctypes.c_int64(len(opaque)),
    )
    if failed:
        raise RuntimeError("torch cannot reassemble a packed tensor")
    tensor: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle))
    return tensor


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _capsule(handle: ctypes.c_void_p) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(handle, None, None)
