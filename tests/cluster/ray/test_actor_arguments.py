"""Tests that no key is an argument of an actor, since Ray stores and logs arguments, and that a new secret makes a new
token.

Ray itself is a double: the actor's class runs in this process.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from cluster.controller.event_log import EventLog
from cluster.pools.pool import Incarnation
from cluster.pools.resources import divide_resources
from cluster.ray.controller_actor import ControllerActor
from penstock.config import RouterConfig, ServeConfig, WorkerConfig, parse
from penstock.rpc.secret import ADMIN, PEER, ClusterSecret
from penstock.types import WorkerId
from tests.support.key_files import replace, write_secret

OLD, NEW = ClusterSecret("o" * 40), ClusterSecret("n" * 40)


@pytest.fixture(name="actor")
def _actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControllerActor:
    context = SimpleNamespace(current_actor=None, get_node_id=lambda: "node", was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "remote", lambda kind: kind)
    config = parse(ServeConfig, {"model": "m", "lookaside": True, "security": write_secret(tmp_path / "secret", OLD)})
    shares = divide_resources(config, num_cores=2.0)
    return ControllerActor(config.model_dump(mode="json"), shares, "", True, str(tmp_path / "token"))


def test_actor_configurations_name_the_secret_file_and_hold_no_secret(actor: ControllerActor, tmp_path: Path) -> None:
    actor._admin_address = "127.0.0.1:1"
    kinds = {
        "prefill-0": WorkerConfig,
        "decode-0": WorkerConfig,
        "decode-spare-0": WorkerConfig,
        "router-0": RouterConfig,
    }
    for name, kind in kinds.items():
        spec = actor._spec(Incarnation(WorkerId(name), 0), actor._config)
        text = json.dumps(spec.config)
        for hidden in (OLD.reveal(), OLD.token(PEER), OLD.token(ADMIN)):
            assert hidden not in text
        assert parse(kind, spec.config).security.secret_file == str(tmp_path / "secret")


async def test_a_new_secret_is_an_event_and_makes_a_new_admin_token(actor: ControllerActor, tmp_path: Path) -> None:
    events = EventLog(time.time)
    actor._controller = SimpleNamespace(events=events)  # type: ignore[assignment]
    actor._admin = SimpleNamespace()  # type: ignore[assignment]
    actor._leave_token()
    token = tmp_path / "token"
    assert token.read_text() == OLD.token(ADMIN)
    (files,) = actor._trust.watcher.files
    for text in ("short", NEW.reveal()):
        replace(tmp_path / "secret", text)
        assert files.refresh()
        actor._on_key_file(files)
    assert token.read_text() == NEW.token(ADMIN)
    refused, read = events.after(0)
    assert (refused.subject, refused.what) == ("security.secret_file", "keys refused")
    assert "has 5 characters" in refused.reason
    assert (read.subject, read.what, read.reason) == ("security.secret_file", "keys read again", "")
