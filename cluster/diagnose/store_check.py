"""Checks that the shared store of a configuration can be written, read and deleted from this machine."""

from __future__ import annotations

import secrets
import time
from urllib.parse import urlsplit

from cluster.diagnose.findings import Finding, Severity
from penstock.config import KvStoreConfig
from penstock.errors import ConfigError
from worker.pull.store.backends.object_store import ObjectStore
from worker.pull.store.backends.opening import open_store
from worker.pull.store.object_format import ROOT_FOLDER

_CHECK = "kv store"
_BYTES = 4 << 20
_ADVICE = "workers would compute every prompt; give this user access, or another kv_store.url"


def check_store(config: KvStoreConfig) -> Finding:
    """Writes an object of 4 MiB, reads it back and deletes it. Blocks for as long as the storage takes."""
    subject = config.url
    try:
        store = open_store(config)
        write_s, read_s, is_right = _try_out(store)
    except ConfigError as error:
        return Finding(_CHECK, subject, Severity.PROBLEM, error.message, _ADVICE)
    except Exception as error:  # what libraries of storage raise when a call fails
        return Finding(_CHECK, subject, Severity.PROBLEM, f"{type(error).__name__}: {error}", _ADVICE)
    if not is_right:
        return Finding(_CHECK, subject, Severity.PROBLEM, "an object does not read back as it was written", _ADVICE)
    text = f"4 MiB written in {write_s * 1e3:.0f} ms, read in {read_s * 1e3:.0f} ms"
    if max(write_s, read_s) > config.timeout_s:
        advice = "raise kv_store.timeout_s, or use faster storage"
        return Finding(_CHECK, subject, Severity.WARNING, f"{text}, more than kv_store.timeout_s", advice)
    if urlsplit(config.url).scheme == "memory":
        advice = "name a folder or a bucket that outlives it"
        return Finding(_CHECK, subject, Severity.WARNING, f"{text}, in the memory of each process", advice)
    return Finding(_CHECK, subject, Severity.OK, text)


def _try_out(store: ObjectStore) -> tuple[float, float, bool]:
    """Returns the seconds of a write and of a read, and whether the read was right."""
    name, content = f"{ROOT_FOLDER}/doctor/{secrets.token_hex(8)}", secrets.token_bytes(_BYTES)
    begun_s = time.monotonic()
    store.put(name, (content,))
    written_s = time.monotonic()
    found = store.get(name, _BYTES + 1)
    read_s = time.monotonic()
    store.delete(name)
    return written_s - begun_s, read_s - written_s, found is not None and bytes(found) == content
