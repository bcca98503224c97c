"""Records of files and batches, in the forms in which they are stored and OpenAI's API shows them. Does no I/O."""

from __future__ import annotations

import enum
import hashlib
import json
import re
import secrets
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.errors import InvalidInput

Json = dict[str, Any]

_FILE_ID = re.compile(r"file-(output-)?[0-9a-f]{32}")
_OUTPUT_PREFIX = "file-output-"
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


class FileNotFound(InvalidInput):
    """This tenant has no such file."""

    http_status = 404
    reason = "FILE_NOT_FOUND"


class BatchNotFound(InvalidInput):
    """This tenant has no such batch."""

    http_status = 404
    reason = "BATCH_NOT_FOUND"


class BrokenRecord(ValueError):
    """This version cannot read a record on disk."""


class BatchStatus(enum.StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"  # its input file is invalid; no request ran
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


@dataclass(frozen=True, slots=True)
class FileRecord:
    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int  # Unix time in seconds, like all times in this module

    def as_json(self) -> Json:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> FileRecord:
        """Parses the output of `dump`. Raises BrokenRecord."""
        try:
            return FileRecord(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise BrokenRecord(f"a file's record cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch. The counts of an unfinished one lag behind its files by up to a second."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[Json, ...] = ()  # in its input file
    times: dict[str, int] = field(default_factory=dict)  # when the batch entered each status

    def entered(self, status: BatchStatus, now_s: float) -> BatchRecord:
        return replace(self, status=status, times=self.times | {status.value: int(now_s)})

    def as_json(self) -> Json:
        times = self.times
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": times.get("in_progress"),
            "expires_at": self.expires_at,
            "finalizing_at": times.get("completed"),
            "completed_at": times.get("completed"),
            "failed_at": times.get("failed"),
            "expired_at": times.get("expired"),
            "cancelling_at": times.get("cancelling"),
            "cancelled_at": times.get("cancelled"),
            "request_counts": {
                "total": self.num_lines,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "metadata": self.metadata,
        }

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> BatchRecord:
        """Parses the output of `dump`. Raises BrokenRecord."""
        try:
            fields = json.loads(text)
            return BatchRecord(**fields | {"status": BatchStatus(fields["status"]), "errors": tuple(fields["errors"])})
        except (ValueError, TypeError, KeyError) as error:
            raise BrokenRecord(f"a batch's record cannot be read: {error}") from error


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def output_file_id(batch_id: str, name: str) -> str:
    """Returns the id of a batch's output file, which is the same if another router finishes the batch again."""
    return f"{_OUTPUT_PREFIX}{hashlib.sha256(f'{batch_id}/{name}'.encode()).hexdigest()[:32]}"


def purpose_of(file_id: str) -> str:
    return "batch_output" if file_id.startswith(_OUTPUT_PREFIX) else "batch"


def new_batch_id() -> str:
    """Returns an id that sorts after those of older batches, so that listing batches reads none of their records."""
    return f"batch_{time.time_ns() // 1000:014x}{secrets.token_hex(9)}"


def check_file_id(file_id: str, field_name: str = "file_id") -> None:
    """Raises FileNotFound if the id is malformed, since ids become file names."""
    if not _FILE_ID.fullmatch(file_id):
        raise FileNotFound(field_name, f"is {file_id[:100]!r}, which is no file of yours; GET /v1/files lists them")


def check_batch_id(batch_id: str) -> None:
    """Raises BatchNotFound if the id is malformed, since ids become folder names."""
    if not _BATCH_ID.fullmatch(batch_id):
        problem = f"is {batch_id[:100]!r}, which is no batch of yours; GET /v1/batches lists them"
        raise BatchNotFound("batch_id", problem)
