"""Pages through lists as OpenAI's API does. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import InvalidInput

Json = dict[str, Any]


def page(items: Sequence[Json], query: Mapping[str, str], max_listed: int = 100) -> Json:
    """Returns those of the items, the oldest first, that the query asks for: the newest first unless it says otherwise.

    Raises InvalidInput.
    """
    order, given = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise InvalidInput("order", f"is {order[:100]!r}; give asc or desc")
    if not given.isdecimal() or not 1 <= int(given[:9]) <= max_listed:
        raise InvalidInput("limit", f"is {given[:100]!r}; give a number from 1 to {max_listed}")
    if order == "desc":
        items = items[::-1]
    after = query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidInput("after", f"is {after[:100]!r}, which is none of the items; give the id of one")
        items = items[places[0] + 1 :]
    shown = [*items[: int(given)]]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": len(shown) < len(items)}
