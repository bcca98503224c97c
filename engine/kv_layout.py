"""The form of a KV page: what two pools must share before the KV in one can move to the other.

Pool tensor: `[P, L, 2, K, S, H]`, contiguous; one page is one contiguous run across all layers. Torch-free.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from hashlib import blake2b

from penstock.page_hash import HASH_VERSION

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KVLayout:
    num_layers: int  # of the model, as are the heads
    num_kv_heads: int
    page_size: int  # tokens
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES
    model_revision: str
    layer_range: tuple[int, int] | None = None  # first and end of the model's layers that a page holds; None: all
    head_range: tuple[int, int] | None = None  # likewise of its KV heads: a share of them under tensor parallelism
    quantization: str = "none"
    hash_version: int = HASH_VERSION

    @property
    def layers(self) -> range:
        return range(*(self.layer_range or (0, self.num_layers)))

    @property
    def heads(self) -> range:
        return range(*(self.head_range or (0, self.num_kv_heads)))

    @property
    def page_bytes(self) -> int:
        values = len(self.layers) * 2 * len(self.heads) * self.page_size * self.head_dim
        return values * DTYPE_BYTES[self.dtype]

    def shape(self, num_pages: int) -> tuple[int, int, int, int, int, int]:
        return (num_pages, len(self.layers), 2, len(self.heads), self.page_size, self.head_dim)

    def digest(self) -> str:
        """Equal for two workers exactly when a page of one means the same in the other's pool."""
        layers, heads = self.layers, self.heads
        full = replace(self, layer_range=(layers.start, layers.stop), head_range=(heads.start, heads.stop))
        return blake2b(repr(astuple(full)).encode(), digest_size=16, person=b"penstock-layout").hexdigest()

    def kv_digest(self) -> str:
        """Equal where KV can move, be it into pages of another size."""
        return replace(self, page_size=0).digest()
