"""Maps tokens and heads of one page layout to pages of another. Pure.

A transfer moves the KV of some tokens, for the layers and KV heads that both ends hold, from pages of the sender's size
to pages of the receiver's. The ends may differ in the tokens of a page (`PageRun`), in its layers and heads, and in the
dtype of its values, which are then converted (`ReshardPlan`). Any other difference is refused by name. Between equal
layouts the plan has `whole_pages`, and every page moves unchanged.

Several senders that each hold a share of the heads may fill one page of a receiver. Each then moves a part of the page
that consists of runs of bytes (`page_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.cache.kv_layout import DTYPE_BYTES, QUANTIZED_KV, SCALE_BYTES, KVLayout
from penstock.errors import TransferRefused

# Both ends must agree on these, since a model that computes in another dtype is a different model.
_SHARED_FIELDS = (
    "model_revision",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "dtype",
    "quantization",
    "hash_version",
    "window_layers",
)


class PageRun(NamedTuple):
    """Consecutive tokens that are in one page at both ends. Page numbers count from the sequence's first page."""

    source_page: int
    source_token: int  # index within that page
    target_page: int
    target_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Says how KV of one layout becomes KV of another. Made by `plan_reshard`."""

    source: KVLayout
    target: KVLayout  # what is moved: the receiver's page, or those of its heads that this sender holds
    page: KVLayout  # the receiver's whole page

    @property
    def fills_pages(self) -> bool:
        """Returns whether this sender fills the receiver's pages by itself."""
        return self.target == self.page

    @property
    def whole_pages(self) -> bool:
        """Returns whether the sender's pages are byte for byte what the receiver needs."""
        source, target = self.source, self.target
        same_places = (source.page_size, source.layers, source.heads) == (target.page_size, target.layers, target.heads)
        return same_places and not self.converts

    @property
    def converts(self) -> bool:
        """Returns whether the target stores values in another dtype."""
        return self.source.kv_dtype != self.target.kv_dtype

    @property
    def source_layers(self) -> slice:
        """The layers of a source page that the target has."""
        return _inside(self.target.layers, self.source.layers)

    @property
    def source_heads(self) -> slice:
        """The heads of a source page that the target has."""
        return _inside(self.target.heads, self.source.heads)

    def token_runs(self, tokens: range) -> Iterator[PageRun]:
        """Yields the fewest runs that cover `tokens`, in order: one per page if both ends have the same page size."""
        source_size, target_size = self.source.page_size, self.target.page_size
        token = tokens.start
        while token < tokens.stop:
            source_page, source_token = divmod(token, source_size)
            target_page, target_token = divmod(token, target_size)
            num_tokens = min(source_size - source_token, target_size - target_token, tokens.stop - token)
            yield PageRun(source_page, source_token, target_page, target_token, num_tokens)
            token += num_tokens


def plan_reshard(source: KVLayout, page: KVLayout, heads: range | None = None) -> ReshardPlan:
    """Plans how to move all heads of the receiver's page, or only `heads`. Raises TransferRefused, which names every
    incompatible difference and both digests.
    """
    target = page if heads in (None, page.heads) else layout_of_heads(page, heads)
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
                f"the receiver wants {field} {wanted.start} to {wanted.stop}, "
                f"the sender has only {found.start} to {found.stop}"
            )
    if target.kv_dtype not in ("auto", *QUANTIZED_KV):
        problems.append(
            f"kv_dtype is {target.kv_dtype!r} at the receiver, the sender supports {', '.join(QUANTIZED_KV)}"
        )
    if problems:
        raise TransferRefused(
            f"KV layouts do not fit together: {'; '.join(problems)} (layout digests: the receiver's "
            f"{target.digest()}, the sender's {source.digest()}); serve one model, revision and dtype on both ends"
        )
    return ReshardPlan(source, target, page)


def _inside(wanted: range, found: range) -> slice:
    return slice(wanted.start - found.start, wanted.stop - found.start)


def layout_of_heads(page: KVLayout, heads: range) -> KVLayout:
    """Returns the layout of a page that holds only these heads."""
    return replace(page, head_range=(heads.start, heads.stop))


@dataclass(frozen=True, slots=True)
class PageRows:
    """Locates a part of a page, in rows of bytes. Page and part consist of rows of one size; row i of the part is row
    `places[i]` of the page.
    """

    num_in_page: int
    places: tuple[int, ...]

    @property
    def num_in_part(self) -> int:
        return len(self.places)


WHOLE_PAGE = PageRows(1, (0,))


def page_rows(page: KVLayout, heads: range) -> PageRows:
    """Returns the rows that hold these heads: a run of bytes for K and one for V in each layer, and the same for
    scales.
    """
    if heads == page.heads:
        return WHOLE_PAGE
    num_heads, first = len(page.heads), heads.start - page.heads.start
    widths = [page.head_dim, SCALE_BYTES] if page.is_quantized else [page.head_dim * DTYPE_BYTES[page.dtype]]
    row_bytes = math.gcd(num_heads, first, len(heads)) * page.page_size * math.gcd(*widths)
    places: list[int] = []
    start = 0  # first row of K or V of a layer, or of their scales
    for width in widths * len(page.layers):
        rows_a_head = page.page_size * width / row_bytes  # a fraction if a row holds several heads
        for _ in range(2):
            begin = start + round(first * rows_a_head)
            places += range(begin, begin + round(len(heads) * rows_a_head))
            start += round(num_heads * rows_a_head)
    return PageRows(start, tuple(places))
