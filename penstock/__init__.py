"""Penstock's shared vocabulary and public client: `from penstock import AsyncClient, Chat, Client`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.client.async_client import AsyncClient
    from penstock.client.chat import Chat
    from penstock.client.sync_client import Client

__all__ = ["AsyncClient", "Chat", "Client"]


def __getattr__(name: str) -> object:
    # Imported on first use, because the engine imports this package for its types and must not need gRPC.
    if name == "Client":
        from penstock.client.sync_client import Client

        return Client
    if name == "AsyncClient":
        from penstock.client.async_client import AsyncClient

        return AsyncClient
    if name == "Chat":
        from penstock.client.chat import Chat

        return Chat
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
