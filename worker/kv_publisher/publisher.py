"""The thread and sockets that publish a worker's block events: a PUB socket, and a ROUTER socket for replays.

The thread reads the event log from where it stopped. If it falls behind the log's window it reads a snapshot instead,
which subscribers get after an event that clears their view. So the step loop never waits for it, and memory is bounded
by the log, the replay window and the sockets' queues.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping

import zmq

from penstock.config import KvPublisherConfig
from penstock.errors import ConfigError
from penstock.kv.block_events import END_SEQ, SEQ_BYTES, BlockEvent, BlocksStored, encode_batch
from penstock.kv.events import KvEventLog
from penstock.kv.page_texts import PageText
from penstock.metrics.worker_metrics import KV_EVENT_BATCHES, KV_EVENT_RESYNCS, KV_EVENT_UNNAMED_PAGES
from worker.kv_publisher.published_pages import PublishedPages
from worker.kv_publisher.replay_window import ReplayWindow

log = logging.getLogger(__name__)

_PAUSE_S = 0.01  # between two reads of the log, so that a burst of steps becomes one batch
_RETRY_S = 1.0  # after a failure
_MAX_BATCH_TOKENS = 1 << 16
_MAX_REQUEST_BYTES = 256  # of a replay request; longer ones are not read
_STOP_S = 5.0


class KvPublisher:
    """`notify` may be called from any thread; everything else by the thread that owns the worker."""

    def __init__(
        self,
        events: KvEventLog,
        config: KvPublisherConfig,
        page_size: int,
        extra_key: Callable[[PageText], str | None] = lambda text: None,
    ) -> None:
        """Starts keeping the tokens of cached pages. `extra_key` names what else, besides tokens and adapter, a text's
        pages depend on.
        """
        events.keep_texts(page_size)
        self._events = events
        self._config = config
        self._pages = PublishedPages(page_size, extra_key)
        self._window = ReplayWindow(config.replay_batches, config.replay_bytes)
        self._topic = config.topic.encode()
        self._next_seq = 0  # in the log, whose numbers start at 1: the first read is a snapshot
        self._num_resyncs = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_woken = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv publisher", daemon=True)
        self.port = 0
        self.replay_port = 0

    @property
    def metrics(self) -> Mapping[str, float]:
        return {
            KV_EVENT_BATCHES.name: float(self._window.next_seq),
            KV_EVENT_RESYNCS.name: float(self._num_resyncs),
            KV_EVENT_UNNAMED_PAGES.name: float(self._pages.num_unnamed),
        }

    def start(self) -> None:
        """Listens and starts the thread. Raises ConfigError if the ports are taken."""
        self._context = zmq.Context()
        self._publications, self._replays = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        for each in (self._publications, self._replays):
            each.setsockopt(zmq.LINGER, 0)
            each.setsockopt(zmq.IPV6, ":" in self._config.host)
            each.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
            each.setsockopt(zmq.SNDHWM, self._config.replay_batches + 1)
        try:
            self._bind()
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._wake)
            raise
        self._thread.start()
        log.info("KV events at %s:%d, replays at port %d", self._config.host, self.port, self.replay_port)

    def _bind(self) -> None:
        config = self._config
        if not config.port:
            self.port, self.replay_port = self._listen(self._publications, 0), self._listen(self._replays, 0)
            return
        for port in range(config.port, max(config.port, config.last_port or 0) + 1, 2):
            try:
                self.port = self._listen(self._publications, port)
            except zmq.ZMQError:
                continue
            try:
                self.replay_port = self._listen(self._replays, port + 1)
                return
            except zmq.ZMQError:
                self._publications.unbind(_endpoint(self._publications))
        raise ConfigError(
            f"kv_publisher.port = {config.port}, kv_publisher.last_port = {config.last_port}: no two adjacent ports of "
            f"these are free on {config.host}; free them or choose others"
        )

    def _listen(self, each: zmq.Socket[bytes], port: int) -> int:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        each.bind(f"tcp://{host}:{port or '*'}")
        return int(_endpoint(each).rsplit(":", 1)[1])

    def notify(self) -> None:
        """Wakes the thread after a change of the cache. Never blocks."""
        if not self._is_woken:
            self._is_woken = True
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Publishes what is left, then ends the thread and closes the ports. Blocks briefly."""
        if not self._thread.is_alive():
            return
        self._is_stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            log.error("the thread that publishes KV events did not end within %g s", _STOP_S)
            return
        os.close(self._wake)

    # The thread.

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._wake, zmq.POLLIN)
            poller.register(self._replays, zmq.POLLIN)
            is_last = False
            while not is_last:
                is_last = self._is_stopping  # read first, so that every change before `close` is published
                try:
                    self._publish()
                    if not is_last:
                        self._await_change(poller)
                except Exception:
                    # Otherwise subscribers would trust a view that never changes again.
                    log.exception("publishing KV events failed; subscribers get the whole cache again")
                    self._next_seq, self._num_resyncs = 0, self._num_resyncs + 1
                    time.sleep(_RETRY_S)
        finally:
            self._context.destroy(linger=0)

    def _await_change(self, poller: zmq.Poller) -> None:
        """Answers replays until the cache has changed or the thread is to end."""
        ready = dict(poller.poll())  # no deadline: the eventfd ends it
        if self._replays in ready:
            self._replay()
        if self._wake in ready:
            os.eventfd_read(self._wake)
            self._is_woken = False
            if not self._is_stopping:
                time.sleep(_PAUSE_S)

    def _publish(self) -> None:
        batch = self._events.read(self._next_seq)
        self._num_resyncs += batch.snapshot and self._next_seq > 0
        self._next_seq = batch.next_seq
        if not batch.events and not batch.snapshot:
            return
        texts = self._events.texts_of(itertools.chain.from_iterable(event.hashes for event in batch.events))
        message: list[BlockEvent] = []
        num_tokens = 0
        for event in self._pages.translate(batch, texts):
            message.append(event)
            num_tokens += len(event.token_ids) if isinstance(event, BlocksStored) else 0
            if num_tokens >= _MAX_BATCH_TOKENS:
                self._send(message)
                message, num_tokens = [], 0
        if message:
            self._send(message)

    def _send(self, message: list[BlockEvent]) -> None:
        payload = encode_batch(time.time(), message)
        seq = self._window.append(payload)
        self._publications.send_multipart([self._topic, seq.to_bytes(SEQ_BYTES, "big"), payload])

    def _replay(self) -> None:
        """Answers one request for the batches from a number on; ignores anything else."""
        frames = self._replays.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQ_BYTES:
            log.debug("a replay request has %d frames", len(frames))
            return
        peer = frames[0]
        for seq, payload in self._window.since(int.from_bytes(frames[2], "big")):
            self._replays.send_multipart([peer, b"", self._topic, seq.to_bytes(SEQ_BYTES, "big"), payload])
        self._replays.send_multipart([peer, b"", b"", END_SEQ, b""])


def _endpoint(each: zmq.Socket[bytes]) -> str:
    """Returns the address that a socket was bound to last."""
    found = each.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()
