"""The file in which a deployment leaves the Admin service's token for commands of the same account.

One file a port, readable by its owner alone, written again when the cluster secret changes, and removed when the
deployment ends. The token opens the Admin service and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from penstock.rpc.secret import write_private

log = logging.getLogger(__name__)


def token_file(port: int, environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the path of the token of the deployment whose Admin service listens on `port`."""
    base = environment.get("XDG_RUNTIME_DIR") or environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "penstock", f"admin-{port}.token")


def leave_token(path: Path, token: str) -> None:
    """Writes the token over an earlier one. Logs what to do instead if the file cannot be written."""
    try:
        write_private(path, token)
    except OSError as error:
        log.warning("%s: %s; `penstock status` and `stop` need --secret-file, and security.secret_file", path, error)


def find_token(address: str) -> str:
    """Returns the token left for `address`, or "" if there is none or the address is another machine's."""
    host, _, port = address.rpartition(":")
    if host not in ("localhost", "127.0.0.1", "[::1]") or not port.isdecimal():
        return ""
    try:
        return token_file(int(port)).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def remove_token(path: Path) -> None:
    """Removes the token file, if it is there."""
    with contextlib.suppress(OSError):  # a stale token opens nothing
        path.unlink(missing_ok=True)
