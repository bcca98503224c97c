"""Tests the calls that load and unload adapters: an operator changes the file that all routers share."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from cluster.cli.main import main
from penstock.config import RouterConfig
from penstock.errors import InvalidInput, ModelNotFound, PenstockError, Unavailable
from penstock.kv.adapter_files import read_adapter_ref
from penstock.rpc.reload import FileWatcher
from penstock.rpc.secret import ADMIN, ClusterSecret, digest_of
from router.fleet.adapters import adapter_file
from router.fleet.adapters.adapter_file import AdapterFile
from router.fleet.adapters.registry import AdapterRegistry
from tests.router.fleet.adapters.test_registry import MODEL, folder, refresh
from tests.support.key_files import replace, write_secret
from tests.support.router.router_fakes import FakeWorker, running_router

SECRET = ClusterSecret("s" * 64)
TOKEN = {"authorization": f"Bearer {SECRET.token(ADMIN)}"}


class Followed(NamedTuple):
    registry: AdapterRegistry
    watcher: FileWatcher
    file: AdapterFile


def follow(path: Path) -> Followed:
    """Follows the file as one router does."""
    watcher, registry = FileWatcher(), AdapterRegistry()
    config = RouterConfig.model_validate({"model": "m", "workers": ("localhost:1",), "adapters_file": str(path)})
    registry.follow(config, MODEL, watcher)
    assert registry.file is not None
    return Followed(registry, watcher, registry.file)


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_change_reaches_its_router_at_once_and_others_with_the_file(suffix: str, tmp_path: Path) -> None:
    folder(tmp_path / "a"), folder(tmp_path / 'b "\\ é', b"b")
    path = tmp_path / f"adapters.{suffix}"
    replace(path, '{"adapters": {"sql": "a"}}' if suffix == "json" else '[adapters]  # by hand\nsql = "a"\n')
    path.chmod(0o640)
    first, second = follow(path), follow(path)
    first.file.load("org/law:2.1", str(tmp_path / 'b "\\ é'), replaces=False)
    assert [adapter.name for adapter in first.registry.all] == ["org/law:2.1", "sql"]
    assert [adapter.name for adapter in second.registry.all] == ["sql"]
    assert refresh(second.watcher) == ""
    assert second.registry.all == first.registry.all
    assert first.registry.find("sql") == read_adapter_ref("sql", str(tmp_path / "a"))  # still relative to the file
    assert path.stat().st_mode & 0o777 == 0o640
    second.file.unload("sql")
    assert refresh(first.watcher) == ""
    assert [adapter.name for adapter in first.registry.all] == ["org/law:2.1"]
    assert sorted(os.listdir(tmp_path)) == sorted(["a", 'b "\\ é', path.name, f"{path.name}.lock"])


def test_an_adapter_is_replaced_only_if_the_call_says_so(tmp_path: Path) -> None:
    folder(tmp_path / "a"), folder(tmp_path / "b", b"b")
    path = tmp_path / "adapters.toml"
    replace(path, '[adapters]\nsql = "a"\n')
    router = follow(path)
    with pytest.raises(InvalidInput, match=r"lora_name = 'sql' is loaded from a; .* load_inplace = true"):
        router.file.load("sql", str(tmp_path / "b"), replaces=False)
    router.file.load("sql", str(tmp_path / "b"), replaces=True)
    assert router.registry.find("sql") == read_adapter_ref("sql", str(tmp_path / "b"))
    folder(tmp_path / "b", b"changed")
    router.file.load("sql", str(tmp_path / "b"), replaces=True)
    assert router.registry.find("sql") == read_adapter_ref("sql", str(tmp_path / "b")), "the files are not read again"


def test_routers_that_change_the_file_at_the_same_time_lose_no_change(tmp_path: Path) -> None:
    folder(tmp_path / "a")
    path = tmp_path / "adapters.toml"
    replace(path, "[adapters]\n")
    routers = [follow(path) for _ in range(3)]
    start = threading.Barrier(3)

    def load(index: int) -> None:
        start.wait(timeout=60)
        for number in range(8):
            routers[index].file.load(f"a{index}-{number}", str(tmp_path / "a"), replaces=False)

    threads = [threading.Thread(target=load, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert refresh(routers[0].watcher) == ""
    assert {adapter.name for adapter in routers[0].registry.all} == {
        f"a{index}-{number}" for index in range(3) for number in range(8)
    }


def test_a_link_to_the_file_stays(tmp_path: Path) -> None:
    folder(tmp_path / "real" / "a")
    replace(tmp_path / "real" / "list.toml", "[adapters]\n")
    path = tmp_path / "adapters.toml"
    path.symlink_to(tmp_path / "real" / "list.toml")
    router = follow(path)
    router.file.load("sql", str(tmp_path / "real" / "a"), replaces=False)
    assert path.is_symlink()
    assert [adapter.name for adapter in router.registry.all] == ["sql"]


@pytest.mark.parametrize(
    ("call", "kind", "problem"),
    [
        (
            lambda file, at: file.load("s q l", str(at / "a"), replaces=False),
            InvalidInput,
            "lora_name: is named 's q l'",
        ),
        (
            lambda file, at: file.load(MODEL, str(at / "a"), replaces=False),
            InvalidInput,
            "lora_name: .*the model itself",
        ),
        (
            lambda file, at: file.load("b", "org/adapter", replaces=False),
            InvalidInput,
            "lora_path = 'org/adapter'; give",
        ),
        (lambda file, at: file.load("b", f"{at}/\x7f", replaces=False), InvalidInput, "lora_path = .*absolute path"),
        (
            lambda file, at: file.load("b", str(at), replaces=False),
            InvalidInput,
            "lora_path = .* folder of a PEFT adapter",
        ),
        (
            lambda file, at: file.load("b", str(at / "a"), replaces=False),
            InvalidInput,
            "has 1 adapters, the most; unload",
        ),
        (lambda file, at: file.unload("law"), ModelNotFound, "lora_name = 'law': no adapter has this name"),
    ],
)
def test_refused_changes_leave_the_file_as_it_is(
    call: Callable[[AdapterFile, Path], None],
    kind: type[PenstockError],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_file, "MAX_ADAPTERS", 1)
    folder(tmp_path / "a")
    path = tmp_path / "adapters.toml"
    replace(path, '[adapters]\nsql = "a"\n')
    router = follow(path)
    with pytest.raises(kind, match=problem):
        call(router.file, tmp_path)
    assert path.read_text() == '[adapters]\nsql = "a"\n'


def test_a_file_that_cannot_be_used_or_written_is_named(tmp_path: Path) -> None:
    folder(tmp_path / "a")
    path = tmp_path / "adapters.toml"
    replace(path, '[adapters]\nsql = "a"\n')
    router = follow(path)
    replace(path, '[adapters]\nsql = "gone"\n')
    with pytest.raises(Unavailable, match=r"adapters_file = .*gone.*mend the file"):
        router.file.load("law", str(tmp_path / "a"), replaces=False)
    assert path.read_text() == '[adapters]\nsql = "gone"\n'
    (tmp_path / "adapters.toml.lock").unlink()
    (tmp_path / "adapters.toml.lock").mkdir()
    with pytest.raises(Unavailable, match=r"adapters_file = .*: Is a directory; mend the file, and let routers write"):
        router.file.unload("sql")


def test_a_router_that_hangs_with_the_lock_blocks_no_other_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_file, "LOCK_TIMEOUT_S", 0.1)
    path = tmp_path / "adapters.toml"
    replace(path, "[adapters]\n")
    followed = follow(path)
    with open(f"{path}.lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match=r"another router has held .*adapters\.toml\.lock for 0\.1 s"):
            followed.file.load("sql", str(folder(tmp_path / "sql")), replaces=False)
    followed.file.load("sql", str(tmp_path / "sql"), replaces=False)


@asynccontextmanager
async def two_routers(path: Path, **settings: object) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    async with (
        running_router(await FakeWorker().start(), adapters_file=str(path), **settings) as first,
        running_router(await FakeWorker().start(), adapters_file=str(path), **settings) as second,
        httpx.AsyncClient(base_url=first.http_url, timeout=60) as here,
        httpx.AsyncClient(base_url=second.http_url, timeout=60) as there,
    ):
        yield here, there


async def lists(http: httpx.AsyncClient, *names: str) -> bool:
    return {model["id"] for model in (await http.get("/v1/models")).json()["data"]} == {MODEL, *names}


async def eventually_lists(http: httpx.AsyncClient, *names: str) -> None:
    limit_s = time.monotonic() + 60
    while not await lists(http, *names):
        assert time.monotonic() < limit_s
        await asyncio.sleep(0.05)


async def test_a_call_to_one_router_loads_and_unloads_an_adapter_at_all(tmp_path: Path) -> None:
    folder(tmp_path / "a")
    path = tmp_path / "adapters.toml"
    replace(path, "[adapters]\n")
    body = {"lora_name": "sql", "lora_path": str(tmp_path / "a")}
    async with two_routers(path, security=write_secret(tmp_path / "secret", SECRET)) as (here, there):
        loaded = await here.post("/v1/load_lora_adapter", json=body, headers=TOKEN)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert await lists(here, "sql")
        await eventually_lists(there, "sql")
        again = await there.post("/v1/load_lora_adapter", json=body, headers=TOKEN)
        assert again.status_code == 400
        assert again.json()["error"]["param"] == "lora_name"
        unloaded = await there.post(
            "/v1/unload_lora_adapter", json={"lora_name": "sql", "lora_int_id": 1}, headers=TOKEN
        )
        assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert await lists(there)
        await eventually_lists(here)
        assert (await here.post("/v1/unload_lora_adapter", json=body, headers=TOKEN)).status_code == 400  # lora_path
        gone = await here.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=TOKEN)
        assert gone.status_code == 404


async def test_only_the_operator_may_change_adapters(tmp_path: Path) -> None:
    folder(tmp_path / "a")
    path = tmp_path / "adapters.toml"
    replace(path, "[adapters]\n")
    body = {"lora_name": "sql", "lora_path": str(tmp_path / "a")}
    tenants = {"acme": {"keys": [digest_of("k" * 40)]}}
    settings = {"security": write_secret(tmp_path / "secret", SECRET), "tenants": tenants}
    async with two_routers(path, **settings) as (here, _):
        for headers in ({}, {"authorization": f"Bearer {'k' * 40}"}, {"x-api-key": "x" * 40}):
            refused = await here.post("/v1/load_lora_adapter", json=body, headers=headers)
            assert refused.status_code == 401
            assert "`penstock key admin`" in refused.text
        large = await here.post("/v1/load_lora_adapter", json={**body, "x": "y" * 20_000}, headers=TOKEN)
        assert (large.status_code, large.json()["error"]["param"]) == (400, "body")
        unknown = await here.post("/v1/load_lora_adapter", json={**body, "base_model": "x"}, headers=TOKEN)
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "base_model")
        assert (await here.post("/v1/load_lora_adapter", json=body, headers=TOKEN)).status_code == 200
    async with two_routers(path) as (here, _):
        refused = await here.post("/v1/load_lora_adapter", json=body, headers=TOKEN)
        assert refused.status_code == 403
        assert "set security.secret_file" in refused.json()["error"]["message"]


async def test_without_a_file_the_calls_are_refused_with_the_setting(tmp_path: Path) -> None:
    async with (
        running_router(await FakeWorker().start()) as router,
        httpx.AsyncClient(base_url=router.http_url, timeout=60) as http,
    ):
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter"):
            refused = await http.post(path, json={"lora_name": "sql"})
            assert refused.status_code == 404
            assert "load_lora_adapter needs adapters_file, the file that it changes" in json.dumps(refused.json())


def test_the_command_line_shows_the_admin_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_secret(tmp_path / "secret", SECRET)
    assert main(["key", "admin", "--secret-file", str(tmp_path / "secret")]) == 0
    assert capsys.readouterr().out.strip() == SECRET.token(ADMIN)
    assert main(["key", "admin", "--admin", "elsewhere:1"]) != 0
    assert "no deployment has left a token for elsewhere:1" in capsys.readouterr().err
