"""Tests the publisher's sockets: what is sent, replayed and published again, and what is refused."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from penstock.config import EngineConfig, KvPublisherConfig, WorkerConfig
from penstock.errors import ConfigError
from penstock.kv.block_events import BlocksCleared, BlocksRemoved, BlocksStored, decode_batch
from penstock.kv.events import KvEventLog
from penstock.types import PageHash
from tests.support.router.zmq_subscriber import ZmqSubscriber
from tests.worker.kv_publisher.test_published_pages import SIZE, Text, store
from worker.kv_publisher.publisher import KvPublisher


@contextlib.contextmanager
def publishing(log: KvEventLog, **settings: object) -> Iterator[KvPublisher]:
    publisher = KvPublisher(log, KvPublisherConfig.model_validate(settings), SIZE)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


def replayed(subscriber: ZmqSubscriber, publisher: KvPublisher, num_batches: int) -> list[tuple[int, bytes]]:
    """Replays from the start until so many batches have arrived."""
    while len(found := subscriber.replay(0)) < num_batches:
        publisher.notify()
    return found


def test_events_are_published_and_replayed() -> None:
    log, text = KvEventLog(), Text([1, 2, 3, 4])
    log.keep_texts(SIZE)
    store(log, text)
    with publishing(log, topic="kv@here") as publisher:
        with ZmqSubscriber(publisher.port, publisher.replay_port, b"kv@") as subscriber:
            found = replayed(subscriber, publisher, 1)
            stored = next(event for _, payload in found for event in decode_batch(payload) if event != BlocksCleared())
            assert isinstance(stored, BlocksStored)
            assert (stored.token_ids, stored.block_size, stored.parent, stored.medium) == ((1, 2, 3, 4), 2, None, "GPU")
            assert decode_batch(found[0][1])[0] == BlocksCleared()
            seqs = [seq for seq, _ in found]
            assert seqs == list(range(len(seqs)))
            number = 100
            while not subscriber.is_ready():  # until the subscription is in force
                number += 1
                store(log, Text([number, number]))
                publisher.notify()
            topic, seq, events = subscriber.next()
            assert topic == b"kv@here"
            assert seq >= len(found)
            assert all(isinstance(event, BlocksStored) for event in events)


def test_a_failure_makes_the_publisher_clear_and_publish_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.kv_publisher.publisher._RETRY_S", 0.01)
    log = KvEventLog()
    with publishing(log) as publisher, ZmqSubscriber(publisher.port, publisher.replay_port) as subscriber:
        store(log, Text([1, 2]))
        before = len(replayed(subscriber, publisher, 2))  # the first batch may be of an empty cache
        translate, failures = publisher._pages.translate, [ValueError("no such page")]

        def fail_once(*arguments: object) -> object:
            if failures:
                raise failures.pop()
            return translate(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(publisher._pages, "translate", fail_once)
        store(log, Text([3, 4]))
        first = decode_batch(replayed(subscriber, publisher, before + 1)[before][1])
        assert first[0] == BlocksCleared()
        stored = {event.token_ids for event in first if isinstance(event, BlocksStored)}
        assert stored == {(1, 2), (3, 4)}
        assert publisher.metrics["kv_event_resyncs"] == 1


def test_a_publisher_that_falls_behind_clears_and_publishes_everything_again() -> None:
    log = KvEventLog(window=2)
    with publishing(log) as publisher, ZmqSubscriber(publisher.port, publisher.replay_port) as subscriber:
        store(log, Text([1, 2]))
        replayed(subscriber, publisher, 1)
        while not publisher.metrics["kv_event_resyncs"]:
            for number in range(60, 90):  # more at once than the window holds
                page = Text([number, number])
                store(log, page)
                log.removed(page.hashes)
            publisher.notify()
        store(log, Text([3, 4]))
        held: set[object] = set()
        while len(held) != 2:
            publisher.notify()
            held = set()
            for _, payload in subscriber.replay(0):
                for event in decode_batch(payload):
                    held = _apply(held, event)


def _apply(held: set[object], event: object) -> set[object]:
    if isinstance(event, BlocksStored):
        return held | {*event.block_hashes}
    return held - {*event.block_hashes} if isinstance(event, BlocksRemoved) else set()


def test_invalid_messages_at_the_replay_socket_are_ignored() -> None:
    log = KvEventLog()
    store(log, Text([1, 2]))
    with publishing(log) as publisher, ZmqSubscriber(publisher.port, publisher.replay_port) as subscriber:
        for frames in ((b"",), (b"", b"short"), (b"x", bytes(8)), (b"", bytes(8), b"more")):
            subscriber.ask(*frames)
        with ZmqSubscriber(publisher.port, publisher.replay_port) as hostile:
            hostile.ask(b"", b"long" * 2000)  # the socket ends its connection
        assert replayed(subscriber, publisher, 1)  # the publisher lives, but answers nothing else


def test_ports_in_use_are_reported() -> None:
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"kv_publisher\.port = {port}, .*no two adjacent ports"):
            KvPublisher(KvEventLog(), KvPublisherConfig(port=port), SIZE).start()


def test_a_range_gives_each_worker_two_adjacent_ports() -> None:
    with publishing(KvEventLog()) as somewhere:
        first = somewhere.port + 20
    settings = {"port": first, "last_port": first + 40}
    with publishing(KvEventLog(), **settings) as left, publishing(KvEventLog(), **settings) as right:
        assert left.replay_port == left.port + 1
        assert right.replay_port == right.port + 1
        assert right.port > left.port
        assert (left.port - first) % 2 == (right.port - first) % 2 == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, r"kv_publisher\.host = '0\.0\.0\.0' is beyond loopback, and the schema has no"),
        ({"host": "10.0.0.1"}, r"set kv_publisher\.insecure = true"),
    ],
)
def test_ports_beyond_loopback_must_be_allowed(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        KvPublisherConfig.model_validate(settings)
    assert KvPublisherConfig.model_validate({**settings, "insecure": True}).insecure


@pytest.mark.parametrize("off", ["kv_events", "prefix_caching"])
def test_a_publisher_without_events_is_refused(off: str) -> None:
    engine = EngineConfig.model_validate({"model": "m", off: False})
    with pytest.raises(ValidationError, match=rf"nothing to publish while engine\.{off} = false"):
        WorkerConfig(worker_id="w", role="decode", engine=engine, kv_publisher=KvPublisherConfig())  # type: ignore[arg-type]


def test_a_page_without_a_text_is_counted() -> None:
    log = KvEventLog()
    with publishing(log) as publisher, ZmqSubscriber(publisher.port, publisher.replay_port) as subscriber:
        log.stored([PageHash(b"0" * 16)], PageHash(b""))
        replayed(subscriber, publisher, 1)
        while not publisher.metrics["kv_event_unnamed_pages"]:
            publisher.notify()
        assert publisher.metrics["kv_event_unnamed_pages"] == 1
