"""Calls to the model: the client of the flags, and errors in the words of the command line."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cluster.cli.options import check_address, client_tls
from penstock.errors import PenstockError, Unauthenticated

if TYPE_CHECKING:
    from penstock.client.sync_client import Client

_CONNECT_S = 5.0  # a person waits, perhaps at a wrong address


@contextlib.contextmanager
def open_client(arguments: Namespace) -> Iterator[Client]:
    """Yields a client for the flags of `options.add_client_options`. Raises PenstockError that says what to do."""
    from penstock.client.retry import RetryPolicy
    from penstock.client.sync_client import Client  # most commands call the Admin service and need no client

    check_address("--server", arguments.server, "localhost:50051")
    client = Client(
        arguments.server,
        timeout_s=arguments.timeout,
        retry=RetryPolicy(connect_s=_CONNECT_S),
        api_key=arguments.api_key,
        tls=client_tls(arguments),
        lookaside=arguments.lookaside,
    )
    with client:
        try:
            yield client
        except Unauthenticated as error:
            raise with_key_advice(error, arguments.server) from error


def with_key_advice(error: PenstockError, server: str) -> PenstockError:
    """Returns the error; if it asks for an API key, with the server that does and the way to give one."""
    if not isinstance(error, Unauthenticated):
        return error
    return Unauthenticated(f"{error.message} (--api-key or PENSTOCK_API_KEY gives it to {server})")
