"""Tests that key files are read again when they change, and that a bad file leaves the previous content in force."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.rpc.reload import FileWatcher, WatchedFiles
from penstock.rpc.secret import ClusterSecret, ClusterSecrets
from tests.support.key_files import replace, write_secret

FIRST, SECOND = ClusterSecret("1" * 40), ClusterSecret("2" * 40)


def watched(path: Path) -> WatchedFiles[ClusterSecrets]:
    return WatchedFiles("secret_file", (str(path), ""), lambda: ClusterSecrets.read(str(path), "secret_file"))


def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    write_secret(tmp_path / "secret", FIRST)
    files = watched(tmp_path / "secret")
    before = files.value
    assert not files.refresh()
    assert (files.value, files.version) == (before, 1)


@pytest.mark.parametrize("way", ["replaced", "written over", "by a mounted secret's link"])
def test_a_changed_file_is_read_again(tmp_path: Path, way: str) -> None:
    path = tmp_path / "secret"
    for number, secret in enumerate((FIRST, SECOND)):
        (tmp_path / f"..{number}").mkdir()
        write_secret(tmp_path / f"..{number}" / "secret", secret)
    if way == "by a mounted secret's link":
        (tmp_path / "..data").symlink_to("..0")
        path.symlink_to("..data/secret")
    else:
        write_secret(path, FIRST)
    files = watched(path)
    if way == "replaced":
        replace(path, SECOND.reveal())
    elif way == "written over":
        path.write_text(SECOND.reveal())  # the file keeps its inode
        os.utime(path, ns=(1, 1))
    else:
        (tmp_path / "..next").symlink_to("..1")
        os.replace(tmp_path / "..next", tmp_path / "..data")
    assert files.refresh()
    assert files.value.current.reveal() == SECOND.reveal()
    assert files.version == 2


def test_a_bad_file_is_refused_once_and_a_good_one_replaces_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "secret"
    write_secret(path, FIRST)
    files = watched(path)
    loaded_unix_s = files.loaded_unix_s
    for bad in ("guessable", None):
        replace(path, bad) if bad else path.unlink()
        assert files.refresh()
        assert files.problem
        assert not files.refresh(), "it is the same file as before"
        assert (files.value.current, files.loaded_unix_s) == (files.value.accepted[0], loaded_unix_s)
    assert files.value.current.reveal() == FIRST.reveal()
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "has 9 characters; give at least 32" in caplog.text
    assert "stays in force" in caplog.text
    assert "guessable" not in caplog.text
    write_secret(path, SECOND)
    assert files.refresh()
    assert (files.problem, files.value.current.reveal()) == ("", SECOND.reveal())


def test_files_that_change_while_they_are_read_are_read_again(tmp_path: Path) -> None:
    """A certificate may be in place before its key is."""
    pair = [tmp_path / "cert", tmp_path / "key"]
    writes = iter([lambda: pair[1].write_text("new key"), lambda: None])

    def read() -> list[str]:
        found = [path.read_text() for path in pair]
        if found[0] == "new cert":
            next(writes)()
        return found

    for path in pair:
        path.write_text("old")
    files = WatchedFiles("tls", [str(path) for path in pair], read)
    replace(pair[0], "new cert")
    assert not files.refresh()
    assert files.value == ["old", "old"]
    assert files.refresh()
    assert files.value == ["new cert", "new key"]


async def test_one_task_watches_every_file(tmp_path: Path) -> None:
    seen: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
    watcher = FileWatcher(lambda files: seen.put_nowait((files.setting, bool(files.problem))))
    paths = {name: tmp_path / name for name in ("a", "b")}
    for name, path in paths.items():
        write_secret(path, FIRST)
        watcher.watch(name, (str(path),), lambda path=path: ClusterSecrets.read(str(path), "x"))
    with pytest.raises(ConfigError, match="none: "):
        watcher.watch("c", ("none",), lambda: ClusterSecrets.read("none", "x"))
    assert len(watcher.files) == 2
    task = asyncio.create_task(watcher.follow(poll_s=0.01))
    try:
        async with asyncio.timeout(30):
            write_secret(paths["b"], SECOND)
            assert await seen.get() == ("b", False)
            replace(paths["a"], "short")
            assert await seen.get() == ("a", True)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
