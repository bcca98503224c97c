"""Which part of which page goes where, when KV moves between pools of different layouts. Pure.

A transfer is the KV of some tokens, for the layers and KV heads that both ends have: from pages of the sender's size to
pages of the receiver's. What may differ is a slice: the tokens of a page (`Piece`), its layers and its heads (`Plan`);
or the dtype of the values in pages, which are then converted. Anything else is refused by name. Between equal layouts a
plan says so (`whole_pages`), and every page moves as it is.

A receiver's page may be made by several senders that have a share of its heads each. What one of them moves is then a
part of the page, in runs of bytes (`page_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.kv_layout import DTYPE_BYTES, QUANTIZED_KV, SCALE_BYTES, KVLayout
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
    target: KVLayout  # of what is moved: the receiver's page, or those of its heads that come from here
    page: KVLayout  # of the receiver's page

    @property
    def fills_pages(self) -> bool:
        """Whether a page of the receiver's holds nothing but what comes from here."""
        return self.target == self.page

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


def make_plan(source: KVLayout, page: KVLayout, heads: range | None = None) -> Plan:
    """`heads`: those of the receiver's page that are to come, where not all are. Raises TransferRefused that names what
    differs and cannot be bridged, with both digests."""
    target = page if heads in (None, page.heads) else part_of(page, heads)
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
    return Plan(source, target, page)


def _inside(wanted: range, found: range) -> slice:
    return slice(wanted.start - found.start, wanted.stop - found.start)


def part_of(page: KVLayout, heads: range) -> KVLayout:
    """The layout of some heads of a page, by themselves."""
    return replace(page, head_range=(heads.start, heads.stop))


@dataclass(frozen=True, slots=True)
class PageRows:
    """A part of a page as rows of bytes: both are cut into rows of one size, and row i of the part is row `places[i]`
    of the page."""

    num_in_page: int
    places: tuple[int, ...]

    @property
    def num_in_part(self) -> int:
        return len(self.places)


WHOLE_PAGE = PageRows(1, (0,))


def page_rows(page: KVLayout, heads: range) -> PageRows:
    """Where those heads lie in a page: a run of bytes for K and one for V of each layer, and likewise for scales."""
    if heads == page.heads:
        return WHOLE_PAGE
    num_heads, first = len(page.heads), heads.start - page.heads.start
    widths = [page.head_dim, SCALE_BYTES] if page.is_quantized else [page.head_dim * DTYPE_BYTES[page.dtype]]
    row_bytes = math.gcd(num_heads, first, len(heads)) * page.page_size * math.gcd(*widths)
    places: list[int] = []
    start = 0  # of K or V of a layer, or of the scales of either, in rows of the page
    for width in widths * len(page.layers):
        rows_a_head = page.page_size * width / row_bytes  # a fraction where a row holds several heads
        for _ in range(2):
            begin = start + round(first * rows_a_head)
            places += range(begin, begin + round(len(heads) * rows_a_head))
            start += round(num_heads * rows_a_head)
    return PageRows(start, tuple(places))
