"""Which part of which page goes where, when KV moves between pools of different layouts. Pure.

A transfer is the KV of some tokens, for the layers and KV heads that both ends have: from pages of the sender's size to
pages of the receiver's. What may differ is a slice: the tokens of a page (`Piece`), its layers and its heads (`Plan`);
or the dtype of the values in pages, which are then converted. Anything else is refused by name. Between equal layouts a
plan says so (`whole_pages`), and every page moves as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from engine.kv_layout import QUANTIZED_KV, KVLayout
from penstock.errors import TransferRefused

# Both ends must agree on these: a model that computes in another dtype is another model.
_SHARED_FIELDS = (
    "model_revision",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "dtype",
    "quantization",
    "hash_version",
)


class Piece(NamedTuple):
    """Consecutive tokens that lie in one page at either end. Pages count from the sequence's first."""

    source_page: int
    source_token: int  # in that page
    target_page: int
    target_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How KV of one layout becomes KV of another. Made by `make_plan`."""

    source: KVLayout
    target: KVLayout

    @property
    def whole_pages(self) -> bool:
        """Whether a page of one end is, byte for byte, a page of the other."""
        source, target = self.source, self.target
        same_places = (source.page_size, source.layers, source.heads) == (target.page_size, target.layers, target.heads)
        return same_places and not self.converts

    @property
    def converts(self) -> bool:
        """Whether the values are of another dtype at the target."""
        return self.source.kv_dtype != self.target.kv_dtype

    @property
    def source_layers(self) -> slice:
        """Of a page at the source: those that the target has. They fill its page."""
        return _inside(self.target.layers, self.source.layers)

    @property
    def source_heads(self) -> slice:
        return _inside(self.target.heads, self.source.heads)

    def pieces(self, tokens: range) -> Iterator[Piece]:
        """The fewest that cover `tokens`, in order: one a page between pages of one size."""
        source_size, target_size = self.source.page_size, self.target.page_size
        token = tokens.start
        while token < tokens.stop:
            source_page, source_token = divmod(token, source_size)
            target_page, target_token = divmod(token, target_size)
            num_tokens = min(source_size - source_token, target_size - target_token, tokens.stop - token)
            yield Piece(source_page, source_token, target_page, target_token, num_tokens)
            token += num_tokens


def make_plan(source: KVLayout, target: KVLayout) -> Plan:
    """Raises TransferRefused that names what differs and cannot be bridged, with both digests."""
    problems = [
        f"{field} is {getattr(target, field)!r} at the receiver, {getattr(source, field)!r} at the sender"
        for field in _SHARED_FIELDS
        if getattr(source, field) != getattr(target, field)
    ]
    for field, wanted, found in (
        ("layers", target.layers, source.layers),
        ("heads", target.heads, source.heads),
    ):
        if not (found.start <= wanted.start and wanted.stop <= found.stop):
            problems.append(
                f"{field} {wanted.start} to {wanted.stop} are the receiver's, "
                f"the sender has {found.start} to {found.stop} only"
            )
    if target.kv_dtype not in ("auto", *QUANTIZED_KV):
        problems.append(f"kv_dtype is {target.kv_dtype!r} at the receiver, the sender knows {', '.join(QUANTIZED_KV)}")
    if problems:
        raise TransferRefused(
            f"KV layouts do not fit together: {'; '.join(problems)} (layout digests: the receiver's "
            f"{target.digest()}, the sender's {source.digest()}); serve one model, revision and dtype on both ends"
        )
    return Plan(source, target)


def _inside(wanted: range, found: range) -> slice:
    return slice(wanted.start - found.start, wanted.stop - found.start)
