"""Tests that the blocking client equals what its generator makes from the asyncio client."""

from __future__ import annotations

import ast

import pytest

from tests.support.repository.blocking_client import CLIENT, FILES, rewrite, stale


def test_the_blocking_client_is_current() -> None:
    assert stale() == [], "run `make client`"


@pytest.mark.parametrize("name", FILES.values())
def test_a_generated_file_has_the_header_and_no_async_code(name: str) -> None:
    text = (CLIENT / name).read_text()
    assert text.startswith("# Generated from penstock/client/async_")
    kinds = {type(node) for node in ast.walk(ast.parse(text))}
    assert kinds.isdisjoint({ast.Await, ast.AsyncFunctionDef, ast.AsyncWith, ast.AsyncFor})


def test_the_rewriter_drops_async_code_restores_sync_code_and_renames() -> None:
    source = '''"""The public client for asyncio."""

import asyncio  # async only


class AsyncClient:
    """Leave its `async with` block."""

    # sync only: @property
    async def answer(self) -> int:
        async for part in aiter(self):
            await part()
        return await anext(self)

    async def gone(self) -> None:  # async only
        await asyncio.sleep(1)
'''
    assert (
        rewrite(source, "x.py").partition("\n")[2]
        == '''"""The blocking public client."""


class Client:
    """Leave its `with` block."""

    @property
    def answer(self) -> int:
        for part in iter(self):
            part()
        return next(self)
'''
    )
