"""The form of a KV page: what two pools must share before the KV in one can move to the other.

Pool tensor: `[P, L, 2, K, S, H]`, contiguous; one page is one contiguous run across all layers. Torch-free.

Quantized pages (`kv_dtype`) are rows of bytes, `[P, L, B]`: each layer's values `[2, K, S, H]`, a byte each, and right
behind them a float32 scale for each token of each head, `[2, K, S]`. So a run of layers and a run of heads stay runs of
bytes, and one descriptor still moves a page with its scales. A token has its own scale because what is stored of it may
depend on nothing but itself: not on the chunk it came in, nor on its page's other tokens, nor on the size of pages.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from hashlib import blake2b

from penstock.page_hash import HASH_VERSION

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
QUANTIZED_KV = ("fp8", "int8")  # e4m3, and whole numbers from -127 to 127
SCALE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class KVLayout:
    num_layers: int  # of the model, as are the heads
    num_kv_heads: int
    page_size: int  # tokens
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES: what the model computes in
    model_revision: str
    layer_range: tuple[int, int] | None = None  # first and end of the model's layers that a page holds; None: all
    head_range: tuple[int, int] | None = None  # likewise of its KV heads: a share of them under tensor parallelism
    quantization: str = "none"  # of the weights, where they were quantized while they were loaded
    hash_version: int = HASH_VERSION
    kv_dtype: str = "auto"  # of the values in pages: one of QUANTIZED_KV, or auto, which is `dtype`

    @property
    def layers(self) -> range:
        return range(*(self.layer_range or (0, self.num_layers)))

    @property
    def heads(self) -> range:
        return range(*(self.head_range or (0, self.num_kv_heads)))

    @property
    def is_quantized(self) -> bool:
        return self.kv_dtype in QUANTIZED_KV

    @property
    def layer_bytes(self) -> int:
        """Of one layer of a page."""
        num_rows = 2 * len(self.heads) * self.page_size
        if self.is_quantized:
            return num_rows * (self.head_dim + SCALE_BYTES)
        return num_rows * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return len(self.layers) * self.layer_bytes

    @property
    def storage_dtype(self) -> str:
        """Of the pool tensor."""
        return "uint8" if self.is_quantized else self.dtype

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Of the pool tensor: [P, L, 2, K, S, H], or [P, L, B] where pages are quantized."""
        if self.is_quantized:
            return (num_pages, len(self.layers), self.layer_bytes)
        return (num_pages, len(self.layers), 2, len(self.heads), self.page_size, self.head_dim)

    def digest(self) -> str:
        """Equal for two workers exactly when a page of one means the same in the other's pool."""
        layers, heads = self.layers, self.heads
        full = replace(self, layer_range=(layers.start, layers.stop), head_range=(heads.start, heads.stop))
        return blake2b(repr(astuple(full)).encode(), digest_size=16, person=b"penstock-layout").hexdigest()

    def kv_digest(self) -> str:
        """Equal where KV can move, be it into pages of another size or with values of another dtype."""
        return replace(self, page_size=0, kv_dtype="auto").digest()
