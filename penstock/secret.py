"""A deployment's secret, and the keys that are made of it. Nothing here shows it: not repr, not an error, not a log.

Each use has a key of its own (HMAC-SHA256 of its name), so that what travels in a call's metadata says nothing about
the key that salts page hashes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import ConfigError
from penstock.security_config import SecurityConfig

SECRET_BYTES = 32


class ClusterSecret:
    def __init__(self, text: str) -> None:
        """Raises ConfigError for one that is too short to be unguessable."""
        stripped = text.strip()
        if len(stripped) < SECRET_BYTES:
            raise ConfigError(
                f"the cluster secret has {len(stripped)} characters; give at least {SECRET_BYTES} random ones, "
                "such as `openssl rand -hex 32` makes"
            )
        self._text = stripped

    @classmethod
    def make(cls) -> ClusterSecret:
        return cls(secrets.token_hex(SECRET_BYTES))

    @classmethod
    def of(cls, config: SecurityConfig) -> ClusterSecret | None:
        """Of a process's configuration; None where there is none. Raises ConfigError."""
        if config.secret is not None:
            return cls(config.secret.get_secret_value())
        return cls(read_private(config.secret_file, "security.secret_file")) if config.secret_file else None

    def reveal(self) -> str:
        """For handing it on to a process of the same deployment."""
        return self._text

    def key(self, use: str) -> bytes:
        """32 bytes for one use alone."""
        return hmac.digest(self._text.encode(), use.encode(), "sha256")

    def token(self, use: str) -> str:
        """The same as text, for metadata."""
        return self.key(use).hex()

    def __repr__(self) -> str:
        return "ClusterSecret(...)"


def with_secret(config: Mapping[str, object], secret: ClusterSecret) -> dict[str, object]:
    """A configuration as plain data, which never holds the secret, for a process that shall have it."""
    security = config["security"]
    assert isinstance(security, Mapping)
    return {**config, "security": {**security, "secret": secret.reveal()}}


def digest_of(key: str) -> str:
    """What a configuration holds of an API key. A key is random, hence one round of a fast hash is enough."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def make_api_key() -> str:
    return "psk-" + secrets.token_urlsafe(SECRET_BYTES)


def read_private(path: str, setting: str) -> str:
    """A file's text. Raises ConfigError where it cannot be read, or everybody on the machine can read it."""
    try:
        mode = Path(path).stat().st_mode
        if mode & stat.S_IRWXO:
            raise ConfigError(f"{setting} = {path}: everybody may read it (mode {stat.S_IMODE(mode):o}); chmod 600 it")
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} = {path}: {error}; give a readable text file") from error
