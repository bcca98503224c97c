"""Tests the store of responses: conversations, tenants, and bounds on bytes and age."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import StoreConfig
from penstock.errors import InvalidInput
from router.api.translation.responses.store import CallInput, ResponseNotFound, ResponseStore


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def put(store: ResponseStore, name: str, tenant: str = "a", previous: str | None = None, size: int = 10) -> bool:
    given = CallInput([("id", "x" * size)], [user(f"ask {name}")])
    return store.put(tenant, {"id": name}, given, [user(f"answer {name}")], previous)


def small_store(clock: Clock | None = None, **settings: float) -> ResponseStore:
    return ResponseStore(StoreConfig.model_validate(settings), clock or Clock())


def holds(store: ResponseStore, name: str, tenant: str = "a") -> bool:
    try:
        store.get(tenant, name)
    except ResponseNotFound:
        return False
    return True


def test_a_conversation_includes_all_earlier_responses():
    store = small_store()
    put(store, "one")
    put(store, "two", previous="one")
    put(store, "branch", previous="one")
    texts = [message["content"] for message in store.conversation("a", "two", 100, 10_000)]
    assert texts == ["ask one", "answer one", "ask two", "answer two"]
    assert len(store.conversation("a", "branch", 100, 10_000)) == 4
    for most in ((3, 10_000), (100, 1000)):
        with pytest.raises(InvalidInput, match=f"continues a conversation of more than {most[0]} messages"):
            store.conversation("a", "two", *most)


def test_a_gap_in_a_conversation_is_reported():
    store = small_store()
    put(store, "one")
    put(store, "two", previous="one")
    store.delete("a", "one")
    with pytest.raises(ResponseNotFound, match="previous_response_id: 'one' is not in the store of this router") as gap:
        store.conversation("a", "two", 100, 10_000)
    assert gap.value.http_status == 404


def test_no_tenant_sees_anothers_responses():
    store = small_store()
    put(store, "one", tenant="a")
    assert not holds(store, "one", tenant="b")
    with pytest.raises(ResponseNotFound):
        store.delete("b", "one")
    assert holds(store, "one")


def test_responses_expire_by_age():
    clock = Clock()
    store = small_store(clock, age_s=10.0)
    put(store, "one")
    clock.now_s = 6.0
    put(store, "two")
    assert holds(store, "one")
    clock.now_s = 10.0
    assert not holds(store, "one")
    assert holds(store, "two")
    clock.now_s = 16.0
    assert not holds(store, "two")
    assert store.num_bytes == 0


def test_a_tenants_least_recently_used_response_is_dropped_first():
    store = small_store(tenant_bytes=4300)
    for name in ("one", "two", "three"):
        put(store, name)
    store.get("a", "one")
    put(store, "four")
    assert [name for name in ("one", "two", "three", "four") if holds(store, name)] == ["one", "three", "four"]


def test_the_tenant_with_the_most_bytes_makes_room():
    store = small_store(total_bytes=5700)
    put(store, "small", tenant="b")
    for name in ("one", "two", "three", "four"):
        put(store, name)
    assert holds(store, "small", tenant="b")
    assert not holds(store, "one")
    assert holds(store, "four")


def test_too_large_a_response_is_not_stored():
    store = small_store(tenant_bytes=4000)
    put(store, "one")
    assert not put(store, "large", size=5000)
    assert not store.fits(CallInput([("id", "x" * 5000)], []))
    assert holds(store, "one")
    assert not put(small_store(tenant_bytes=0), "one")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "delete", "wait"]),
            st.sampled_from("abc"),
            st.sampled_from(["r1", "r2", "r3", "r4", "r5"]),
            st.integers(0, 3000),
        ),
        max_size=40,
    )
)
def test_the_bounds_hold_after_any_history(history):
    clock = Clock()
    store = small_store(clock, tenant_bytes=6000, total_bytes=10_000, age_s=20_000.0)
    for action, tenant, name, number in history:
        if action == "put":
            put(store, name, tenant, size=number)
        elif action == "get":
            holds(store, name, tenant)
        elif action == "delete" and holds(store, name, tenant):
            store.delete(tenant, name)
        elif action == "wait":
            clock.now_s += number
        sizes = {each: sum(entry.num_bytes for entry in found.values()) for each, found in store._by_tenant.items()}
        assert sizes == store._bytes_of
        assert store.num_bytes == sum(sizes.values()) <= 10_000
        assert max(sizes.values(), default=0) <= 6000
        assert {(each, key) for each, found in store._by_tenant.items() for key in found} == set(store._stored)
