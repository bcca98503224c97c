"""Tests that a subscriber that applies every block event holds what the cache holds, after any history."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.kv.adapter_files import AdapterRef
from penstock.kv.block_events import BlockEvent, BlockHash, BlocksCleared, BlocksRemoved, BlocksStored
from penstock.kv.events import KvEventKind, KvEventLog
from penstock.kv.page_hash import hash_pages
from penstock.rpc.secret import ClusterSecret, ClusterSecrets
from penstock.rpc.ticket import page_salt
from penstock.types import PageHash
from worker.kv_publisher.published_pages import PublishedPages, block_hash
from worker.kv_publisher.replay_window import ReplayWindow
from worker.kv_publisher.scopes import SharedScope

SIZE = 2
LAW = AdapterRef("law", "r1", "/law")
MEDIA = {KvEventKind.STORED: "GPU", KvEventKind.ON_HOST: "CPU", KvEventKind.ON_DISK: "STORAGE"}


@dataclass
class Text:
    """Holds a sequence as the cache sees it."""

    token_ids: list[int]
    salt: bytes = b"shared"
    adapter: AdapterRef | None = None
    hashes: list[PageHash] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hashes = hash_pages(self.token_ids, SIZE, self.salt)


class Subscriber:
    """Holds blocks by medium, with the tokens of each, as a router of another project does."""

    def __init__(self) -> None:
        self.held: dict[BlockHash, set[str]] = {}
        self.tokens: dict[BlockHash, tuple[int, ...]] = {}

    def apply(self, events: list[BlockEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksCleared):
                self.held.clear()
            elif isinstance(event, BlocksRemoved):
                for block in event.block_hashes:
                    assert event.medium in self.held[block]
                    self.held[block].discard(str(event.medium))
            else:
                self._store(event)
        self.held = {block: media for block, media in self.held.items() if media}

    def _store(self, event: BlocksStored) -> None:
        before = () if event.parent is None else self.tokens[event.parent]
        for index, block in enumerate(event.block_hashes):
            before = (*before, *event.token_ids[index * SIZE : (index + 1) * SIZE])
            self.tokens[block] = before
            self.held.setdefault(block, set()).add(str(event.medium))


def pages(log: KvEventLog) -> PublishedPages:
    log.keep_texts(SIZE)
    return PublishedPages(SIZE, lambda text: None if text.salt == b"shared" else text.salt.hex())


def translated(log: KvEventLog, published: PublishedPages, next_seq: int) -> tuple[list[BlockEvent], int]:
    batch = log.read(next_seq)
    texts = log.texts_of(page for event in batch.events for page in event.hashes)
    return published.translate(batch, texts), batch.next_seq


def store(log: KvEventLog, text: Text, count: int | None = None) -> None:
    log.note_texts(text, text.hashes[:count])
    log.stored(text.hashes[:count], PageHash(b""))


TEXTS = [Text([1, 2, 3, 4, 5, 6]), Text([1, 2, 3, 4, 9, 9]), Text([7, 7, 8, 8]), Text([1, 2, 5, 5], b"tenant")]
MOVES = st.lists(
    st.tuples(st.sampled_from(["store", "ON_HOST", "ON_DISK", "REMOVED", "read"]), st.integers(0, 3)), max_size=40
)


@given(moves=MOVES, window=st.integers(1, 6))
@example(moves=[("store", 0), ("store", 2), ("ON_HOST", 0), ("read", 0), ("store", 0)], window=1)
def test_a_subscriber_holds_what_the_cache_holds(moves: list[tuple[str, int]], window: int) -> None:
    log, subscriber, next_seq = KvEventLog(window), Subscriber(), 0
    published = pages(log)
    places: dict[PageHash, KvEventKind] = {}
    for move, number in [*moves, ("read", 0)]:
        text = TEXTS[number]
        if move == "store":
            store(log, text)
            places.update(dict.fromkeys(text.hashes, KvEventKind.STORED))
        elif move == "read":
            events, next_seq = translated(log, published, next_seq)
            subscriber.apply(events)
        else:
            last = [page for page in text.hashes if page in places][-1:]
            if last and any(last[0] in other.hashes and other.hashes[-1] in places for other in TEXTS if other != text):
                continue  # leaves are evicted first
            log.moved(last, KvEventKind[move])
            places.update(dict.fromkeys(last, KvEventKind[move]))
            if move == "REMOVED":
                places = {page: kind for page, kind in places.items() if kind is not KvEventKind.REMOVED}
    assert subscriber.held == {block_hash(page): {MEDIA[kind]} for page, kind in places.items()}
    for text in TEXTS:
        for index, page in enumerate(text.hashes):
            if page in places:
                assert subscriber.tokens[block_hash(page)] == tuple(text.token_ids[: (index + 1) * SIZE])
    assert len(log.texts_of(places)) == len(places)


def test_texts_are_dropped_with_their_pages() -> None:
    log = KvEventLog()
    pages(log)
    store(log, TEXTS[0])
    log.removed(list(reversed(TEXTS[0].hashes)))
    assert not log.texts_of(TEXTS[0].hashes)


def test_pages_from_another_worker_are_published_once_a_request_finds_them() -> None:
    log = KvEventLog()
    published, text = pages(log), TEXTS[0]
    log.stored(text.hashes, PageHash(b""))  # grafted, so nothing gives their tokens
    events, next_seq = translated(log, published, 0)
    assert (events, published.num_unnamed) == ([BlocksCleared()], 3)
    log.note_held_texts(text, [*text.hashes, PageHash(b"not held")])
    events, _ = translated(log, published, next_seq)
    assert [event.token_ids for event in events if isinstance(event, BlocksStored)] == [(1, 2, 3, 4, 5, 6)]
    assert not log.texts_of([PageHash(b"not held")])


def test_adapters_and_tenants_are_extra_keys() -> None:
    log = KvEventLog()
    published = pages(log)
    for text in (Text([1, 2, 3, 4]), Text([1, 2, 3, 4], b"ab", LAW), Text([1, 2, 3, 4], b"shared", LAW)):
        store(log, text)
    events, _ = translated(log, published, 0)
    found = [(event.lora_name, event.extra_keys) for event in events if isinstance(event, BlocksStored)]
    assert found == [(None, None), ("law", (("law", "6162"), ("law",)))]  # the third text has the first one's hashes


def test_only_salts_of_tenants_are_published() -> None:
    secret = ClusterSecret("0" * 64)
    scope = SharedScope("model", lambda: ClusterSecrets.only(secret))
    shared, tenant = (Text([1, 2], page_salt(secret, "model", name)) for name in ("", "tenant:a"))
    log = KvEventLog()
    published = PublishedPages(SIZE, scope.extra_key)
    log.keep_texts(SIZE)
    for text in (shared, tenant):
        store(log, text)
    events, _ = translated(log, published, 0)
    assert [event.extra_keys for event in events if isinstance(event, BlocksStored)] == [None, ((tenant.salt.hex(),),)]


@given(sizes=st.lists(st.integers(0, 9), max_size=30), most=st.integers(1, 5), room=st.integers(1, 20))
def test_the_replay_window_keeps_the_newest_within_its_bounds(sizes: list[int], most: int, room: int) -> None:
    window, sent = ReplayWindow(most, room), []
    for size in sizes:
        sent.append((window.append(b"x" * size), b"x" * size))
        assert len(window) == 1 or (len(window) <= most and window.num_bytes <= room)
    assert [seq for seq, _ in sent] == list(range(len(sizes)))
    for start in range(len(sizes) + 2):
        kept = sent[len(sent) - len(window) :]
        assert list(window.since(start)) == [each for each in kept if each[0] >= start]
