"""Pages through lists as OpenAI's API does. Does no I/O of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.errors import InvalidInput

Json = dict[str, Any]
EntryT = TypeVar("EntryT")

PAGE_ITEMS = 100  # at most, whatever limit a call may name: `has_more` says that there are others


def page(
    entries: Sequence[EntryT],
    query: Mapping[str, str],
    load: Callable[[EntryT], Json | None],
    max_limit: int = PAGE_ITEMS,
    id_of: Callable[[EntryT], str] = str,
) -> Json:
    """Returns the page that the query asks for: the newest items first unless it says otherwise.

    `entries` stand for all items, the oldest first. Only items of the page are loaded; those for which `load` returns
    None are gone, and left out. Raises InvalidInput.
    """
    newest_first, limit = _order_of(query), min(_limit_of(query, max_limit), PAGE_ITEMS)
    if newest_first:
        entries = entries[::-1]
    after = query.get("after")
    place = 0 if after is None else _place_of(after, map(id_of, entries)) + 1
    shown = list[Json]()
    while place < len(entries) and len(shown) < limit:
        item = load(entries[place])
        if item is not None:
            shown.append(item)
        place += 1
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": place < len(entries)}


def _order_of(query: Mapping[str, str]) -> bool:
    """Returns whether the newest items come first."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidInput("order", f"is {order[:100]!r}; give asc or desc")
    return order == "desc"


def _limit_of(query: Mapping[str, str], max_limit: int) -> int:
    given = query.get("limit", "20")
    if not given.isdecimal() or not 1 <= int(given[:9]) <= max_limit:
        raise InvalidInput("limit", f"is {given[:100]!r}; give a number from 1 to {max_limit}")
    return int(given)


def _place_of(after: str, ids: Iterable[str]) -> int:
    for place, item_id in enumerate(ids):
        if item_id == after:
            return place
    raise InvalidInput("after", f"is {after[:100]!r}, which is none of the items; give the id of one")
