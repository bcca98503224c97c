"""A link over rows of pages, for whoever counts in pages: the part of a receiver's page that one sending rank has.

Between the outbox and a wire, which knows of rows only. What is announced counts in pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.pages import rows_of_pages
from kv_transfer.reshard import PageRows
from kv_transfer.transport import WHOLE, Arrival, Link, Part, Push
from penstock.types import PageId


class RowLink:
    """Implements `transport.Link`."""

    takes_parts = gains_from_parts = False

    def __init__(self, link: Link, rows: PageRows) -> None:
        self._link = link
        self._rows = rows
        self.needs_polling = link.needs_polling
        self.max_push_bytes = link.max_push_bytes

    def push(
        self, arrival: Arrival, src_pages: Sequence[PageId], dst_pages: Sequence[PageId], part: Part = WHOLE
    ) -> Push:
        rows = self._rows
        source = rows_of_pages(src_pages, rows.num_in_part, range(rows.num_in_part))
        return self._link.push(arrival, source, rows_of_pages(dst_pages, rows.num_in_page, rows.places), part)

    def check(self) -> None:
        self._link.check()

    def close(self) -> None:
        self._link.close()
