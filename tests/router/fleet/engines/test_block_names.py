"""Tests that an engine's block events become this router's page hashes, whatever names the engine gives its blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.block_events import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored
from penstock.kv.page_hash import hash_pages
from penstock.types import PageHash, WorkerId
from router.fleet.engines import block_names
from router.fleet.engines.block_names import BlockNames
from router.routing.index.prefix_index import PrefixIndex

SIZE, ROOT, ENGINE = 2, b"root" * 4, WorkerId("engine")
MEDIA = ("GPU", "CPU", "STORAGE")


class World:
    """Applies events through block names to an index."""

    def __init__(self) -> None:
        self.index, self.names = PrefixIndex(), BlockNames(SIZE, lambda: ROOT)

    def apply(self, *events: BlockEvent) -> None:
        for batch in self.names.translate(events):
            assert self.index.apply(ENGINE, batch)
        self.index.check_integrity()
        assert self.index.pages_of(ENGINE) == len(self.names)

    def match(self, tokens: list[int], salt: bytes = ROOT) -> tuple[int, int]:
        """Returns how many leading pages the engine holds, and how many of them on the device."""
        found = self.index.match(hash_pages(tokens, SIZE, salt)).get(ENGINE)
        return (found.num_pages, found.num_device_pages) if found else (0, 0)


def run(name: int, tokens: list[int], parent: int | None = None, **more: object) -> BlocksStored:
    count = len(tokens) // SIZE
    stored = BlocksStored(tuple(range(name, name + count)), parent, tuple(tokens), SIZE)
    return replace(stored, **more)  # type: ignore[arg-type]


def test_runs_are_chained_and_found() -> None:
    world = World()
    world.apply(run(10, [1, 2, 3, 4]), run(90, [5, 6], parent=11))
    assert world.match([1, 2, 3, 4, 5, 6, 7]) == (3, 3)
    assert world.match([1, 2, 3, 4, 9, 9]) == (2, 2)
    world.apply(BlocksRemoved((90,)))
    assert world.match([1, 2, 3, 4, 5, 6]) == (2, 2)


def test_a_block_of_an_unknown_parent_waits_for_its_parent() -> None:
    world = World()
    world.apply(run(90, [5, 6], parent=11))
    assert (world.names.num_unplaced, len(world.names)) == (1, 0)
    world.apply(run(10, [1, 2, 3, 4]), run(90, [5, 6], parent=11))
    assert world.match([1, 2, 3, 4, 5, 6]) == (3, 3)


def test_a_block_counts_in_its_fastest_tier() -> None:
    world = World()
    world.apply(run(1, [1, 2, 3, 4]), run(1, [1, 2, 3, 4], medium="CPU"), BlocksRemoved((2,), "GPU"))
    assert world.match([1, 2, 3, 4]) == (2, 1)
    world.apply(BlocksRemoved((2, 1), "CPU"))
    assert world.match([1, 2, 3, 4]) == (1, 1)


def test_adapters_images_and_salts_make_different_prompts() -> None:
    world, salt = World(), b"tenant's salt..."
    world.apply(
        run(1, [1, 2], lora_name="law", extra_keys=(("law",),)),
        run(2, [1, 2], extra_keys=((salt.hex(),),)),
        run(3, [1, 2], extra_keys=(("any salt of another router",),)),
        run(4, [1, 2, 3, 4], extra_keys=(None, (("image", 3),))),
    )
    assert world.match([1, 2], salt) == (1, 1)
    assert world.match([1, 2, 3, 4]) == (1, 1)  # the image's block has another text
    assert len(world.names) == 5


def test_events_that_do_not_fit_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.apply(run(1, [1, 2], group=1), replace(run(2, [1, 2]), block_size=1, block_hashes=(2, 3)))
    world.apply(run(4, [1, 2], medium="TAPE"))
    assert (len(world.names), world.names.num_unplaced) == (0, 3)
    monkeypatch.setattr(block_names, "MAX_BLOCKS", 3)
    world.apply(run(10, [1, 2, 3, 4]), run(20, [7, 7, 8, 8]))
    assert len(world.names) == 2


TEXTS = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9], [7, 7, 8, 8])


@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "remove", "clear"]), st.integers(0, 2), st.sampled_from(MEDIA)), max_size=30
    )
)
def test_the_index_holds_what_the_engine_holds(moves: list[tuple[str, int, str]]) -> None:
    world = World()
    media: dict[PageHash, set[str]] = {}
    for move, number, medium in moves:
        pages = hash_pages(TEXTS[number], SIZE, ROOT)
        names = tuple(int.from_bytes(page[:4], "big") for page in pages)
        if move == "store":
            world.apply(BlocksStored(names, None, tuple(TEXTS[number]), SIZE, medium))
            for page in pages:
                media.setdefault(page, set()).add(medium)
        elif move == "remove":
            world.apply(BlocksRemoved(names[-1:], medium))
            media.get(pages[-1], set()).discard(medium)
        else:
            world.apply(BlocksCleared())
            media.clear()
    for text in TEXTS:
        pages = hash_pages(text, SIZE, ROOT)
        held = next((index for index, page in enumerate(pages) if not media.get(page)), len(pages))
        assert world.match(text)[0] == held
    by_tier = [sum(min(map(MEDIA.index, held)) == rank for held in media.values() if held) for rank in range(3)]
    assert list(world.index.pages_by_tier(ENGINE)) == by_tier
