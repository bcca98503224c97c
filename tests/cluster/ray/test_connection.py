"""Tests how an embedded Ray is started if its daemons do not come up, with a double of `ray.init`."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import ray
from ray._private import services

from cluster.diagnose import ray_checks
from cluster.diagnose.findings import Severity
from cluster.ray import connection
from cluster.ray.connection import connect, disconnect, protect_token
from penstock.config import ServeConfig
from penstock.errors import ConfigError

pytestmark = pytest.mark.processes

MODEL = str(Path(__file__).resolve().parents[3] / "models" / "penstock-tiny")
TIMEOUT = "Timed out waiting for file /tmp/ray/session/gcs_server_port"


class RayDouble:
    """Starts a child process at each `init` and raises the given errors, one for each call, before it succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.children: list[psutil.Process] = []
        self.waits: list[str] = []
        self.addresses: list[str] = []

    def init(self, **given: object) -> None:
        self.addresses.append(services.resolve_ip_for_localhost(str(given["_node_ip_address"])))
        self.waits.append(os.environ["RAY_gcs_server_port_wait_time_s"])  # noqa: SIM112 - the name is Ray's
        self.children.append(psutil.Process(subprocess.Popen(["sleep", "600"]).pid))
        if self.errors:
            raise self.errors.pop(0)


def embedded_config() -> ServeConfig:
    return ServeConfig(model=MODEL, engine={"device": "cpu"})


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(connection, "_EXIT_TIMEOUT_S", 0.1)  # this shutdown ends no process, however long it waits
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "1")


def test_a_ray_that_does_not_come_up_is_ended_and_started_once_more(
    monkeypatch: pytest.MonkeyPatch, no_ray: None
) -> None:
    double = RayDouble(RuntimeError(TIMEOUT))
    monkeypatch.setattr(ray, "init", double.init)

    shares, daemons = connect(embedded_config())

    first, second = double.children
    try:
        assert not is_running(first)
        assert is_running(second)
        assert daemons == [second]
        assert shares
        assert double.waits == ["30", "60"]
        assert double.addresses == ["127.0.0.1"] * 2  # as Ray reads them: it listens beyond loopback otherwise
    finally:
        second.kill()


def test_the_second_failure_is_raised_and_no_process_is_left(monkeypatch: pytest.MonkeyPatch, no_ray: None) -> None:
    double = RayDouble(RuntimeError(TIMEOUT), RuntimeError(TIMEOUT))
    monkeypatch.setattr(ray, "init", double.init)

    with pytest.raises(RuntimeError, match="Timed out waiting"):
        connect(embedded_config())

    assert len(double.children) == 2
    assert not any(is_running(child) for child in double.children)


def test_an_impatient_ctrl_c_leaves_no_daemon_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "shutdown", interrupted)
    children = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["true"])]
    daemons = [psutil.Process(child.pid) for child in children]
    children[1].wait(60)  # it ended by itself meanwhile
    with pytest.raises(KeyboardInterrupt):
        disconnect(daemons)
    assert children[0].wait(60) == -signal.SIGKILL


def test_another_error_is_not_retried(monkeypatch: pytest.MonkeyPatch, no_ray: None) -> None:
    double = RayDouble(RuntimeError("Maybe you called ray.init twice by accident?"))
    monkeypatch.setattr(ray, "init", double.init)

    with pytest.raises(RuntimeError, match="by accident"):
        connect(embedded_config())

    assert len(double.children) == 1
    assert not is_running(double.children[0])


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_its_owner_can_read_rays_token(home: Path) -> None:
    """Ray itself writes the token with the account's umask, which usually lets everybody read it."""
    token = home / ".ray" / "auth_token"
    protect_token()
    made = token.read_text()
    assert (len(made), mode(token)) == (64, 0o600)
    token.chmod(0o644)
    protect_token()
    assert (token.read_text(), mode(token)) == (made, 0o600)


def test_a_configured_token_file_is_protected_and_never_created(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = home / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with pytest.raises(ConfigError, match="Ray's token must be readable by its owner alone"):
        protect_token()
    token.write_text("t" * 64)
    token.chmod(0o640)
    protect_token()
    assert (token.read_text(), mode(token)) == ("t" * 64, 0o600)


@pytest.mark.parametrize(("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "t" * 64)])
def test_no_token_is_created_if_ray_does_not_read_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    protect_token()
    assert not (home / ".ray").exists()


def test_the_doctor_finds_a_token_that_others_may_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_checks, "ray_requires_token", lambda: True)
    protect_token()
    assert ray_checks.check_ray("here")[1].severity is Severity.OK
    token = home / ".ray" / "auth_token"
    token.chmod(0o644)
    found = ray_checks.check_ray("here")[1]
    assert (found.severity, found.advice) == (Severity.PROBLEM, f"chmod 600 {token}")


def test_the_doctor_ignores_its_own_environment_for_a_running_rays_token(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The embedded Ray's processes have the setting.
    monkeypatch.setattr(ray_checks, "ray_requires_token", lambda: False)
    none_yet = ray_checks.check_installed_ray("this machine")[1]
    assert none_yet.severity is Severity.SKIPPED
    assert str(home / ".ray" / "auth_token") in none_yet.text
    protect_token()
    assert ray_checks.check_installed_ray("this machine")[1].severity is Severity.OK
    (home / ".ray" / "auth_token").chmod(0o640)
    assert ray_checks.check_installed_ray("this machine")[1].severity is Severity.PROBLEM
    assert ray_checks.check_ray("the controller's Ray")[1].severity is Severity.WARNING
