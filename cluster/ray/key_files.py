"""Locates the key files that a deployment's processes read, and makes their paths valid in every process.

Ray stores and logs an actor's arguments, so configurations name these files and no key is ever an argument.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from penstock.config import ServeConfig
from penstock.config.security import TlsConfig
from penstock.errors import ConfigError
from penstock.rpc.secret import ClusterSecret, write_private


def secret_file(port: int, environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the path of the secret of the deployment whose Admin service listens on `port`.

    The file must outlast the login session, as replaced workers read it for as long as the deployment runs.
    """
    base = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base, "penstock", f"secret-{port}")


def leave_secret(port: int) -> Path:
    """Creates a secret in a file that only its owner can read. Raises ConfigError."""
    path = secret_file(port)
    try:
        write_private(path, ClusterSecret.make().reveal())
    except OSError as error:
        raise ConfigError(
            f"security.secret_file is missing, and {path} cannot be written ({error.strerror}); set XDG_STATE_HOME, or "
            "make a secret with `openssl rand -hex 32` and name its file"
        ) from error
    return path


def remove_secret(path: Path) -> None:
    with contextlib.suppress(OSError):  # an old token opens nothing any more
        path.unlink(missing_ok=True)


def with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """Returns `config` with absolute paths of key files and "~" expanded, because every actor has its own working
    directory.

    Symbolic links are kept, since mounted secrets are updated through them.
    """
    security = config.security
    security = security.model_copy(
        update={"secret_file": _absolute(security.secret_file), "tls": _absolute_tls(security.tls)}
    )
    router = dict(config.router)
    if token := router.get("metrics_token_file"):
        router["metrics_token_file"] = _absolute(str(token))
    return config.model_copy(
        update={
            "security": security,
            "tls": _absolute_tls(config.tls),
            "tenants_file": _absolute(config.tenants_file),
            "adapters_file": _absolute(config.adapters_file),
            "router": router,
        }
    )


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _absolute_tls(tls: TlsConfig | None) -> TlsConfig | None:
    if tls is None:
        return None
    paths = {name: _absolute(getattr(tls, name)) for name in ("cert_file", "key_file", "ca_file")}
    return tls.model_copy(update=paths)
