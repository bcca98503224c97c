"""Tests files and batches on disk: bounds, tenants, claims, and lines that were cut off while being written."""

from __future__ import annotations

import io
import json
import resource
import time
from pathlib import Path

import pytest

from penstock.config.router import BatchConfig
from penstock.errors import InvalidInput, Overloaded, Unavailable
from router.batches.batches import ERRORS, OUTPUT, BatchStore
from router.batches.files import FileStore
from router.batches.input_validation import input_lines
from router.batches.lines import answer_line, custom_id_of, read_line
from router.batches.records import BatchNotFound, BatchStatus, FileNotFound, output_file_id

ENDPOINT = "/v1/completions"


class Stores:
    def __init__(self, root: Path, **settings: object) -> None:
        config = BatchConfig.model_validate({"folder": str(root), **settings})
        self.files = FileStore(root, config)
        self.batches = BatchStore(root, config, self.files)

    def put(self, content: bytes = b"{}\n", tenant: str = "a") -> str:
        return self.files.put(tenant, "in.jsonl", io.BytesIO(content)).id

    def create(self, tenant: str = "a") -> str:
        return self.batches.create(tenant, ENDPOINT, self.put(tenant=tenant), "24h", 86_400, None).id


def test_files_belong_to_their_tenant(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    file_id = stores.put(b"hello")
    assert stores.files.path("a", file_id).read_bytes() == b"hello"
    assert stores.files.get("a", file_id).num_bytes == 5
    assert stores.files.ids("a") == [file_id]
    assert stores.files.ids("b") == []
    for call in (stores.files.get, stores.files.path, stores.files.delete):
        with pytest.raises(FileNotFound, match="no file of yours"):
            call("b", file_id)
    stores.files.delete("a", file_id)
    with pytest.raises(FileNotFound):
        stores.files.get("a", file_id)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_new_folder_is_private(tmp_path: Path) -> None:
    root = tmp_path / "made" / "here"
    Stores(root).create()
    assert root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("file_id", ["", "../../etc/passwd", "file-" + "0" * 31, "file-" + "0" * 32 + "/x", "file-\n"])
def test_invalid_ids_reach_no_path(tmp_path: Path, file_id: str) -> None:
    with pytest.raises(FileNotFound, match="no file of yours"):
        Stores(tmp_path).files.path("a", file_id)
    with pytest.raises(BatchNotFound):
        Stores(tmp_path).batches.get("a", file_id)


@pytest.mark.parametrize("tenant", ["", "..", "a/b", "ü"])
def test_tenants_of_any_name_stay_within_the_folder(tmp_path: Path, tenant: str) -> None:
    root = tmp_path / "root"
    stores = Stores(root)
    assert root in stores.files.path(tenant, stores.put(tenant=tenant)).resolve().parents


def test_a_tenants_bytes_and_files_are_bounded(tmp_path: Path) -> None:
    stores = Stores(tmp_path, file_bytes=100, tenant_bytes=150, max_files=2)
    with pytest.raises(InvalidInput, match=r"larger than router\.batches\.file_bytes = 100; split it"):
        stores.put(b"x" * 101)
    stores.put(b"x" * 100)
    with pytest.raises(Overloaded, match="tenant_bytes = 150; delete some"):
        stores.put(b"x" * 51)
    stores.put(b"x" * 51, tenant="b")
    stores.put(b"x" * 50)
    with pytest.raises(Overloaded, match=r"has 2 files, and router\.batches\.max_files = 2"):
        stores.put(b"")
    assert len([*tmp_path.glob("tenant-a/files/file-*")]) == 4, "what was refused leaves nothing"


def test_old_and_abandoned_files_are_removed(tmp_path: Path) -> None:
    stores = Stores(tmp_path, age_s=1e6)
    kept = stores.put()
    abandoned = stores.files.path("a", kept).with_name("file-" + "1" * 32)
    abandoned.touch()
    stores.files.sweep(time.time() + 4000)
    assert not abandoned.exists()
    assert stores.files.get("a", kept)
    stores.files.sweep(time.time() + 2e6)
    assert stores.files.ids("a") == []


def test_one_router_at_a_time_claims_a_batch(tmp_path: Path) -> None:
    first, second = Stores(tmp_path), Stores(tmp_path)
    batch_id = first.create()
    assert second.batches.unfinished() == [("a", batch_id)]
    claim = first.batches.claim("a", batch_id)
    assert claim is not None
    assert second.batches.claim("a", batch_id) is None
    claim.close()
    again = second.batches.claim("a", batch_id)
    assert again is not None
    again.save(again.record.entered(BatchStatus.COMPLETED, 5.0))
    again.close()
    assert first.batches.claim("a", batch_id) is None, "it is finished"
    assert first.batches.unfinished() == []
    assert first.batches.get("a", batch_id).as_json()["completed_at"] == 5


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    claim = stores.batches.claim("a", stores.create())
    assert claim is not None
    claim.append(OUTPUT, answer_line("one", 200, "r", {"text": "x"}))
    claim.append(OUTPUT, answer_line("two", 200, "r", {"text": "y"})[:-9])
    assert claim.done(OUTPUT) == {"one"}
    claim.append(OUTPUT, answer_line("two", 200, "r", {"text": "y"}))
    assert claim.done(OUTPUT) == {"one", "two"}
    assert claim.seal(lambda done: [answer_line("three", 500, "r", {})] if done == {"one", "two"} else []) == 1
    claim.append(OUTPUT, answer_line("late", 200, "r", {}))
    assert claim.done(OUTPUT) == {"one", "two"}
    assert claim.done(ERRORS) == {"three"}
    claim.close()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    claim = (stores := Stores(tmp_path)).batches.claim("a", stores.create())
    assert claim is not None
    first, second = (answer_line(name, 200, "r", {"text": "x" * 200}) for name in ("one", "two"))
    claim.append(OUTPUT, first)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(first) + 100, limits[1]))  # the kernel writes 100 bytes, then fails
    try:
        with pytest.raises(OSError, match="too large"):
            claim.append(OUTPUT, second)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert claim.path(OUTPUT).read_bytes() == first
    claim.append(OUTPUT, second)
    assert claim.done(OUTPUT) == {"one", "two"}
    claim.close()


def test_an_output_that_was_stored_twice_is_one_file(tmp_path: Path) -> None:
    stores, batch_id = Stores(tmp_path), "batch_" + "0" * 32
    lines, link = tmp_path / "lines", tmp_path / "link"
    lines.write_bytes(b"x")
    for _ in range(2):  # a router died between both
        link.hardlink_to(lines)
        kept = stores.files.keep("a", link, "out.jsonl", output_file_id(batch_id, OUTPUT))
        assert not link.exists()
    assert stores.files.ids("a") == [kept.id]
    assert output_file_id(batch_id, ERRORS) != kept.id


def test_unreadable_records_are_reported_and_spoil_no_others(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    batch_id, other = stores.create(), stores.create()
    file_id = stores.batches.get("a", batch_id).input_file_id
    for text in ("", "{}", "[]", '{"status": "new", "errors": []}'):
        for path in tmp_path.rglob(f"{batch_id}/batch.json"), tmp_path.rglob(f"{file_id}.json"):
            next(path).write_text(text)
        with pytest.raises(Unavailable, match="damaged: a batch's record cannot be read"):
            stores.batches.get("a", batch_id)
        with pytest.raises(Unavailable, match="damaged: a file's record cannot be read"):
            stores.files.get("a", file_id)
        assert stores.batches.find("a", batch_id) is None
        assert stores.batches.find("a", other)
        assert sorted(stores.files.find("a", each) is None for each in stores.files.ids("a")) == [False, True]
        assert stores.batches.unfinished() == [("a", other)]
        assert stores.batches.claim("a", batch_id) is None


def test_a_file_without_content_does_not_exist(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    file_id = stores.put()
    stores.files.path("a", file_id).unlink()
    with pytest.raises(FileNotFound):
        stores.files.path("a", file_id)


def test_finished_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.batches.batches._MAX_FINISHED", 2)
    stores = Stores(tmp_path)
    finished = [stores.create() for _ in range(4)]
    for batch_id in finished:
        claim = stores.batches.claim("a", batch_id)
        assert claim is not None
        claim.save(claim.record.entered(BatchStatus.FAILED, 5.0))
        claim.close()
    assert stores.batches.unfinished() == []
    unfinished = stores.create()
    assert stores.batches.ids("a") == [*finished[2:], unfinished]


def test_a_cancelled_batch_is_marked_at_once(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    batch_id = stores.create()
    assert stores.batches.cancel("a", batch_id).status is BatchStatus.CANCELLING
    with pytest.raises(BatchNotFound):
        stores.batches.cancel("b", batch_id)


def test_unfinished_batches_are_bounded(tmp_path: Path) -> None:
    stores = Stores(tmp_path, max_batches=2)
    stores.create()
    stores.create()
    with pytest.raises(Overloaded, match=r"2 unfinished batches, and router\.batches\.max_batches = 2; wait for one"):
        stores.create()
    stores.create(tenant="b")


GOOD = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"prompt": "x"}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"custom_id": None}, "custom_id: is missing or not a string"),
        ({"custom_id": "x" * 513}, "custom_id: is missing or not a string of 1 to 512"),
        ({"method": "GET"}, "method: is 'GET'; only POST"),
        ({"url": "/v1/embeddings"}, "url: is '/v1/embeddings', but the batch is for /v1/completions"),
        ({"body": []}, "body: is missing or not a JSON object"),
        ({"body": {"stream": True}}, r"body\.stream: is true"),
        ({"extra": 1}, "extra: is not a field of a line"),
    ],
)
def test_mistakes_in_a_line_are_refused_by_field(change: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        read_line(json.dumps(GOOD | change).encode(), ENDPOINT, 4096, json.loads)


def test_the_size_of_a_line_is_bounded() -> None:
    raw = json.dumps(GOOD).encode()
    assert json.loads(read_line(raw, ENDPOINT, len(raw), json.loads).body) == {"prompt": "x"}
    with pytest.raises(InvalidInput, match=r"line: has more than limits\.request_bytes = 86 bytes"):
        read_line(raw, ENDPOINT, len(raw) - 1, json.loads)
    with pytest.raises(InvalidInput, match="line: is not a JSON object"):
        read_line(b"[1]", ENDPOINT, 4096, json.loads)


def test_only_whole_lines_have_an_id() -> None:
    line = answer_line("é", 200, "r", {"choices": []})
    assert custom_id_of(line) == "é"
    assert custom_id_of(line[:-1]) is None
    assert custom_id_of(b"{\n") is None


def test_a_batch_does_not_start_if_its_output_could_find_no_room(tmp_path: Path) -> None:
    """Otherwise a file of bad requests, which cost nothing, could fill the disk with outputs."""
    stores = Stores(tmp_path, tenant_bytes=150, max_files=3)
    file_id = stores.put(b"x" * 40)
    output = tmp_path / "output"
    output.write_bytes(b"x" * 200)
    kept = stores.files.keep("a", output, "output", output_file_id("batch_" + "1" * 32, "output"))
    with pytest.raises(Overloaded, match=r"files hold 240 bytes, and router\.batches\.tenant_bytes = 150; delete some"):
        stores.batches.create("a", ENDPOINT, file_id, "24h", 86_400, None)
    stores.create("b")
    stores.files.delete("a", kept.id)
    stores.batches.create("a", ENDPOINT, file_id, "24h", 86_400, None)
    for _ in range(2):
        stores.put(b"x")
    with pytest.raises(Overloaded, match=r"has 3 files, and router\.batches\.max_files = 3; delete some"):
        stores.batches.create("a", ENDPOINT, file_id, "24h", 86_400, None)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_only_the_beginning_of_too_long_a_line_is_read(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a" * 100 + b"\n\n" + b"b" * 3_000_000 + end)
    assert [(number, len(line)) for number, line in input_lines(path, 100)] == [(1, 101), (3, 102)]
    path.write_bytes(b"b" * 3_000_000 + b"\n" + b"c" * 99 + end)
    lines = [*input_lines(path, 100)]
    assert [(number, line.strip()[:1]) for number, line in lines] == [(1, b"b"), (2, b"c")]
    with pytest.raises(InvalidInput, match=r"has more than limits\.request_bytes = 100 bytes"):
        read_line(lines[0][1], ENDPOINT, 100, json.loads)
