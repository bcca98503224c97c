"""The form of a KV page: what two pools must share before a page may move between them.

Pool tensor: `[P, L, 2, K, S, H]`, contiguous; one page is one contiguous run across all layers. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from penstock.page_hash import HASH_VERSION

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KVLayout:
    num_layers: int
    num_kv_heads: int
    page_size: int  # tokens
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES
    model_revision: str

    @property
    def page_bytes(self) -> int:
        values = self.num_layers * 2 * self.num_kv_heads * self.page_size * self.head_dim
        return values * DTYPE_BYTES[self.dtype]

    def shape(self, num_pages: int) -> tuple[int, int, int, int, int, int]:
        return (num_pages, self.num_layers, 2, self.num_kv_heads, self.page_size, self.head_dim)

    def digest(self) -> str:
        """Equal for two workers exactly when a page of one means the same in the other's pool."""
        parts = (
            HASH_VERSION,
            self.num_layers,
            self.num_kv_heads,
            self.page_size,
            self.head_dim,
            self.dtype,
            self.model_revision,
        )
        return blake2b(repr(parts).encode(), digest_size=16, person=b"penstock-layout").hexdigest()
