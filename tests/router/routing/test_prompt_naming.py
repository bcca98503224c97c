"""Tests that each prompt's prefix has one name, by which consistent hashing keeps prompts together."""

from penstock.kv.page_hash import hash_pages
from router.dispatch.placement import PromptPages
from router.fleet.worker_groups import WorkerGroup
from router.routing.index.prefix_index import PrefixIndex
from router.routing.placement_core import num_naming_pages

SALT = b"salt"


def name(tokens: list[int], size: int = 16) -> bytes:
    pages = PromptPages(tokens, SALT)
    pages.cached_tokens(PrefixIndex(), WorkerGroup("r1", 1.0, 1 << 20, (), (), frozenset({size})))
    return pages.prefix


def test_long_prompts_are_distinguished_beyond_their_common_prefix() -> None:
    shared = list(range(512))
    first, second = [name([*shared, *[number] * 2000]) for number in (1, 2)]
    assert first != second
    assert name([*shared, *[1] * 5000]) == first
    assert first == bytes(hash_pages([*shared, *[1] * 1536], 16, SALT)[-1])


def test_short_prompts_are_named_by_their_first_pages() -> None:
    assert name(list(range(64)) + [1] * 500) == name(list(range(64)) + [2] * 900)
    assert name(list(range(10))) == b""


def test_the_number_of_naming_pages_grows_in_steps() -> None:
    assert num_naming_pages(15, 16) == 0
    assert num_naming_pages(40, 16) == 2
    assert num_naming_pages(2047, 16) == 4
    assert num_naming_pages(2048, 16) == num_naming_pages(9999, 16) == 128
    assert num_naming_pages(5000, 4096) == 1
