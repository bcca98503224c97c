"""Chooses the attention backend and the layer operations for a device.

`engine.parallel.model_part` chooses once while a worker loads; layers then call the chosen backend in every step.
"""

from __future__ import annotations

import torch

from engine.kernels.attention_interface import AttentionBackend
from engine.kernels.layer_ops import LayerOps, TorchOps
from engine.kernels.libraries.capabilities import LIBRARIES, choose_attention
from penstock.errors import ConfigError


def select_backend(name: str, device: torch.device) -> AttentionBackend:
    """Returns the backend called `name` for the device.

    `auto` is Triton on CUDA; on CPU it is the C++ kernels, or plain torch where they cannot be built.
    `engine.kernels.libraries.capabilities` checks whether a library supports a model.

    Raises ConfigError if the named backend cannot run.
    """
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        return _triton_backend()
    if name in LIBRARIES:
        return _library_backend(name, device)
    if name not in ("auto", "torch"):
        raise ConfigError(f"engine.attention = {name!r}; give auto, torch, triton, {', '.join(LIBRARIES)}")
    from engine.cpu.library import load_native
    from engine.cpu.native import NativeAttention
    from engine.kernels.reference import TorchAttention

    kernels = load_native() if name == "auto" and device.type == "cpu" else None
    return TorchAttention() if kernels is None else NativeAttention(kernels)


def _library_backend(name: str, device: torch.device) -> AttentionBackend:
    from engine.kernels.libraries.attention import LibraryAttention, installed_libraries, load_attention_library

    if device.type != "cuda":
        raise ConfigError(
            f"engine.attention = {name!r} needs a GPU, and engine.device is {device.type!r}; give engine.attention = "
            "'auto'"
        )
    choose_attention(name, torch.cuda.get_device_capability(device), installed_libraries())
    fallback = _triton_backend()
    return LibraryAttention(name, fallback, load_attention_library(name, device, fallback))


def _triton_backend() -> AttentionBackend:
    try:
        from engine.kernels.triton.backend import TritonAttention
    except ImportError as error:
        raise ConfigError(
            f"engine.attention = 'triton': {error}; install triton, or choose engine.attention = 'torch'"
        ) from error
    return TritonAttention()


def select_ops(attention: AttentionBackend) -> LayerOps:
    """Returns the layer operations that match an attention backend."""
    from engine.cpu.native import NativeAttention, NativeOps
    from engine.kernels.libraries.attention import LibraryAttention

    if isinstance(attention, LibraryAttention):
        return select_ops(attention.fallback)
    if attention.name == "triton":
        from engine.kernels.triton.backend import TritonOps

        return TritonOps()
    return NativeOps(attention.kernels) if isinstance(attention, NativeAttention) else TorchOps()
