"""Tests files and batches over HTTP with the openai client: whole runs, bad input, and a router that dies in
between."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json

import httpx
import openai
import pytest

from penstock.config.router import BatchConfig
from penstock.errors import Overloaded
from penstock.rpc.secret import digest_of
from penstock.v1 import common_pb2
from router.api.http.offline import file_routes
from router.batches.files import FileStore
from router.batches.records import BatchRecord, FileRecord
from tests.support.router.router_fakes import FakeWorker, running_router, until

ENDPOINT = "/v1/completions"
WAIT_S = 60.0
PART = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 100_000
FINAL = {"completed", "failed", "expired", "cancelled"}


def line(custom_id, url=ENDPOINT, **body):
    body = {"model": "penstock-tiny", "prompt": f"Say {custom_id}", "max_tokens": 4, "seed": 1} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


@contextlib.asynccontextmanager
async def serving(worker, folder, **settings):
    batches = {"folder": str(folder)} | settings.pop("batches", {})
    async with running_router(worker, batches=batches, **settings) as router:
        async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="none", max_retries=0) as client:
            yield client


@pytest.fixture(name="worker")
async def _worker():
    return await FakeWorker().start()


async def begin(client, lines, endpoint=ENDPOINT, **options):
    file = await client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


async def finished(client, batch):
    async with asyncio.timeout(WAIT_S):
        while (batch := await client.batches.retrieve(batch.id)).status not in FINAL:  # noqa: ASYNC110 - as clients do
            await asyncio.sleep(0.02)
    return batch


async def content(client, file_id):
    text = (await client.files.content(file_id)).text
    return {entry["custom_id"]: entry for entry in map(json.loads, text.splitlines())}


async def test_a_batch_answers_each_line_once_in_the_bulk_lane(worker, tmp_path):
    async with serving(worker, tmp_path) as client:
        bad = line("bad", max_tokens=0)
        batch = await begin(client, [*(line(f"r{number}") for number in range(20)), bad], metadata={"for": "me"})
        assert batch.status == "validating"
        batch = await finished(client, batch)
        assert (batch.status, batch.metadata) == ("completed", {"for": "me"})
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
        answers = await content(client, batch.output_file_id)
        assert sorted(answers) == sorted(f"r{number}" for number in range(20))
        direct = await client.completions.create(model="penstock-tiny", prompt="Say r3", max_tokens=4, seed=1)
        assert answers["r3"]["response"]["body"]["choices"][0]["text"] == direct.choices[0].text
        assert answers["r3"]["response"]["status_code"] == 200
        errors = await content(client, batch.error_file_id)
        assert errors["bad"]["response"]["status_code"] == 400
        assert "max_tokens" in errors["bad"]["response"]["body"]["error"]["message"]
        lanes = [submit.lane for submit in worker.submits]
        assert lanes == [common_pb2.LANE_BULK] * 20 + [common_pb2.LANE_STANDARD]
        assert [batch.id for batch in (await client.batches.list()).data] == [batch.id]
        files = await client.files.list()
        assert {file.purpose for file in files.data} == {"batch", "batch_output"}


def counted_loads(monkeypatch, record_type):
    """Returns the texts of the records that are loaded from now on."""
    load, texts = record_type.load, []

    def counting(text):
        texts.append(text)
        return load(text)

    monkeypatch.setattr(record_type, "load", staticmethod(counting))
    return texts


async def test_a_listing_reads_only_the_records_that_it_shows(worker, tmp_path, monkeypatch):
    """Listing is charged nothing, so it may not cost as much as a tenant has files."""
    async with serving(worker, tmp_path) as client:
        store = FileStore(tmp_path, BatchConfig())
        ids = [store.put("", f"{number}.jsonl", io.BytesIO(b"x")).id for number in range(150)]
        loaded = counted_loads(monkeypatch, FileRecord)
        first = await client.files.list(limit=3)
        assert [file.id for file in first.data] == ids[:-4:-1]
        assert (first.has_more, len(loaded)) == (True, 3)
        assert [file.id for file in (await client.files.list(limit=2, after=ids[4], order="asc")).data] == ids[5:7]
        assert len(loaded) == 5
        largest = await client.files.list(limit=10_000, order="asc")
        assert ([file.id for file in largest.data], largest.has_more) == (ids[:100], True)
        assert [file.id async for file in client.files.list(limit=10_000, order="asc")] == ids, "clients page on"


async def test_batches_and_outputs_are_paged_too(worker, tmp_path, monkeypatch):
    async with serving(worker, tmp_path) as client:
        batches = [await finished(client, await begin(client, [line("a")])) for _ in range(4)]
        outputs = [batch.output_file_id for batch in batches]
        assert [file.id async for file in client.files.list(purpose="batch_output", order="asc", limit=3)] == outputs
        assert (await client.files.list(purpose="fine-tune")).data == []
        assert [batch.id async for batch in client.batches.list(limit=3)] == [batch.id for batch in reversed(batches)]
        await begin(client, [line("a")])  # the router knows by now that the others are finished
        shown = []
        monkeypatch.setattr(BatchRecord, "as_json", lambda record: shown.append(record.id) or {"id": record.id})
        assert [batch.id for batch in (await client.batches.list(limit=2, after=batches[3].id)).data] == shown
        assert shown == [batches[2].id, batches[1].id]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"prompt": None, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"prompt": None, "max_tokens": None, "input": "Hi", "max_output_tokens": 4}),
    ],
)
async def test_other_endpoints_are_served(worker, tmp_path, endpoint, body):
    async with serving(worker, tmp_path) as client:
        written = json.loads(line("a", endpoint))
        written["body"] = {name: value for name, value in (written["body"] | body).items() if value is not None}
        batch = await finished(client, await begin(client, [json.dumps(written)], endpoint))
        assert batch.request_counts.completed == 1
        answer = (await content(client, batch.output_file_id))["a"]["response"]["body"]
        assert answer["object"] == {"/v1/responses": "response"}.get(endpoint, "chat.completion")


async def test_a_line_that_asks_for_another_lane_stays_in_bulk(worker, tmp_path):
    async with serving(worker, tmp_path) as client:
        await finished(client, await begin(client, [line("a", service_tier="priority")]))
        assert [submit.lane for submit in worker.submits] == [common_pb2.LANE_BULK]


async def test_a_file_full_of_mistakes_fails_as_a_whole(worker, tmp_path):
    async with serving(worker, tmp_path, batches={"max_lines": 3}) as client:
        batch = await finished(client, await begin(client, [line("a"), "", "{", line("a"), line("b")]))
        assert (batch.status, batch.output_file_id) == ("failed", None)
        assert [(error.line, error.param) for error in batch.errors.data] == [
            (3, "body"),
            (4, "custom_id"),
            (5, "input_file_id"),
        ]
        empty = await finished(client, await begin(client, [" "]))
        assert empty.errors.data[0].message == "input_file_id: has no lines; write some"
        assert worker.submits == []


async def test_another_router_continues_where_one_ended(tmp_path):
    worker = FakeWorker(pause_at=2)
    await worker.start()
    async with serving(worker, tmp_path, batches={"max_running": 2}) as client:
        batch = await begin(client, [line(f"r{number}", max_tokens=1 if number < 3 else 4) for number in range(6)])
        await until(lambda: len(worker.submits) == 5)  # three are done, and two wait
    other = await FakeWorker().start()
    async with serving(other, tmp_path) as client:
        batch = await finished(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 6)
        assert len(await content(client, batch.output_file_id)) == 6
        assert len(other.submits) == 3, "what was answered is not asked again"


async def test_a_batch_is_cancelled_with_its_answers_so_far(tmp_path):
    worker = FakeWorker(pause_at=2)
    await worker.start()
    async with serving(worker, tmp_path, batches={"max_running": 1}) as client:
        batch = await begin(client, [line("short", max_tokens=1), line("long"), line("never")])
        await until(lambda: len(worker.submits) == 2)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await finished(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("cancelled", 1)
        assert [*await content(client, batch.output_file_id)] == ["short"]
        await worker.until(lambda worker: not worker.running)


async def test_lines_left_when_the_window_ends_are_reported(tmp_path, monkeypatch):
    worker = FakeWorker(pause_at=0)
    await worker.start()
    async with serving(worker, tmp_path) as client:
        file = await client.files.create(file=("in.jsonl", line("late").encode()), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="1m")
        await until(lambda: len(worker.submits) == 1)
        monkeypatch.setattr("router.batches.runner.time.time", lambda: batch.expires_at + 1.0)
        batch = await finished(client, batch)
        assert (batch.status, batch.request_counts.failed) == ("expired", 1)
        assert (await content(client, batch.error_file_id))["late"]["error"]["code"] == "batch_expired"


async def test_temporarily_refused_lines_are_retried(worker, tmp_path, monkeypatch):
    from router.api.http.generation import GenerationCalls

    answer, refused = GenerationCalls.answer_offline, []

    async def refuse_once(self, *arguments):
        if not refused:
            refused.append(True)
            raise Overloaded("full; try again", 0.01)
        return await answer(self, *arguments)

    monkeypatch.setattr(GenerationCalls, "answer_offline", refuse_once)
    async with serving(worker, tmp_path) as client:
        batch = await finished(client, await begin(client, [line("a")]))
        assert (batch.request_counts.completed, refused) == (1, [True])


async def test_mistakes_are_refused_by_field(worker, tmp_path):
    async with serving(worker, tmp_path, batches={"file_bytes": 1000}) as client:
        http = httpx.AsyncClient(base_url=str(client.base_url), timeout=60)
        file = await client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
        good = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}
        for change, status, problem in [
            ({"input_file_id": 3}, 400, "input_file_id: is 3; give the id of a file"),
            ({"input_file_id": "file-x"}, 404, "input_file_id: is 'file-x', which is no file of yours"),
            ({"endpoint": "/v1/embeddings"}, 400, "endpoint: is '/v1/embeddings'; give one of /v1/chat/completions"),
            ({"completion_window": "9d"}, 400, "completion_window: is '9d'; give a time such as 24h"),
            ({"completion_window": "soon"}, 400, "completion_window: is 'soon'; give a time"),
            ({"metadata": 3}, 400, "metadata: is 3; give an object"),
            ({"metadata": {"a": 1}}, 400, "metadata.a: is 1; keys may have"),
            ({"metadata": dict.fromkeys("abcdefghijklmnopq", "b")}, 400, "metadata: has 17 pairs; give 16 or fewer"),
            ({"output_expires_after": {}}, 400, "output_expires_after: is not supported for a batch"),
        ]:
            answer = await http.post("/batches", json=good | change)
            assert (answer.status_code, answer.json()["error"]["message"][: len(problem)]) == (status, problem)
        form = {"file": ("in.jsonl", b"x")}
        for files, data, status, problem in [
            (form, {"purpose": "fine-tune"}, 400, "purpose: is 'fine-tune'; only batch is served"),
            (form, {"purpose": "batch", "expires_after": "1"}, 400, "expires_after: is not supported for a file"),
            ({"other": ("a", b"x")}, {"purpose": "batch"}, 400, "other: is not supported for a file"),
            ({"file": ("in.jsonl", b"x" * 1001)}, {"purpose": "batch"}, 400, "file: is larger than"),
            ({"file": ("in.jsonl", b"x" * 90_000)}, {"purpose": "batch"}, 413, "file: is larger than"),
        ]:
            answer = await http.post("/files", files=files, data=data)
            assert (answer.status_code, answer.json()["error"]["message"][: len(problem)]) == (status, problem)
        answer = await http.post("/files", content=b"x")
        assert answer.json()["error"]["message"].startswith("content-type: is not multipart/form-data")
        answer = await http.post("/files", content=b"x", headers={"content-type": "multipart/form-data; boundary=b"})
        assert answer.status_code == 400
        answer = await http.post("/files", content=b"x", headers={"content-type": "Multipart/Form-Data; boundary=b"})
        assert answer.json()["error"]["message"].startswith("body: is not a valid form")
        for path in ("/files/file-x", "/files/file-x/content", "/batches/batch_x"):
            assert (await http.get(path)).status_code == 404
        await http.aclose()


def form_of(begun: asyncio.Event):
    """Returns headers and body of an upload that never ends; `begun` is set once its first part has been taken."""

    async def parts():
        yield PART
        begun.set()
        await asyncio.Event().wait()
        yield b""

    return {"headers": {"content-type": "multipart/form-data; boundary=b"}, "content": parts()}


async def test_a_slow_upload_of_one_tenant_leaves_room_for_others(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(file_routes, "_MAX_TENANT_UPLOADS", 1)
    tenants = {name: {"keys": [digest_of(f"{name}-key")]} for name in ("slow", "other")}
    settings = {"batches": {"folder": str(tmp_path)}, "tenants": tenants, "metrics_token_file": ""}
    async with running_router(worker, **settings) as router:

        def client(name):
            headers = {"authorization": f"Bearer {name}-key"}
            return httpx.AsyncClient(base_url=f"{router.http_url}/v1", headers=headers, timeout=WAIT_S)

        async with client("slow") as slow, client("other") as other:
            begun = asyncio.Event()
            form = form_of(begun)
            form["headers"] |= slow.headers
            uploading = asyncio.create_task(slow.post("/files", **form))
            await asyncio.wait_for(begun.wait(), WAIT_S)
            whole = {"files": {"file": ("in.jsonl", b"x")}, "data": {"purpose": "batch"}}
            async with asyncio.timeout(WAIT_S):  # the router has begun to read this one, too
                while (refused := await slow.post("/files", **whole)).status_code == 200:
                    pass
            assert refused.status_code == 503
            assert "1 of one tenant; try again" in refused.json()["error"]["message"]
            assert (await other.post("/files", **whole)).status_code == 200
            uploading.cancel()
            await asyncio.wait([uploading])
            async with asyncio.timeout(WAIT_S):
                while (await slow.post("/files", **whole)).status_code != 200:  # noqa: ASYNC110 - as clients do
                    await asyncio.sleep(0.02)


async def test_a_stalled_upload_ends_whatever_its_size(worker, tmp_path):
    settings = {"batches": {"folder": str(tmp_path), "file_bytes": 1 << 40}, "limits": {"body_timeout_s": 0.5}}
    async with running_router(worker, **settings) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.server.ports.http)
        head = "POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        writer.write(f"{head}content-length: {1 << 30}\r\n\r\n".encode() + PART)
        async with asyncio.timeout(WAIT_S):
            answer = await reader.readuntil(b"send it faster or send less")
        assert answer.startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()


async def test_without_a_folder_neither_files_nor_batches_are_served(worker):
    async with running_router(worker) as router, httpx.AsyncClient(base_url=router.http_url) as http:
        answer = await http.get("/v1/batches")
        assert answer.status_code == 404
        assert "needs router.batches.folder" in answer.json()["error"]["message"]
