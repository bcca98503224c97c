"""Stores the controller's record in Ray's own key-value store, which lives as long as the cluster does.

One thread always writes the newest record, so that the controller continues while the head is down.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from cluster.controller.record import ControllerRecord

log = logging.getLogger(__name__)

_KEY = b"penstock:controller"
_NAMESPACE = b"penstock"
_RETRY_S = 1.0
_FLUSH_TIMEOUT_S = 5.0


async def load_record() -> ControllerRecord | None:
    """Returns the record that an earlier controller left, if any."""
    data = await asyncio.to_thread(_internal_kv_get, _KEY, namespace=_NAMESPACE)
    return ControllerRecord.from_json(data) if data else None


class RecordWriter:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest: ControllerRecord | None = None
        self._is_writing = False
        self._closed = False
        self._thread = threading.Thread(target=self._write_forever, name="record", daemon=True)
        self._thread.start()

    def save(self, record: ControllerRecord) -> None:
        with self._changed:
            self._newest = record
            self._changed.notify_all()

    def _write_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._closed)
                if self._closed:
                    return
                record, self._newest = self._newest, None
                self._is_writing = True
            assert record is not None
            try:
                _internal_kv_put(_KEY, record.to_json(), overwrite=True, namespace=_NAMESPACE)
            except Exception as error:  # Ray raises various types while its head is down
                log.warning("the controller's record was not written and will be retried: %s", type(error).__name__)
                with self._changed:
                    self._newest = self._newest or record
                    self._is_writing = False
                    self._changed.wait_for(lambda: self._closed, _RETRY_S)
                continue
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()

    async def flush(self) -> None:
        """Returns once the newest record is written, or after `_FLUSH_TIMEOUT_S`."""
        await asyncio.to_thread(self._wait_written)

    def _wait_written(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._newest is None and not self._is_writing, _FLUSH_TIMEOUT_S):
                log.warning("the controller's newest record was not written within %g s", _FLUSH_TIMEOUT_S)

    async def delete(self) -> None:
        """Deletes the record of a deployment that is over, and writes none from then on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        await asyncio.to_thread(_internal_kv_del, _KEY, namespace=_NAMESPACE)
