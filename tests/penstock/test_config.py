"""Tests configuration: every mistake is one line with the file, the key, the value and the fix."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from cluster.ray.key_files import leave_secret, remove_secret, with_absolute_paths
from penstock.config import (
    DecodeConfig,
    PoolConfig,
    PrefillConfig,
    RouterConfig,
    ServeConfig,
    WorkerConfig,
    load,
    load_process,
    parse,
)
from penstock.config.security import SecurityConfig
from penstock.config.tenants import TenantConfig
from penstock.errors import ConfigError
from penstock.rpc.secret import ClusterSecrets
from penstock.types import Lane, Role
from worker.main import make_parser, run_worker


def test_a_documented_toml_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'model = "/models/Llama"\n[prefill_pool]\nreplicas = 3\n'
        '[engine]\ndtype = "float16"\n[decode]\nplacement = "local"'
    )
    config = load(ServeConfig, file)
    assert (config.prefill_pool.replicas, config.decode_pool.replicas, config.model_name) == (3, 1, "Llama")
    worker = config.worker_config("prefill-0", Role.PREFILL)
    assert (worker.engine.model, worker.engine.dtype, worker.decode.placement) == ("/models/Llama", "float16", "local")
    assert parse(WorkerConfig, worker.model_dump(mode="json")) == worker
    assert config.router_config("localhost:1").admin == "localhost:1"


def test_a_pool_can_have_engine_settings_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model = "m"\n[engine]\npage_size = 16\nnum_pages = 9\n[prefill_pool.engine]\npage_size = 64\n')
    config = load(ServeConfig, file)
    sizes = {role: config.worker_config("w", role).engine.page_size for role in Role}
    assert sizes == {Role.PREFILL: 64, Role.DECODE: 16}
    assert {config.engine_config(role).num_pages for role in (None, *Role)} == {9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model = "m"\nengin = 3', "unknown key engin = 3; remove it or correct its spelling"),
        ('model = "m"\n[engine]\npage_sise = 3', "page_sise"),
        (
            'model = "m"\n[decode]\nmax_waiting = 0',
            "decode.max_waiting = 0: Input should be greater than or equal to 1",
        ),
        ('model = "m"\n[transfer]\ntransport = "pigeon"', "transfer.transport = 'pigeon'"),
        ('model = "m"\n[decode_pool]\nreplicas = 0', "decode_pool.replicas is 0: at least 1 decode worker is needed"),
        ('model = "m"\n[decode_pool.engine]\npage_sise = 3', "page_sise"),
        (
            'model = "m"\n[decode_pool.engine]\ndtype = "float16"',
            "engine.dtype = 'float16' is set for one pool, but KV moves",
        ),
        ('model = "m"\n[prefill_pool.engine]\nquantization = "int8"', "engine.quantization = 'int8' is set for one"),
        (
            'model = "m"\n[security.tls]\ncert_file = "c"\nkey_file = "k"',
            "security.tls.ca_file is missing; both ends present a certificate here, so name",
        ),
        ('model = "m"\n[prefill_pool]\nreplicas = 1\nmin_replicas = 2', "replicas = 1 is not within min_replicas = 2"),
        ('model = "m"\n[prefill_pool]\nreplicas = 3\nmax_replicas = 2', "is not within min_replicas = 1 and max_repl"),
        ('model = "m"\n[decode_pool]\nmin_replicas = 0', "decode_pool.min_replicas is 0: at least 1 decode worker"),
        ('model = "m"\nrouters = 3\nmetrics_ports = [1, 2]', "metrics_ports holds 2 ports, but routers = 3"),
        ('model = "m"\n[prefill.reserved]\nbulk = -0.1', "prefill.reserved = {'bulk': -0.1} are not shares of a step"),
        ('model = "m"\n[prefill.reserved]\nbulk = 0.6\nstandard = 0.5', "give each 0 or more, and 1 at most together"),
        ('model = "m"\n[engine]\ndisk_bytes = 9\ndisk_path = "d"', "engine.host_memory_bytes is 0; set it too"),
        (
            'model = "m"\n[engine]\nhost_memory_bytes = 9\ndisk_bytes = 9',
            "engine.disk_bytes = 9 and engine.disk_path = None; set both or neither",
        ),
        (
            'model = "m"\nadapters = {sql = "/a"}',
            "adapters names 1, but engine.max_adapters of prefill workers is 0; give the number of adapters",
        ),
        (
            'model = "m"\n[keeper]\n[decode_pool]\nnum_gpus = 1',
            "keeper keeps the memory of CPU workers of one rank, but decode workers have num_gpus = 1 and tensor_par",
        ),
        (
            'model = "m"\nadapters_file = "a"',
            "adapters_file is set, but engine.max_adapters of prefill workers is 0; give the number",
        ),
        ('model = "m"\naddress = "auto"', "security.secret_file is missing: with address, workers on other machines"),
        ("model = ", "give a readable TOML or JSON file"),
    ],
)
def test_mistakes_are_refused_by_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(ServeConfig, file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_settings_at_their_limits_are_accepted() -> None:
    pool = PoolConfig(replicas=2, min_replicas=2, max_replicas=2)
    config = ServeConfig(model="m", prefill_pool=pool, routers=2, metrics_ports=(1, 2))
    assert (config.prefill_pool.lowest, config.prefill_pool.highest) == (2, 2)
    assert ServeConfig(model="m", prefill_pool=PoolConfig(replicas=0)).prefill_pool.lowest == 0
    assert parse(PrefillConfig, {"reserved": {"bulk": 0.5, "standard": 0.5}}).reserved[Lane.BULK] == 0.5
    assert parse(SecurityConfig, {"tls": {"cert_file": "c", "key_file": "k", "ca_file": "a"}}).tls is not None
    assert parse(TenantConfig, {"lane": "bulk", "max_lane": "bulk"}).lane is Lane.BULK


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config file .*nowhere\.toml: .*No such file"):
        load(ServeConfig, tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("settings", "sequences", "tokens"),
    [
        ({}, 256, 512),
        ({"max_batch_sequences": 64}, 64, 512),
        ({"max_batch_tokens": 200}, 200, 200),
        ({"max_batch_sequences": 1000, "max_batch_tokens": 1000}, 1000, 1000),
        ({"max_batch_sequences": 64, "max_batch_tokens": 256}, 64, 256),
    ],
)
def test_a_gpu_decodes_larger_batches_unless_they_are_set(
    settings: dict[str, int], sequences: int, tokens: int
) -> None:
    config = parse(DecodeConfig, settings).on_gpu()
    assert (config.max_batch_sequences, config.max_batch_tokens) == (sequences, tokens)
    assert parse(DecodeConfig, config.model_dump(mode="json")).on_gpu() == config


@pytest.mark.parametrize(("device", "has_gpu"), [("cpu", False), ("cuda:1", True), ("auto", True), ("auto", False)])
def test_a_plain_worker_takes_the_defaults_of_its_device(
    device: str, has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    file = tmp_path / "worker.toml"
    file.write_text(f'worker_id = "w"\nrole = "decode"\nengine = {{model = "m", device = "{device}"}}\n')
    monkeypatch.setattr("sys.argv", ["decode_worker", "--config", str(file)])
    found: list[WorkerConfig] = []

    async def serve(config: WorkerConfig, _: object) -> int:
        found.append(config)
        return 0

    assert run_worker(make_parser(), serve) == 0
    assert found[0].decode.max_batch_sequences == (256 if has_gpu else 64)


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        DecodeConfig().max_waiting = 3  # type: ignore[misc]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_secret(host: str) -> None:
    assert (
        parse(WorkerConfig, {"worker_id": "w", "role": "decode", "engine": {"model": "m"}, "host": host}).host == host
    )
    assert parse(RouterConfig, {"model": "m", "host": "0.0.0.0", "peer_host": host}).peer_host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-1.internal", ""])
def test_beyond_loopback_a_process_without_credentials_is_refused(host: str) -> None:
    worker = {"worker_id": "w", "role": "decode", "engine": {"model": "m"}, "host": host}
    router = {"model": "m", "peer_host": host}
    for kind, data, key in ((WorkerConfig, worker, "host"), (RouterConfig, router, "peer_host")):
        with pytest.raises(ConfigError) as caught:
            parse(kind, data)
        message = caught.value.message
        assert f"{key} = {host!r} is beyond loopback, and without a secret anybody who reaches it" in message
        assert "set security.secret_file, or listen on 127.0.0.1" in message
        assert "security.insecure = true" in message
        tls = {"cert_file": "c", "key_file": "k", "ca_file": "a"}
        for security in ({"secret_file": "s"}, {"tls": tls}, {"insecure": True}):
            parse(kind, {**data, "security": security})


def test_a_processs_own_settings_override_a_shared_file(tmp_path: Path) -> None:
    file = tmp_path / "router.json"
    file.write_text('{"model": "m", "admin": "head:1", "peer_host": "10.0.0.1"}')
    config = load_process(RouterConfig, file, "secret", {"peer_host": "10.0.0.2"})
    assert (config.peer_host, config.admin, config.security.secret_file) == ("10.0.0.2", "head:1", "secret")


@pytest.mark.parametrize("module", ["worker.main", "router.__main__"])
def test_a_plain_process_without_a_secret_ends_before_it_loads_anything(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line may give the secret's file, after the configuration."""
    engine = '{"model": "nowhere"}'
    worker = f'{{"worker_id": "w", "role": "decode", "engine": {engine}, "host": "0.0.0.0"}}'
    file = tmp_path / "process.json"
    file.write_text(worker if module == "worker.main" else '{"model": "nowhere", "peer_host": "0.0.0.0"}')
    main = importlib.import_module(module).main
    arguments = (lambda config: pytest.fail("it was made"),) if module == "worker.main" else ()
    monkeypatch.setattr("sys.argv", ["penstock", "--config", str(file)])
    assert main(*arguments) == 2
    assert "security.insecure = true" in capsys.readouterr().err
    config = WorkerConfig if module == "worker.main" else RouterConfig
    assert load_process(config, file, "secret").security.secret_file == "secret"


def test_key_files_have_the_same_path_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors have working directories of their own. Links are not resolved, because mounted secrets change through
    them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    tls = {"cert_file": "link/c", "key_file": "/k", "ca_file": "a"}
    found = with_absolute_paths(
        parse(
            ServeConfig,
            {
                "model": "m",
                "security": {"secret_file": "~/secret", "tls": tls},
                "tls": {"cert_file": "c", "key_file": "k"},
                "tenants_file": "tenants.toml",
                "router": {"metrics_token_file": "token"},
            },
        )
    )
    assert found.security.secret_file == f"{tmp_path}/home/secret"
    assert found.security.tls is not None
    assert found.tls is not None
    assert (found.security.tls.cert_file, found.security.tls.key_file) == (f"{tmp_path}/link/c", "/k")
    assert (found.tls.cert_file, found.tls.ca_file) == (f"{tmp_path}/c", "")
    router = found.router_config()
    assert (router.tenants_file, router.metrics_token_file) == (f"{tmp_path}/tenants.toml", f"{tmp_path}/token")
    assert router.security == found.security
    nothing = parse(ServeConfig, {"model": "m"})
    assert with_absolute_paths(nothing) == nothing


def test_a_deployment_without_a_secret_creates_one_for_its_own_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = leave_secret(50052)
    assert path == tmp_path / "penstock" / "secret-50052"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    first = ClusterSecrets.read(str(path), "x").current.reveal()
    assert leave_secret(50052) == path
    assert ClusterSecrets.read(str(path), "x").current.reveal() != first
    remove_secret(path)
    assert not path.exists()
    (tmp_path / "penstock").rmdir()
    (tmp_path / "penstock").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written .*; set XDG_STATE_HOME, or make a secret"):
        leave_secret(50052)
