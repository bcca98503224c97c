"""What libraries that may attend in the place of this package's kernels can do, by `engine.attention`.

Torch-free: plans of memory ask it too, wherever the library is.
"""

from __future__ import annotations

from engine.kv_layout import KVLayout
from engine.model_config import ModelConfig
from penstock.errors import ConfigError

_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = {"flashinfer": (64, 128, 256), "varlen": (64, 96, 128, 192, 256)}  # that they have kernels for


def check_library(name: str, model: ModelConfig, layout: KVLayout) -> None:
    """Raises ConfigError where `name` is such a library's, for what it cannot do."""
    if name not in _HEAD_DIMS:
        return
    problem = fix = ""
    if model.latent is not None:
        problem, fix = "attends to no latents", "choose engine.attention = 'triton'"
    elif layout.is_quantized:
        problem = f"knows no scale for each token, and engine.kv_dtype = {layout.kv_dtype!r} has them"
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
