"""Where `penstock serve` leaves the Admin service's token for `penstock status` and `stop` on the same account.

One file a port, readable by its owner alone, gone when the deployment ends. It holds a token that opens the Admin
service and nothing else; the cluster secret, of which it is made, stays in the processes' memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)


def token_file(port: int, environment: Mapping[str, str] = os.environ) -> Path:
    base = environment.get("XDG_RUNTIME_DIR") or environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "penstock", f"admin-{port}.token")


def leave_token(port: int, token: str) -> None:
    """Replaces what an earlier deployment left there. Where it cannot, says how to do without."""
    path = token_file(port)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
    except OSError as error:
        log.warning("%s: %s; `penstock status` and `stop` need --secret-file, and security.secret_file", path, error)


def find_token(address: str) -> str:
    """Empty where none was left for this address, or it is another machine's."""
    host, _, port = address.rpartition(":")
    if host not in ("localhost", "127.0.0.1", "[::1]") or not port.isdecimal():
        return ""
    try:
        return token_file(int(port)).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def remove_token(port: int) -> None:
    with contextlib.suppress(OSError):  # a token of no deployment opens nothing
        token_file(port).unlink(missing_ok=True)
