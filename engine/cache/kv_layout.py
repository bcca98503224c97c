"""Defines the layout of a KV page, which two pools must share before KV can move from one to the other.

Pool tensor: `[P, L, 2, K, S, H]`, contiguous; one page is one contiguous run across all layers. Torch-free.

Quantized pages (`kv_dtype`) are rows of bytes, `[P, L, B]`: each layer's values `[2, K, S, H]`, a byte each, followed
by a float32 scale for each token of each head, `[2, K, S]`. So a run of layers and a run of heads remain runs of bytes,
and one descriptor still moves a page with its scales. Each token has its own scale because its stored form must depend
on the token alone, not on its chunk, the page's other tokens, or the page size.

Pages with `window_layers` consist of two parts, each contiguous and in a tensor of its own: that of the layers without
a window, and that of the windowed layers, which only the pages in some sequence's window have. A part's `layer_range`
counts the layers in that order.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from hashlib import blake2b

from penstock.kv.page_hash import HASH_VERSION

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
QUANTIZED_KV = ("fp8", "int8")  # e4m3, and whole numbers from -127 to 127
SCALE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class KVLayout:
    num_layers: int  # of the whole model, as are the heads
    num_kv_heads: int
    page_size: int  # tokens
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES, in which the model computes
    model_revision: str
    layer_range: tuple[int, int] | None = None  # [start, end) of the model's layers in a page; None: all
    head_range: tuple[int, int] | None = None  # [start, end) of its KV heads: a share under tensor parallelism
    quantization: str = "none"  # of weights that were quantized while loading
    hash_version: int = HASH_VERSION
    kv_dtype: str = "auto"  # of the values in pages: one of QUANTIZED_KV, or auto for `dtype`
    window_layers: tuple[int, ...] = ()  # the layers whose part of a page is kept apart; empty: pages are whole

    @property
    def layers(self) -> range:
        return range(*(self.layer_range or (0, self.num_layers)))

    @property
    def full_part(self) -> KVLayout:
        """Returns the layout of the part that every page has, which is the whole page unless it has two parts."""
        num_full = self.num_layers - len(self.window_layers)
        return replace(self, layer_range=(0, num_full)) if self.window_layers else self

    @property
    def windowed_part(self) -> KVLayout:
        """Returns the layout of the windowed layers' part. Only for pages with two parts."""
        return replace(self, layer_range=(self.num_layers - len(self.window_layers), self.num_layers))

    @property
    def heads(self) -> range:
        return range(*(self.head_range or (0, self.num_kv_heads)))

    @property
    def is_quantized(self) -> bool:
        return self.kv_dtype in QUANTIZED_KV

    @property
    def layer_bytes(self) -> int:
        """Size of one layer of a page."""
        num_rows = 2 * len(self.heads) * self.page_size
        if self.is_quantized:
            return num_rows * (self.head_dim + SCALE_BYTES)
        return num_rows * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return len(self.layers) * self.layer_bytes

    @property
    def storage_dtype(self) -> str:
        """Dtype of the pool tensor."""
        return "uint8" if self.is_quantized else self.dtype

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Returns the shape of the pool tensor: [P, L, 2, K, S, H], or [P, L, B] if pages are quantized."""
        if self.is_quantized:
            return (num_pages, len(self.layers), self.layer_bytes)
        return (num_pages, len(self.layers), 2, len(self.heads), self.page_size, self.head_dim)

    def digest(self) -> str:
        """Returns a digest, equal for two workers if and only if their pages are interchangeable."""
        layers, heads = self.layers, self.heads
        full = replace(self, layer_range=(layers.start, layers.stop), head_range=(heads.start, heads.stop))
        fields = astuple(full)
        fields = fields if self.window_layers else fields[:-1]  # as releases without this field have it
        return blake2b(repr(fields).encode(), digest_size=16, person=b"penstock-layout").hexdigest()

    def kv_digest(self) -> str:
        """Returns a digest, equal if KV can move between two workers, even into pages of another size or dtype."""
        return replace(self, page_size=0, kv_dtype="auto").digest()
