"""Configuration: every mistake is one line that names the file, the key, the value and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import DecodeConfig, ServeConfig, WorkerConfig, load, parse
from penstock.errors import ConfigError
from penstock.types import Role


def test_a_toml_file_reads_as_it_is_documented(tmp_path: Path) -> None:
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


def test_a_pool_may_have_an_engine_that_differs(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model = "m"\n[engine]\npage_size = 16\nnum_pages = 9\n[prefill_pool.engine]\npage_size = 64\n')
    config = load(ServeConfig, file)
    sizes = {role: config.worker_config("w", role).engine.page_size for role in Role}
    assert sizes == {Role.PREFILL: 64, Role.DECODE: 16}
    assert {config.engine_config(role).num_pages for role in (None, *Role)} == {9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model = "m"\nengin = 3', "unknown key engin = 3; remove it or mend its spelling"),
        ('model = "m"\n[engine]\npage_sise = 3', "page_sise"),
        (
            'model = "m"\n[decode]\nmax_waiting = 0',
            "decode.max_waiting = 0: Input should be greater than or equal to 1",
        ),
        ('model = "m"\n[transfer]\ntransport = "pigeon"', "transfer.transport = 'pigeon'"),
        ('model = "m"\n[decode_pool]\nreplicas = 0', "decode_pool.replicas is 0: at least 1 decode worker is needed"),
        ('model = "m"\n[decode_pool.engine]\npage_sise = 3', "page_sise"),
        ('model = "m"\n[decode_pool.engine]\ndtype = "float16"', "engine.dtype = 'float16' of one pool: KV moves"),
        ("model = ", "give a readable TOML or JSON file"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(ServeConfig, file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config file .*nowhere\.toml: .*No such file"):
        load(ServeConfig, tmp_path / "nowhere.toml")


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        DecodeConfig().max_waiting = 3  # type: ignore[misc]
