"""Keeps page tables on the device, so that a step sends only the entries that differ from what is there.

`engine.step.batch.upload_step` asks for the changes and scatters them, on the thread that launches steps; captured
steps read the tables in place. What was sent is the only state: a step that was cancelled, or a scheduler that was
replaced, has sent nothing, so its changes are found again by the next step.

Shapes: `B` batch rows of a step, `R` rows of the tables, `W` pages of a sequence, `C` changed entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

UNKNOWN = 0  # number of the edit of a row that is always compared


@dataclass(frozen=True, slots=True)
class TableChanges:
    """The entries that a step sends, and what the host remembers once they are on their way."""

    places_C: np.ndarray  # int64, index of each entry in the flattened tables; none twice
    pages_C: np.ndarray  # int32
    table_BW: np.ndarray
    edits_B: np.ndarray
    rows: np.ndarray  # int64, the rows whose entries were compared


class PageTables:
    """The tables of up to `num_rows` batch rows. Rows behind the latest step's begin with the spare page."""

    def __init__(self, num_rows: int, num_pages: int, spare_page: int, device: torch.device) -> None:
        self.pages_RW = torch.zeros((num_rows, num_pages), dtype=torch.int32, device=device)
        self._spare_page = spare_page
        self._sent_RW = np.zeros((num_rows, num_pages), np.int32)
        self._sent_edit_R = np.full(num_rows, UNKNOWN, np.int64)
        self._num_used = 0  # rows of the latest step
        self.clear()

    def clear(self) -> None:
        """Makes every row begin with the spare page."""
        self.pages_RW[:, 0] = self._spare_page
        self._sent_RW[:, 0] = self._spare_page
        self._sent_edit_R[:] = UNKNOWN
        self._num_used = 0

    def takes(self, table_BW: np.ndarray) -> bool:
        """Returns whether a step's tables fit."""
        return table_BW.shape[0] <= self._sent_RW.shape[0] and table_BW.shape[1] <= self._sent_RW.shape[1]

    def changes(self, table_BW: np.ndarray, edits_B: np.ndarray) -> TableChanges:
        """Returns what differs from the tables on the device. Rows with the edit number that was sent last are equal
        and not compared."""
        (num_rows, width), stride = table_BW.shape, self._sent_RW.shape[1]
        rows = ((edits_B != self._sent_edit_R[:num_rows]) | (edits_B == UNKNOWN)).nonzero()[0]
        places_C = pages_C = _NONE
        if len(rows):
            compared, columns = (table_BW[rows] != self._sent_RW[rows, :width]).nonzero()
            rows_C = rows[compared]
            places_C, pages_C = rows_C * stride + columns, table_BW[rows_C, columns]
        if num_rows < self._num_used:
            behind = np.arange(num_rows, self._num_used)
            places_C = np.concatenate((places_C, behind * stride))
            pages_C = np.concatenate((pages_C, np.full(len(behind), self._spare_page)))
        return TableChanges(places_C, pages_C.astype(np.int32), table_BW, edits_B, rows)

    def write(self, changes: TableChanges, places_C: torch.Tensor, pages_C: torch.Tensor) -> torch.Tensor:
        """Scatters changes by one launch, and returns the step's tables, int32 [B, W]: a view that the next step
        changes. `places_C` and `pages_C` are those of `changes` on the device."""
        num_rows, width = changes.table_BW.shape
        if len(places_C):
            self.pages_RW.view(-1).index_copy_(0, places_C, pages_C)
        rows = changes.rows
        self._sent_RW[rows, :width] = changes.table_BW[rows]
        self._sent_edit_R[:num_rows] = changes.edits_B
        if num_rows < self._num_used:
            self._sent_RW[num_rows : self._num_used, 0] = self._spare_page
            self._sent_edit_R[num_rows : self._num_used] = UNKNOWN
        self._num_used = num_rows
        return self.pages_RW[:num_rows, :width]


_NONE = np.zeros(0, np.int64)
