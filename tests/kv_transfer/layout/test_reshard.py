"""Tests KV that moves between layouts: each value arrives at its place, and incompatible layouts are refused by
field."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.kv_layout import DTYPE_BYTES, KVLayout
from kv_transfer.layout.checksum import page_checksums
from kv_transfer.layout.reshard import PageRun, ReshardPlan, plan_reshard
from kv_transfer.layout.staging import STAGING_BYTES, Repacker, Staging, page_slices, sent_checksums
from penstock.errors import TransferRefused
from penstock.types import PageId

BASE = KVLayout(num_layers=4, num_kv_heads=4, page_size=16, head_dim=2, dtype="float32", model_revision="r1")


def value(token: int, layer: int, kind: int, head: int, dim: int) -> float:
    """Returns the value of one place in the sequence, whatever the layout; distinct, but not exact in every dtype."""
    return 1 + dim + 2 * (head + 4 * (kind + 2 * (layer + 4 * token)))


def dense(layout: KVLayout, num_tokens: int) -> torch.Tensor:
    """Returns the KV of the layout's layers and heads as [T, L, 2, K, H]."""
    return torch.tensor(
        [
            [
                [[[value(t, n, k, h, d) for d in range(layout.head_dim)] for h in layout.heads] for k in range(2)]
                for n in layout.layers
            ]
            for t in range(num_tokens)
        ],
        dtype=getattr(torch, layout.dtype),
    )


def make_pool(layout: KVLayout, num_tokens: int, order: list[int]) -> torch.Tensor:
    """Returns a pool with the sequence's pages at `order[i]`; all other values occur in no token."""
    pool = torch.full(layout.shape(len(order) + 1), -7.0, dtype=getattr(torch, layout.dtype))
    for token, kv in enumerate(dense(layout, num_tokens)):
        pool[order[token // layout.page_size], :, :, :, token % layout.page_size] = kv
    return pool


@st.composite
def subranges(draw: st.DrawFn, start: int, end: int) -> tuple[int, int]:
    first = draw(st.integers(start, end - 1))
    return first, draw(st.integers(first + 1, end))


@st.composite
def plans(draw: st.DrawFn) -> ReshardPlan:
    sizes = st.sampled_from([1, 2, 3, 4, 5, 8, 16])
    layers, heads = draw(subranges(0, 4)), draw(subranges(0, 4))
    dtype = draw(st.sampled_from(list(DTYPE_BYTES)))
    source = replace(BASE, page_size=draw(sizes), layer_range=layers, head_range=heads, dtype=dtype)
    target = replace(
        source, page_size=draw(sizes), layer_range=draw(subranges(*layers)), head_range=draw(subranges(*heads))
    )
    return plan_reshard(source, target)


@given(plan=plans(), first=st.integers(0, 40), count=st.integers(1, 40))
def test_runs_cover_each_token_once_and_stay_within_their_pages(plan: ReshardPlan, first: int, count: int) -> None:
    tokens = range(first, first + count)
    seen: list[int] = []
    for run in plan.token_runs(tokens):
        for offset in range(run.num_tokens):
            assert run.source_token + offset < plan.source.page_size
            assert run.target_token + offset < plan.target.page_size
            token = run.source_page * plan.source.page_size + run.source_token + offset
            assert token == run.target_page * plan.target.page_size + run.target_token + offset
            seen.append(token)
    assert seen == list(tokens)
    borders = {t for t in tokens if t % plan.source.page_size == 0 or t % plan.target.page_size == 0} | {first}
    assert len(list(plan.token_runs(tokens))) == len(borders)  # no run is split without need


def test_equal_layouts_move_whole_pages() -> None:
    plan = plan_reshard(BASE, BASE)
    assert plan.whole_pages
    assert list(plan.token_runs(range(16, 64))) == [
        PageRun(1, 0, 1, 0, 16),
        PageRun(2, 0, 2, 0, 16),
        PageRun(3, 0, 3, 0, 16),
    ]
    assert not plan_reshard(BASE, replace(BASE, page_size=64)).whole_pages
    assert not plan_reshard(BASE, replace(BASE, head_range=(0, 2))).whole_pages
    assert plan_reshard(BASE, replace(BASE, head_range=(0, 4))).whole_pages


@settings(deadline=None)
@given(plan=plans(), data=st.data(), num_tokens=st.integers(1, 40), by_index=st.booleans())
def test_repacked_pages_equal_a_dense_copy(
    plan: ReshardPlan, data: st.DataObject, num_tokens: int, by_index: bool
) -> None:
    size = plan.target.page_size
    first_page = data.draw(st.integers(0, (num_tokens - 1) // size))
    tokens = range(first_page * size, data.draw(st.integers(first_page * size + 1, num_tokens)))
    order = data.draw(st.permutations(range(-(-num_tokens // plan.source.page_size))))
    pool = make_pool(plan.source, num_tokens, order)
    before = pool.clone()
    parts = page_slices(plan, tokens, [PageId(page) for page in order])
    assert len(parts) == -(-len(tokens) // size)
    rows = torch.full(plan.target.shape(len(parts) + 1), float("nan"), dtype=pool.dtype)
    places = data.draw(st.permutations(range(len(parts) + 1)))[: len(parts)]
    repacker = Repacker(plan, pool, rows)
    (repacker.pack_by_index if by_index else repacker.pack)(parts, [PageId(place) for place in places])
    wanted = torch.zeros(len(parts) * size, *dense(plan.target, 1).shape[1:], dtype=pool.dtype)
    wanted[: len(tokens)] = dense(plan.target, num_tokens)[tokens.start : tokens.stop]
    found = torch.cat([rows[place].permute(3, 0, 1, 2, 4) for place in places])
    assert torch.equal(found, wanted)
    (unused,) = set(range(len(parts) + 1)) - set(places)
    assert rows[unused].isnan().all()
    assert torch.equal(pool, before)
    if not plan.whole_pages:  # whole pages are sent with the unused rest of the last page
        found_sums = sent_checksums(plan, pool, tokens, [PageId(page) for page in order])
        assert found_sums == page_checksums(rows, [PageId(place) for place in places])


def test_checksums_of_whole_pages_are_those_of_the_pool() -> None:
    pool = make_pool(BASE, 40, [2, 0, 1])
    plan = plan_reshard(BASE, BASE)
    pages = [PageId(2), PageId(0), PageId(1)]
    assert sent_checksums(plan, pool, range(16, 40), pages) == page_checksums(pool, pages[1:])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_revision": "r2"}, "model_revision is 'r2' at the receiver, 'r1' at the sender"),
        ({"num_layers": 5}, "num_layers is 5 at the receiver, 4 at the sender"),
        ({"num_kv_heads": 2}, "num_kv_heads is 2 at the receiver, 4 at the sender"),
        ({"head_dim": 4}, "head_dim is 4 at the receiver, 2 at the sender"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16' at the receiver, 'float32' at the sender"),
        ({"dtype": "unheard-of"}, "dtype is 'unheard-of' at the receiver"),
        ({"quantization": "int8"}, "quantization is 'int8' at the receiver, 'none' at the sender"),
        ({"hash_version": 2}, "hash_version is 2 at the receiver, 1 at the sender"),
        ({"dtype": "float16", "head_dim": 4}, "head_dim is 4 .*; dtype is 'float16'"),
    ],
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_incompatible_layouts_are_refused_by_field_and_with_both_digests(
    changes: dict[str, object], problem: str, page_size: int
) -> None:
    other = replace(BASE, page_size=page_size, **changes)  # type: ignore[arg-type]
    with pytest.raises(TransferRefused, match=problem) as refused:
        plan_reshard(BASE, other)
    assert other.digest() in refused.value.message
    assert BASE.digest() in refused.value.message
    assert other.kv_digest() != BASE.kv_digest()


def test_heads_and_layers_that_the_sender_lacks_are_refused() -> None:
    half = replace(BASE, head_range=(0, 2))
    assert plan_reshard(BASE, half).source_heads == slice(0, 2)
    with pytest.raises(TransferRefused, match="the receiver wants heads 0 to 4, the sender has only 0 to 2"):
        plan_reshard(half, BASE)
    with pytest.raises(TransferRefused, match="the receiver wants layers 1 to 3, the sender has only 2 to 4"):
        plan_reshard(replace(BASE, layer_range=(2, 4)), replace(BASE, layer_range=(1, 3)))


def test_digests_show_which_layouts_are_compatible() -> None:
    bigger = replace(BASE, page_size=64)
    assert bigger.digest() != BASE.digest()
    assert bigger.kv_digest() == BASE.kv_digest()
    assert replace(BASE, head_range=(0, 4)).digest() == BASE.digest()
    assert replace(BASE, head_range=(0, 2)).kv_digest() != BASE.kv_digest()


def test_staging_is_bounded_and_leaves_room_for_other_transfers() -> None:
    source = replace(BASE, page_size=16, head_dim=1024, num_kv_heads=8)
    plan = plan_reshard(source, replace(source, page_size=16, head_range=(0, 8), layer_range=(0, 2)))
    assert STAGING_BYTES // plan.target.page_bytes == 32
    asked: list[bool] = []
    staging = Staging(plan, torch.zeros(source.shape(1)), lambda: asked.append(True))
    parts = page_slices(plan, range(16), [PageId(0)])
    first = [staging.stage(parts * 4, held) for held in (0, 4, 8, 12, 16)]
    assert [rows is not None for rows in first] == [True, True, True, True, False]  # at most half of the rows
    other = staging.stage(parts * 16, 0)
    assert other is not None
    assert staging.stage(parts, 0) is None
    taken = [row for rows in (*first[:4], other) for row in rows or []]
    assert len(set(taken)) == len(taken) == 32
    assert asked == []
    staging.release(other)
    assert asked == [True]
    staging.release([row for rows in first[:4] for row in rows or []])
    assert asked == [True]
    assert staging.num_free == 32
