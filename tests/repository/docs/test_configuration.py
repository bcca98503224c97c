"""Tests that docs/configuration.md matches penstock/config."""

from __future__ import annotations

from penstock.config import RouterConfig, ServeConfig, WorkerConfig
from tests.support.repository import configuration


def test_the_reference_is_current() -> None:
    assert configuration.FILE.read_text() == configuration.render()


def test_every_key_has_a_meaning() -> None:
    for model, _ in configuration.SECTIONS:
        meanings = configuration.meanings_of(model)
        for key in model.model_fields:
            meaning = meanings.get(key, "")
            assert meaning.endswith("."), f"{model.__name__}.{key} is described as {meaning!r}; write a sentence"


def test_every_section_that_a_file_can_hold_is_listed() -> None:
    listed = {model for model, _ in configuration.SECTIONS}
    text = configuration.render()
    for root in (ServeConfig, RouterConfig, WorkerConfig):
        assert root in listed
        for key in root.model_fields:
            assert f"| `{key}` |" in text
    assert "](#" in text
    targets = {part.split(")")[0] for part in text.split("](#")[1:]}
    assert targets <= {model.__name__.lower() for model in listed}
