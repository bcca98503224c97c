"""Pages through lists as OpenAI's API does. Performs no I/O of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from penstock.errors import InvalidInput
from router.api.dialect import Json

EntryT = TypeVar("EntryT")

PAGE_ITEMS = 100  # most items of a page, even if a call gives a higher limit; `has_more` then says that there are more


def page(
    entries: Sequence[EntryT],
    query: Mapping[str, str],
    load: Callable[[EntryT], Json | None],
    max_limit: int = PAGE_ITEMS,
    id_of: Callable[[EntryT], str] = str,
) -> Json:
    """Returns the page that the query asks for, by default with the newest items first.

    `entries` stand for all items, oldest first. `load` is called only for items of the page; those for which it returns
    None no longer exist and are left out. Raises InvalidInput.
    """
    newest_first, limit = _is_newest_first(query), min(_limit_of(query, max_limit), PAGE_ITEMS)
    if newest_first:
        entries = entries[::-1]
    after = query.get("after")
    index = 0 if after is None else _index_of(after, map(id_of, entries)) + 1
    items = list[Json]()
    while index < len(entries) and len(items) < limit:
        item = load(entries[index])
        if item is not None:
            items.append(item)
        index += 1
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": items, **ends, "has_more": index < len(entries)}


def _is_newest_first(query: Mapping[str, str]) -> bool:
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidInput("order", f"is {order[:100]!r}; give asc or desc")
    return order == "desc"


def _limit_of(query: Mapping[str, str], max_limit: int) -> int:
    given = query.get("limit", "20")
    if not given.isdecimal() or not 1 <= int(given[:9]) <= max_limit:
        raise InvalidInput("limit", f"is {given[:100]!r}; give a number from 1 to {max_limit}")
    return int(given)


def _index_of(after: str, ids: Iterable[str]) -> int:
    for index, item_id in enumerate(ids):
        if item_id == after:
            return index
    raise InvalidInput("after", f"is {after[:100]!r}, which is not in the list; give the id of an item in it")
