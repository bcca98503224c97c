"""Distinguishes pages that all requests share from those of one tenant."""

from __future__ import annotations

from collections.abc import Callable

from penstock.kv.page_texts import PageText
from penstock.rpc.secret import ClusterSecret, ClusterSecrets
from penstock.rpc.ticket import page_salt


class SharedScope:
    """Knows the salts of requests without a tenant."""

    def __init__(self, model_revision: str, secrets: Callable[[], ClusterSecrets | None]) -> None:
        self._model_revision = model_revision
        self._secrets = secrets

    def extra_key(self, text: PageText) -> str | None:
        """Returns the name of a text's scope, or None if every request may share the text.

        Published like a cache salt of vLLM, it keeps other routers from counting on another tenant's pages. It is a
        MAC where the deployment has a secret, so it does not name the tenant.
        """
        adapter, known = text.adapter.revision if text.adapter else "", self._secrets()
        accepted: tuple[ClusterSecret | None, ...] = known.accepted if known is not None else (None,)
        if any(page_salt(secret, self._model_revision, "", adapter) == text.salt for secret in accepted):
            return None
        return text.salt.hex()
