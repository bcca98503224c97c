"""Quantizes KV pages: one byte per value, and a scale for each token of each head.

A layer's scales come right after its values (`engine.cache.kv_layout`). This module, the C++ kernels and the Triton
kernels quantize with the same arithmetic, bit for bit.

Shapes: `P` pages, `L` layers, `K` KV heads, `S` page size, `H` head dim, `T` tokens.
"""

from __future__ import annotations

import torch

from engine.cache.kv_layout import KVLayout
from engine.kernels.attention_interface import KvLayer

CODE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # the scale maps a row's largest value to this
# Rows with a smaller largest value are stored as zeros. 448 / SMALLEST_PEAK is still finite, and no KV is as small.
SMALLEST_PEAK = 1e-30


def reads_e4m3(device: torch.device) -> bool:
    """Returns whether kernels for the device can read e4m3: all CPUs, and GPUs from compute capability 8.9 on (Ada,
    Hopper)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def values_of(kv_pages: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Returns a view of the pool's values, [P, L, 2, K, S, H]."""
    num_pages = kv_pages.shape[0]
    if not layout.is_quantized:
        return kv_pages.view(layout.shape(num_pages))
    codes = kv_pages.view(torch.uint8).view(CODE_DTYPES[layout.kv_dtype])
    layer_shape = (2, len(layout.heads), layout.page_size, layout.head_dim)
    strides = (layout.page_bytes, layout.layer_bytes, *_strides(layer_shape))
    return codes.as_strided((num_pages, len(layout.layers), *layer_shape), strides)


def layers_of(kv_pages: torch.Tensor, layout: KVLayout) -> list[KvLayer]:
    """Returns the views that attention takes, layer by layer."""
    values = values_of(kv_pages, layout)
    if not layout.is_quantized:
        return [KvLayer(pages) for pages in values.unbind(1)]
    scales = scales_of(values)
    return [KvLayer(*views) for views in zip(values.unbind(1), scales.unbind(1), strict=True)]


def layers_of_parts(kv_pages: torch.Tensor, window_kv: torch.Tensor | None, layout: KVLayout) -> list[KvLayer]:
    """Returns the views of all layers, in the model's order. `window_kv` has the windowed layers' parts, [slots, ...],
    if pages have two parts."""
    if window_kv is None:
        return layers_of(kv_pages, layout)
    full = iter(layers_of(kv_pages, layout.full_part))
    windowed = iter(layers_of(window_kv, layout.windowed_part))
    return [next(windowed if layer in layout.window_layers else full) for layer in range(layout.num_layers)]


def is_quantized(pool: torch.Tensor) -> bool:
    return pool.dtype in LARGEST


def scales_of(values: torch.Tensor) -> torch.Tensor:
    """Returns a float32 view [..., 2, K, S] of the scales behind quantized values [P, 2, K, S, H] or
    [P, L, 2, K, S, H]."""
    *outer, kinds, num_heads, page_size, head_dim = values.shape
    assert values.stride()[-4:] == _strides((kinds, num_heads, page_size, head_dim)), "a layer's values are contiguous"
    num_codes = kinds * num_heads * page_size * head_dim
    as_bytes = values.view(torch.uint8).as_strided(
        (*outer, num_codes // head_dim * 4), (*values.stride()[: len(outer)], 1), values.storage_offset() + num_codes
    )
    return as_bytes.view(torch.float32).unflatten(-1, (kinds, num_heads, page_size))


def quantize(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows [..., H] of any float dtype to codes of `dtype` and float32 scales [...]."""
    exact = rows.float()
    peak = exact.abs().amax(dim=-1)
    peak = torch.where(peak < SMALLEST_PEAK, 0.0, peak)
    largest = torch.full_like(peak, LARGEST[dtype])  # a tensor, because torch divides by a number inexactly
    factor = torch.where(peak > 0, largest / peak, 0.0)
    scaled = (exact * factor[..., None]).clamp_(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        scaled.round_()  # halves to even, as in C++ and Triton
    return scaled.to(dtype), peak / largest


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of codes [..., H] with scales [...]."""
    return (codes.float() * scales[..., None]).to(dtype)


def _strides(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    _, heads, tokens, width = shape
    return (heads * tokens * width, tokens * width, width, 1)
