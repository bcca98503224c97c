"""Tests how a router reads the adapters that requests may name: once, or again whenever their file changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import RouterConfig, parse
from penstock.errors import CheckpointError, ConfigError
from penstock.kv.adapter_files import CONFIG_FILE, WEIGHTS_FILE, read_adapter_ref
from penstock.rpc.reload import FileWatcher
from router.fleet.adapters import adapter_file
from router.fleet.adapters.registry import AdapterRegistry
from tests.support.key_files import replace

MODEL = "penstock-tiny"


def folder(path: Path, weights: bytes = b"") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_FILE).write_text("{}")
    (path / WEIGHTS_FILE).write_bytes(weights)
    return path


def followed(**settings: object) -> tuple[AdapterRegistry, FileWatcher]:
    watcher, registry = FileWatcher(), AdapterRegistry()
    config = RouterConfig.model_validate({"model": "m", "workers": ("localhost:1",), **settings})
    registry.follow(config, MODEL, watcher)
    return registry, watcher


def refresh(watcher: FileWatcher) -> str:
    """Reads what has changed, as the watcher's task does; returns why it was refused."""
    (files,) = watcher.files
    files.refresh()
    return files.problem


def test_adapters_of_the_configuration_are_read_once(tmp_path: Path) -> None:
    registry, watcher = followed(adapters={"sql": str(folder(tmp_path / "a"))})
    assert registry.find("sql") == read_adapter_ref("sql", str(tmp_path / "a"))
    assert registry.find("law") is None
    assert watcher.files == []


def test_only_adapters_that_have_changed_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "a"), folder(tmp_path / "b")
    path = tmp_path / "adapters.toml"
    replace(path, '[adapters]\nsql = "a"\nlaw = "b"\n')
    registry, watcher = followed(adapters_file=str(path))
    read: list[str] = []
    revision = adapter_file.adapter_revision
    monkeypatch.setattr(adapter_file, "adapter_revision", lambda path: read.append(path.name) or revision(path))
    folder(tmp_path / "b", b"new"), folder(tmp_path / "c")
    replace(path, '[adapters]\nsql = "a"\nlaw = "b"\nart = "c"\n')
    assert refresh(watcher) == ""
    assert read == ["b", "c"]
    assert registry.all == [
        read_adapter_ref(name, str(tmp_path / at)) for name, at in (("art", "c"), ("law", "b"), ("sql", "a"))
    ]


def test_a_changed_file_adds_removes_and_replaces_adapters(tmp_path: Path) -> None:
    folder(tmp_path / "a"), folder(tmp_path / "b", b"b")
    path = tmp_path / "adapters.toml"
    replace(path, '[adapters]\nsql = "a"\n')  # relative to the file
    registry, watcher = followed(adapters_file=str(path))
    before = registry.find("sql")
    assert before == read_adapter_ref("sql", str(tmp_path / "a"))
    replace(path, f'[adapters]\nsql = "a"\nlaw = "{tmp_path / "b"}"\n')
    assert refresh(watcher) == ""
    assert [adapter.name for adapter in registry.all] == ["law", "sql"]
    folder(tmp_path / "a", b"new")
    replace(path, '[adapters]\nsql = "a"\n')
    assert refresh(watcher) == ""
    assert registry.find("law") is None
    renewed = registry.find("sql")
    assert before is not None
    assert renewed is not None
    assert renewed.revision != before.revision
    replace(path, "[adapters]\n")
    assert refresh(watcher) == ""
    assert registry.all == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[adapters]\nsql = "missing"\n', "give the folder of a PEFT adapter"),
        ('[adapters]\n"s q l" = "a"\n', "is named 's q l'; give 1 to 128 letters"),
        (f'[adapters]\n{MODEL} = "a"\n', "like the model itself; give another name"),
        ("adapters = 3\n", "adapters"),
        ("not toml", "TOML"),
    ],
)
def test_an_unusable_file_is_refused_whole_and_the_last_one_stays_in_force(
    tmp_path: Path, text: str, problem: str
) -> None:
    folder(tmp_path / "a")
    path = tmp_path / "adapters.toml"
    replace(path, '[adapters]\nsql = "a"\n')
    registry, watcher = followed(adapters_file=str(path))
    replace(path, text)
    refused = refresh(watcher)
    assert problem in refused
    assert str(path) in refused
    assert [adapter.name for adapter in registry.all] == ["sql"]
    with pytest.raises(ConfigError, match="adapters_file = "):
        followed(adapters_file=str(path))


def test_an_adapter_of_the_configuration_must_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="give the folder of a PEFT adapter"):
        followed(adapters={"sql": str(tmp_path)})


def test_adapters_come_from_either_the_file_or_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"adapters_file = 'a.toml' and adapters are both set; give one"):
        parse(RouterConfig, {"model": "m", "adapters_file": "a.toml", "adapters": {"sql": "/a"}})
