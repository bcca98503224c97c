"""Tests that docs/reference/ matches the code, and that every kind of entry is in it."""

from __future__ import annotations

import pytest

from tests.support.repository.reference import grpc_page, http_page, python_page
from tests.support.repository.reference.__main__ import stale_pages


def test_the_pages_are_current() -> None:
    assert not stale_pages(), "run `python -m tests.support.repository.reference --write`"


def test_every_http_call_is_described() -> None:
    operations = [each for of in http_page.document()["paths"].values() for each in of.values()]
    assert operations
    assert [each["summary"] for each in operations if not each.get("description")] == []


@pytest.mark.parametrize(
    "part",
    [
        "### Inference (service)",
        "### Admin (service)",
        "| `Generate` | [GenerateRequest](#generaterequest) | stream of [GenerateResponse](#generateresponse) |",
        "| `shares` | 4 | map of string to double |",
        "| `text` | 2 | string, optional |",
        "| `token_ids` | 3 | list of uint32 |",
    ],
)
def test_services_messages_and_comments_come_from_the_protos(part: str) -> None:
    assert part in grpc_page.render()


def test_signatures_and_docstrings_come_from_the_client() -> None:
    page = python_page.render()
    assert "    timeout_s: float | None = None," in page
    assert "### Client.list_models" in page
    assert "| `InvalidInput` |" in page
    assert "_begin" not in page
