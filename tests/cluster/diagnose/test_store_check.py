"""Tests what `penstock doctor` reports about a shared store."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.diagnose.findings import Severity
from cluster.diagnose.store_check import check_store
from penstock.config import KvStoreConfig
from worker.pull.store.backends.folder_store import FolderStore


def test_a_working_store_is_left_unchanged(tmp_path: Path) -> None:
    finding = check_store(KvStoreConfig(url=f"file://{tmp_path}"))
    assert (finding.severity, finding.advice) == (Severity.OK, "")
    assert "4 MiB written in" in finding.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_unreachable_store_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    finding = check_store(KvStoreConfig(url=f"file://{tmp_path}/file/kv"))
    assert finding.severity is Severity.PROBLEM
    assert "Not a directory" in finding.text
    assert "workers would compute every prompt" in finding.advice


def test_a_store_that_returns_other_bytes_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderStore, "get", lambda *_: memoryview(b"something else"))
    finding = check_store(KvStoreConfig(url=f"file://{tmp_path}"))
    assert (finding.severity, finding.text) == (
        Severity.PROBLEM,
        "an object does not read back as it was written",
    )


def test_slow_storage_is_a_warning(tmp_path: Path) -> None:
    finding = check_store(KvStoreConfig(url=f"file://{tmp_path}", timeout_s=1e-6))
    assert finding.severity is Severity.WARNING
    assert "raise kv_store.timeout_s" in finding.advice


def test_a_store_in_memory_is_a_warning() -> None:
    assert check_store(KvStoreConfig(url="memory://doctor")).severity is Severity.WARNING
