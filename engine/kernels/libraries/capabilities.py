"""Lists what each attention library supports, by its name in `engine.attention`.

Torch-free: memory plans ask on machines where the library is not installed.
"""

from __future__ import annotations

from engine.cache.kv_layout import KVLayout
from penstock.errors import ConfigError

_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = {"flashinfer": (64, 128, 256), "varlen": (64, 96, 128, 192, 256)}  # for which they have kernels


def check_library(
    name: str, layout: KVLayout, *, has_latents: bool, has_softcap: bool, has_sinks: bool, has_chunks: bool = False
) -> None:
    """Raises ConfigError if `name` is a library that does not support the model's pages. Accepts all other backends."""
    if name not in _HEAD_DIMS:
        return
    problem = fix = ""
    if has_latents:
        problem, fix = "does not support latent attention", "choose engine.attention = 'triton'"
    elif has_sinks:
        problem, fix = "has no attention sinks", "choose engine.attention = 'triton'"
    elif has_chunks:
        problem, fix = "does not support attention in chunks", "choose engine.attention = 'triton'"
    elif has_softcap and name == "varlen":
        problem, fix = "has no soft cap of attention scores", "choose engine.attention = 'triton'"
    elif layout.is_quantized:
        problem = f"supports no scale per token, and engine.kv_dtype = {layout.kv_dtype!r} has them"
        fix = "leave it at 'auto', or choose engine.attention = 'triton'"
    elif layout.dtype not in _DTYPES:
        problem = f"computes in {' or '.join(_DTYPES)}, and engine.dtype is {layout.dtype!r}"
        fix = "give one of those, or choose engine.attention = 'triton'"
    elif layout.head_dim not in _HEAD_DIMS[name]:
        sizes = ", ".join(map(str, _HEAD_DIMS[name]))
        problem = f"has kernels for heads of {sizes} values, and the model's have {layout.head_dim}"
        fix = "choose engine.attention = 'triton'"
    if problem:
        raise ConfigError(f"engine.attention = {name!r} {problem}; {fix}")
