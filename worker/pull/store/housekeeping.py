"""Lists the shared store, so that workers learn what others have written, and keeps its size within its bound.

It runs on one thread. Listing takes at most a twentieth of the time, and also serves as the trial of a store that has
failed. Every worker lists the folder of its own layout; the one with the lease lists the whole store and deletes what
exceeds the bound. The clocks of the hosts need not agree exactly, because two sweeps at once choose the same objects.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from penstock.types import PageHash
from worker.pull.store.backends.object_store import StoredObject
from worker.pull.store.object_format import ROOT_FOLDER, RunFormat
from worker.pull.store.store_threads import StoreThreads
from worker.pull.store.sweep_policy import SweepLease, plan_sweep

log = logging.getLogger(__name__)

_MAX_KNOWN = 500_000  # most objects that a worker remembers: about 50 MB
_LISTING_SHARE = 20.0  # a listing is followed by a pause of at least this many times its duration
_LEASE_NAME = f"{ROOT_FOLDER}/sweep.lease"
_LEASE_BYTES = 1024
_LEASE_INTERVALS = 3.0


@dataclass(frozen=True, slots=True)
class Listing:
    """The contents of the store when a listing began."""

    folder: str
    begun_s: float  # monotonic
    known: frozenset[PageHash]  # last pages of the objects of this folder
    num_bytes: int | None = None  # in the whole store; None: another worker has the lease
    num_deleted: int = 0


class Housekeeping:
    """Owns the thread."""

    def __init__(
        self,
        threads: StoreThreads,
        owner: str,
        max_bytes: int,
        interval_s: float,
        form: Callable[[], RunFormat],
        on_listed: Callable[[Listing], None],
    ) -> None:
        """`owner` is unique among all processes; `form` may be called from any thread; `on_listed` is called on the
        thread."""
        self._threads = threads
        self._owner = owner
        self._max_bytes = max_bytes
        self._interval_s = interval_s
        self._form = form
        self._on_listed = on_listed
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shared store listing", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Lets the thread end, without waiting for storage that may hang."""
        self._closing.set()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            begun_s = time.monotonic()
            if self._threads.allows_trial():
                self._threads.call("listing the shared store", self._list, is_long=True)
            pause_s = max(self._interval_s, _LISTING_SHARE * (time.monotonic() - begun_s))

    def _list(self) -> None:
        begun_s, folder = time.monotonic(), self._form().folder
        if not self._take_lease():
            self._on_listed(Listing(folder, begun_s, _names(list(self._threads.store.list(folder)), folder)))
            return
        objects = [each for each in self._threads.store.list(ROOT_FOLDER) if each.name != _LEASE_NAME]
        plan = plan_sweep(objects, self._max_bytes, time.time())
        for each in plan.deleted:
            if self._closing.is_set():
                return
            self._threads.store.delete(each.name)
        if plan.deleted:
            log.info("deleted %d objects of the shared store, %d bytes remain", len(plan.deleted), plan.num_bytes)
        known = _names(objects, folder) - _names(plan.deleted, folder)
        self._on_listed(Listing(folder, begun_s, known, plan.num_bytes, len(plan.deleted)))

    def _take_lease(self) -> bool:
        """Returns whether this worker sweeps, and renews its lease."""
        store, now_s, lease_s = self._threads.store, time.time(), _LEASE_INTERVALS * self._interval_s
        lease = _read_lease(store.get(_LEASE_NAME, _LEASE_BYTES))
        if lease is not None and not lease.allows(self._owner, now_s, lease_s):
            return False
        store.put(_LEASE_NAME, (msgpack.packb({"owner": self._owner, "until_s": now_s + lease_s}),))
        lease = _read_lease(store.get(_LEASE_NAME, _LEASE_BYTES))
        return lease is not None and lease.owner == self._owner


def _read_lease(content: memoryview | None) -> SweepLease | None:
    if content is None:
        return None
    try:
        fields = msgpack.unpackb(content)
        return SweepLease(str(fields["owner"]), float(fields["until_s"]))
    except (ValueError, KeyError, TypeError, msgpack.UnpackException):
        return None  # an unreadable lease counts as none, and whoever reads it takes it


def _names(objects: list[StoredObject], folder: str) -> frozenset[PageHash]:
    """Returns the hashes that name objects of a folder, at most as many as a worker remembers."""
    found: set[PageHash] = set()
    for each in objects:
        if len(found) >= _MAX_KNOWN:
            break
        if each.name.startswith(f"{folder}/") and not each.is_partial:
            try:
                found.add(PageHash(bytes.fromhex(each.name.rpartition("/")[2])))
            except ValueError:
                continue  # not an object of this format
    return frozenset(found)
