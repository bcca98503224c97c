"""The controller's record in Ray's own key-value store, which lives as long as the cluster does.

Written by one thread, always the newest record: the head may be away, and the controller goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from cluster.record import Record

log = logging.getLogger(__name__)

_KEY = b"penstock:controller"
_NAMESPACE = b"penstock"
_RETRY_S = 1.0


async def load_record() -> Record | None:
    """What an earlier controller left; None: there was none."""
    data = await asyncio.to_thread(_internal_kv_get, _KEY, namespace=_NAMESPACE)
    return Record.from_json(data) if data else None


class RecordWriter:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest: Record | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._write_for_ever, name="record", daemon=True)
        self._thread.start()

    def save(self, record: Record) -> None:
        with self._changed:
            self._newest = record
            self._changed.notify()

    def _write_for_ever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._closed)
                if self._closed:
                    return
                record, self._newest = self._newest, None
            assert record is not None
            try:
                _internal_kv_put(_KEY, record.to_json(), overwrite=True, namespace=_NAMESPACE)
            except Exception as error:  # whatever Ray raises while its head is away
                log.warning("the controller's record was not written, it is tried again: %s", type(error).__name__)
                with self._changed:
                    self._newest = self._newest or record
                    self._changed.wait_for(lambda: self._closed, _RETRY_S)

    async def delete(self) -> None:
        """The deployment is over. Nothing is written any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        await asyncio.to_thread(_internal_kv_del, _KEY, namespace=_NAMESPACE)
