"""Tests backends of the shared store: whole objects, many writers, crashes, and refused configurations."""

from __future__ import annotations

import os
import threading
import uuid
from pathlib import Path

import pytest

from penstock.config import KvStoreConfig, ServeConfig, WorkerConfig
from penstock.errors import ConfigError
from penstock.types import Role
from worker.pull.store.backends.folder_store import FolderStore
from worker.pull.store.backends.object_store import ObjectStore
from worker.pull.store.backends.opening import open_store


@pytest.fixture(params=["file", "memory"])  # and a bucket, in test_bucket.py
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    url = f"file://{tmp_path}/kv" if request.param == "file" else f"memory://{uuid.uuid4().hex}"
    return open_store(KvStoreConfig(url=url))


def test_an_object_is_read_as_it_was_written(store: ObjectStore) -> None:
    assert store.get("v1/folder/aa/aabb", 100) is None
    assert list(store.list("v1")) == []
    store.put("v1/folder/aa/aabb", (b"head", memoryview(b"pages")))
    assert store.get("v1/folder/aa/aabb", 100) == b"headpages"
    assert store.get("v1/folder/aa/aabb", 4) == b"head"
    store.put("v1/folder/aa/aabb", (b"other",))
    assert store.get("v1/folder/aa/aabb", 100) == b"other"
    [found] = store.list("v1")
    assert (found.name, found.num_bytes, found.is_partial) == ("v1/folder/aa/aabb", 5, False)
    assert found.used_s > 1.6e9
    assert list(store.list("v1/fold")) == []
    store.delete("v1/folder/aa/aabb")
    store.delete("v1/folder/aa/aabb")
    assert store.get("v1/folder/aa/aabb", 100) is None


def test_readers_see_whole_objects_beside_many_writers(store: ObjectStore) -> None:
    contents = [bytes([number]) * 50_000 for number in range(4)]
    seen: list[bytes] = []
    store.put("v1/x/aa/aa", (contents[0],))

    def write(content: bytes) -> None:
        for _ in range(10):
            store.put("v1/x/aa/aa", (content[:20_000], content[20_000:]))

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = store.get("v1/x/aa/aa", 1 << 20)
        assert found is not None
        seen.append(bytes(found))
    for writer in writers:
        writer.join()
    assert set(seen) <= set(contents)
    assert [each.name for each in store.list("v1")] == ["v1/x/aa/aa"]


def test_files_are_private_and_reads_renew_them(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path / "kv"))
    store.put("v1/x/aa/aabb", (b"pages",))
    path = tmp_path / "kv" / "v1" / "x" / "aa" / "aabb"
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    os.utime(path, (1.0, 1.0))
    assert store.get("v1/x/aa/aabb", 100) == b"pages"
    assert path.stat().st_mtime > 1e9


def test_a_crash_while_writing_leaves_only_a_partial_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: os._exit(0))
        if (child := os.fork()) == 0:
            store.put("v1/x/aa/aabb", (b"pages",))
        os.waitpid(child, 0)
    assert store.get("v1/x/aa/aabb", 100) is None
    assert [each.is_partial for each in store.list("v1")] == [True]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(str(tmp_path))

    def fail(*_: object) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="no space"):
        store.put("v1/x/aa/aabb", (b"pages",))
    assert list(store.list("v1")) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path / "kv"))
    store.put("v1/x/aa/aabb", (b"pages",))
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "kv/v1/x/aa/ffff").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        store.get("v1/x/aa/ffff", 100)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "/shared/kv"}, "has no location; give file:///shared/kv, s3://bucket/prefix or the like"),
        ({"url": "file://host/kv"}, "is not a path on this host; give file:/// and a whole path"),
        ({"url": "s3://key:secret@bucket"}, "holds credentials or options; leave them out"),
        ({"url": "s3://bucket?key=secret"}, "holds credentials or options"),
        ({"url": "file:///kv", "endpoint": "http://x"}, "applies only to s3:// URLs; leave it out"),
    ],
)
def test_a_url_of_no_store_is_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        KvStoreConfig.model_validate(settings)
    assert "key:secret" not in str(refusal.value).split("[type=")[0]


def test_a_store_that_cannot_be_opened_states_the_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_store.url = file://.*; give a folder that this user can make or write"):
        open_store(KvStoreConfig(url=f"file://{tmp_path}/file/kv"))
    with pytest.raises(ConfigError, match=r"kv_store.url = nowhere://x: .*; pip install 'penstock\[store\]'"):
        open_store(KvStoreConfig(url="nowhere://x"))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"prefix_caching": False}, "engine.prefix_caching = false turns off; turn it on, or leave kv_store out"),
        ({"tensor_parallel": 2}, "engine.tensor_parallel = 2 runs several; set it to 1, or leave kv_store out"),
    ],
)
def test_engines_whose_pages_cannot_be_shared_are_refused(engine: dict[str, object], message: str) -> None:
    store = {"url": "file:///shared/kv"}
    with pytest.raises(ValueError, match=message):
        ServeConfig.model_validate({"model": "m", "engine": engine, "kv_store": store})
    with pytest.raises(ValueError, match=message):
        WorkerConfig.model_validate(
            {"worker_id": "w", "role": "decode", "engine": {"model": "m"} | engine, "kv_store": store}
        )


def test_a_deployments_store_is_passed_to_its_workers() -> None:
    config = ServeConfig.model_validate({"model": "m", "kv_store": {"url": "s3://bucket/kv", "write": "never"}})
    for role in Role:
        assert config.worker_config("w", role).kv_store == config.kv_store
