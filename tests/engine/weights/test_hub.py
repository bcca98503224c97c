"""Tests downloads by Hub id from a server that implements the Hub's few routes, with a real tiny checkpoint."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import constants

from cluster.cli.commands.running.serve import with_local_model
from cluster.cli.main import main
from cluster.diagnose.findings import Severity
from cluster.diagnose.local_checks import check_configuration
from engine.models.config import ModelConfig
from engine.weights.hub import HubModel
from penstock.config import ServeConfig
from penstock.errors import CheckpointError, ConfigError, Unavailable
from tests.support.repository.house import ROOT

FOLDER = ROOT / "models" / "penstock-tiny"
FILES = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.is_file()}
# Files that a real repository has and that nothing here needs.
FILES |= {"consolidated.safetensors": b"the same weights", "onnx/model.safetensors": b"again", "README.md": b"a card"}
COMMIT = "c0ffee" + "0" * 34


class Hub(BaseHTTPRequestHandler):
    """Serves one model as `org/tiny`, with the branch `main` and the tag `v1`; `org/gated` and others are refused."""

    sent: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            self._answer_api(path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            self._answer_file(path.partition("/resolve/")[2].partition("/")[2])
        else:
            self._send(404, b"{}")

    def _answer_api(self, path: str) -> None:
        repo, _, rest = path.partition("/revision/")
        tree = path.partition("/tree/")
        if tree[1]:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self._send(200, json.dumps(entries).encode())
        elif repo == "org/gated":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "accept the terms"})
        elif repo != "org/tiny":
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif rest not in ("", "main", "v1", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [{"rfilename": name} for name in FILES]
            self._send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())

    def _answer_file(self, name: str) -> None:
        data = FILES[name]
        if self.command == "GET":
            self.sent.append(name)
        etag = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self._send(200, data, etag)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ({"content-length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields the address of a Hub; the cache is empty, and the library calls no other server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    _redirect(monkeypatch, address, tmp_path)
    Hub.sent.clear()
    yield address
    server.shutdown()
    server.server_close()


def _redirect(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Replaces what the library read from HF_ENDPOINT and HF_HOME when it was imported."""
    for name, value in {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address, raising=False)


def test_a_model_is_downloaded_once_and_can_be_read(hub: str) -> None:
    model = HubModel.parse("org/tiny")
    assert model is not None
    folder = model.fetch()
    config = ModelConfig.from_folder(str(folder))
    assert config.revision == ModelConfig.from_folder(str(FOLDER)).revision
    assert "README.md" not in Hub.sent
    assert not [name for name in Hub.sent if name.startswith(("consolidated", "onnx"))]
    num_sent = len(Hub.sent)
    assert model.fetch() == folder
    assert len(Hub.sent) == num_sent


def test_a_plan_downloads_only_the_configuration(hub: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", "org/tiny@v1", "--context", "512", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["has_weights"] is False
    assert Hub.sent == ["config.json"]


def test_a_deployment_is_planned_by_the_id(hub: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.toml"
    traffic = ["--rate=1", "--input-tokens=40", "--output-tokens=20", "--limit=20", "--verify=0"]
    command = ["plan", "--model=org/tiny@v1", "--accelerator=H100=3", *traffic, f"--write={file}", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "org/tiny@v1"
    assert tomllib.loads(file.read_text())["model"] == "org/tiny@v1"
    assert Hub.sent == ["config.json"]


def test_the_doctor_recognizes_a_model_of_the_hub(hub: str) -> None:
    config, finding = check_configuration(None, "org/tiny")
    assert config is not None
    assert finding is not None
    assert finding.severity is Severity.OK
    assert finding.text.endswith("downloaded when it is served")
    assert Hub.sent == ["config.json"]
    none, finding = check_configuration(None, "org/none")
    assert none is None
    assert finding is not None
    assert f"{hub} has no such model" in finding.text


def test_a_deployment_is_called_by_the_id(hub: str) -> None:
    config = with_local_model(ServeConfig(model="org/tiny@v1"))
    assert (Path(config.model).name, config.model_name) == (COMMIT, "org/tiny")
    named = with_local_model(ServeConfig(model="org/tiny", served_model="mine"))
    assert named.model_name == "mine"
    assert with_local_model(ServeConfig(model=str(FOLDER))).model == str(FOLDER)
    with pytest.raises(ConfigError, match=r"every node needs the folder at the same path; run `hf download org/tiny"):
        with_local_model(ServeConfig(model="org/tiny", address="auto", security={"secret_file": "s"}))


def test_a_revision_is_pinned(hub: str) -> None:
    for revision in ("v1", COMMIT):
        assert HubModel("org/tiny", revision).fetch(config_only=True).name == COMMIT
    with pytest.raises(CheckpointError, match="org/tiny has no revision v2; give a branch, a tag or a commit"):
        HubModel("org/tiny", "v2").fetch()


def test_a_refusal_of_the_hub_is_explained(hub: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"org/gated is gated: accept its terms at {hub}/org/gated, then give a tok"
    ):
        HubModel("org/gated").fetch()
    with pytest.raises(CheckpointError, match=f"org/none is not a folder, and {hub} has no such model, or hides it"):
        HubModel("org/none").fetch()


def test_offline_the_cached_model_is_served_and_a_missing_one_reported(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = HubModel("org/tiny").fetch()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert HubModel("org/tiny").fetch() == folder
    with pytest.raises(
        CheckpointError, match=r"org/other is incomplete in the cache .*/hub, and HF_HUB_OFFLINE forbids"
    ):
        HubModel("org/other").fetch()


def test_an_unreachable_hub_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _redirect(monkeypatch, "http://127.0.0.1:1", tmp_path)
    with pytest.raises(Unavailable, match=r"cannot be downloaded from http://127\.0\.0\.1:1 \(.*check the network"):
        HubModel("org/tiny").fetch()


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"org/tiny is not a folder; .*`pip install huggingface_hub`"):
        HubModel("org/tiny").fetch()


def test_paths_are_not_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("tiny", "/org/tiny", "./org/tiny", "../tiny", "org/tiny/more", "org/", "~/tiny", "org/tiny@"):
        assert HubModel.parse(text) is None
    assert HubModel.parse("org/tiny-1.5B_x@refs/pr/3") == HubModel("org/tiny-1.5B_x", "refs/pr/3")
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert HubModel.parse("org/tiny") is None
