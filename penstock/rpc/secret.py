"""Holds a deployment's secret and derives keys from it. The secret never appears in a repr, an error or a log.

Each use has its own key (HMAC-SHA256 of its name), so that the token in a call's metadata reveals nothing about the key
that salts page hashes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config.security import SecurityConfig  # building its validators would cost a command 0.3 s

SECRET_BYTES = 32
PEER = "peer token"  # used between routers, workers and the controller
ADMIN = "admin token"  # used between an operator and the Admin service
STORE_OBJECTS = "shared kv store"  # used by workers for what they write into a shared store


class ClusterSecret:
    def __init__(self, text: str) -> None:
        """Raises ConfigError for a secret short enough to be guessed."""
        stripped = text.strip()
        if len(stripped) < SECRET_BYTES:
            raise ConfigError(
                f"the cluster secret has {len(stripped)} characters; give at least {SECRET_BYTES} random ones, "
                "such as `openssl rand -hex 32` makes"
            )
        self._text = stripped
        self._tokens: dict[str, str] = {}  # by use

    @classmethod
    def make(cls) -> ClusterSecret:
        return cls(secrets.token_hex(SECRET_BYTES))

    def reveal(self) -> str:
        """Returns the secret itself, for the file that the deployment's processes read."""
        return self._text

    def key(self, use: str) -> bytes:
        """Returns the 32-byte key of one use."""
        return hmac.digest(self._text.encode(), use.encode(), "sha256")

    def token(self, use: str) -> str:
        """Returns the key of one use as text, for metadata."""
        token = self._tokens.get(use)
        if token is None:
            token = self._tokens[use] = self.key(use).hex()
        return token

    def __repr__(self) -> str:
        return "ClusterSecret(...)"


@dataclass(frozen=True, slots=True)
class ClusterSecrets:
    """The secret that this process presents, and all that it accepts: two while one replaces the other."""

    current: ClusterSecret
    accepted: tuple[ClusterSecret, ...]

    @classmethod
    def only(cls, secret: ClusterSecret) -> ClusterSecrets:
        return cls(secret, (secret,))

    @classmethod
    def read(cls, path: str, setting: str) -> ClusterSecrets:
        """Reads a file with one or two lines. Raises ConfigError, which never repeats a secret."""
        lines = [line for line in read_private(path, setting).splitlines() if line.strip()]
        if not 1 <= len(lines) <= 2:
            raise ConfigError(
                f"{setting} = {path}: has {len(lines)} lines; give the secret, and at most one more that is accepted "
                "while it replaces the first"
            )
        try:
            accepted = tuple(ClusterSecret(line) for line in lines)
        except ConfigError as error:
            raise ConfigError(f"{setting} = {path}: {error.message}") from None
        return cls(accepted[0], accepted)

    @classmethod
    def of(cls, config: SecurityConfig) -> ClusterSecrets | None:
        """Reads the secrets that a process is configured with, if any. Raises ConfigError."""
        return cls.read(config.secret_file, "security.secret_file") if config.secret_file else None

    def tokens(self, use: str) -> tuple[str, ...]:
        """Returns every token of one use that is accepted."""
        return tuple(secret.token(use) for secret in self.accepted)


def digest_of(key: str) -> str:
    """Returns an API key's digest as configurations hold it. Keys are random, so a fast hash is enough."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def make_api_key() -> str:
    return "psk-" + secrets.token_urlsafe(SECRET_BYTES)


def read_private(path: str, setting: str) -> str:
    """Returns a file's text. Raises ConfigError if it is unreadable, or readable by everybody on the machine."""
    try:
        mode = Path(path).stat().st_mode
        if mode & stat.S_IRWXO:
            raise ConfigError(f"{setting} = {path}: everybody may read it (mode {stat.S_IMODE(mode):o}); chmod 600 it")
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} = {path}: {error}; give a readable text file") from error


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner may read, and replaces an earlier one. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
