"""Tests how a gRPC call ends when its handler fails and when its client takes no status."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from penstock.errors import InvalidInput
from penstock.rpc.server import abort, typed_errors


class UnwritableContext:
    """Stands in for the context of a call whose earlier messages are stuck, so that nothing more can be sent."""

    async def abort(self, *args, **kwargs):
        raise grpc.aio.InternalError("Failed 'execute_batch': TOO_MANY_OPERATIONS")


async def test_a_call_whose_status_cannot_be_sent_ends_without_one(caplog):
    caplog.set_level(logging.INFO)
    with pytest.raises(asyncio.CancelledError):
        await abort(UnwritableContext(), InvalidInput("n", "is 0; it must be at least 1"))
    assert "is 0; it must be at least 1" in caplog.text


async def test_a_write_to_a_client_that_has_left_is_no_failure_of_the_handler(caplog):
    caplog.set_level(logging.INFO)
    with pytest.raises(asyncio.CancelledError):
        async with typed_errors(UnwritableContext()):
            raise grpc.aio.InternalError("Failed 'send_message'")
    assert "ended while it was served" in caplog.text
    assert all(record.levelno < logging.ERROR for record in caplog.records)


async def test_a_failure_of_the_handler_is_logged_with_its_cause(caplog):
    with pytest.raises(asyncio.CancelledError):
        async with typed_errors(UnwritableContext()):
            raise ValueError("a bug")
    assert "a handler failed" in caplog.text
    assert "ValueError: a bug" in caplog.text
