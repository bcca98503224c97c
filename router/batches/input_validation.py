"""Validates a batch's input file before any of its lines runs. Blocks on the disk.

`lines.read_line` checks a single line; this module checks the number of lines, and that no `custom_id` is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import InvalidInput
from router.batches.lines import BatchLine
from router.batches.records import BatchRecord, BatchStatus

_MAX_ERRORS = 100  # listed for one file
_SKIPPED_BYTES = 1 << 20  # of a line that is too long, read and dropped at a time

# Reads a line of a batch for an endpoint. Raises InvalidInput.
LineReader = Callable[[bytes, str], BatchLine]


def input_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file that are not blank, with their numbers from 1.

    Cuts a line that is longer than `max_bytes` to little more than that, which bounds memory; a `LineReader` refuses it
    for its length.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(max_bytes + 2):  # with the line end
            number += 1
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(_SKIPPED_BYTES)
            if line.strip():
                yield number, line


def validate_input(
    record: BatchRecord, path: Path, read_line: LineReader, max_lines: int, line_bytes: int
) -> BatchRecord:
    """Returns the record of the batch in progress, or of a failed batch with the first errors if a line is invalid."""
    seen, errors, count = set[str](), list[dict[str, Any]](), 0
    for count, (number, raw) in enumerate(input_lines(path, line_bytes), 1):
        try:
            if count > max_lines:
                problem = f"has more lines than router.batches.max_lines = {max_lines}; split it"
                raise InvalidInput("input_file_id", problem)
            line = read_line(raw, record.endpoint)
            if line.custom_id in seen:
                raise InvalidInput("custom_id", f"{line.custom_id[:100]!r} is repeated; give each line its own")
            seen.add(line.custom_id)
        except InvalidInput as error:
            errors.append(_listed(number, "invalid_line", error))
            if len(errors) >= _MAX_ERRORS or count > max_lines:
                break
    if not count:
        errors.append(_listed(None, "empty_file", InvalidInput("input_file_id", "has no lines; write some")))
    if errors:
        return _failed(record, errors)
    return replace(record.entered(BatchStatus.IN_PROGRESS, time.time()), num_lines=count)


def failed_without_input(record: BatchRecord, error: InvalidInput) -> BatchRecord:
    """Returns the record of a batch that fails with `error`, because its input file was deleted."""
    return _failed(record, [_listed(None, "input_file_deleted", error)])


def _failed(record: BatchRecord, errors: list[dict[str, Any]]) -> BatchRecord:
    return replace(record.entered(BatchStatus.FAILED, time.time()), errors=tuple(errors))


def _listed(number: int | None, code: str, error: InvalidInput) -> dict[str, Any]:
    return {"code": code, "line": number, "message": error.message, "param": error.field}
