"""Translates structural tags to Lark grammars: free text in which certain triggers begin a part that must match. Pure.

A structural tag is JSON in one of two forms:

* `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`: free text; wherever a trigger occurs, one of
  the structures that begin with it follows;
* `{"format": {"type": ..., ...}}`: nested formats, as xgrammar and vLLM define them. Those in `_Writer._FORMATS` are
  supported; others are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from penstock.errors import InvalidInput
from penstock.text.lark import LarkWriter
from penstock.text.schemas import closed

MAX_PARTS = 512  # most formats, tags, triggers and ends of one structural tag
_MAX_DEPTH = 16


def structural_tag_to_lark(source: str, special_tokens: Mapping[str, int], field: str, space: str) -> str:
    """Returns a Lark grammar of the outputs that a structural tag allows.

    `special_tokens` (text to id) may occur in triggers, begins and ends. `space` is a regular expression for the white
    space between two tokens of JSON. Raises InvalidInput that names `field` and the place in it.
    """
    try:
        tag = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(field, f"is not valid JSON: {str(error)[:100]}") from None
    if not isinstance(tag, dict):
        raise InvalidInput(field, f"is {_shown(tag)}; a structural tag is an object")
    lark = LarkWriter(special_tokens, field)
    writer = _Writer(lark, field, {"whitespace_pattern": space})
    given = {name for name, value in tag.items() if value is not None} - {"type"}
    if tag.get("type", "structural_tag") != "structural_tag":
        raise writer.problem("type", f"is {_shown(tag['type'])}; give structural_tag")
    if given == {"format"}:
        return lark.finish(writer.format(tag["format"], "format", "", 0))
    if given == {"structures", "triggers"}:
        return lark.finish(writer.structures(tag))
    names = ", ".join(sorted(given)) or "nothing"
    raise InvalidInput(field, f"holds {names[:100]}; give format, or structures with triggers")


class _Writer:
    """Writes formats as expressions.

    Each method takes the text `end` that closes its part, because free text ends at the first occurrence of `end`. An
    empty `end` is the end of the output.
    """

    def __init__(self, lark: LarkWriter, field: str, json_form: Mapping[str, Any]) -> None:
        self._lark = lark
        self._field = field
        self._json_form = json_form
        self._num_parts = 0

    def problem(self, place: str, problem: str) -> InvalidInput:
        return InvalidInput(self._field, f"{place} {problem}")

    def structures(self, tag: Mapping[str, Any]) -> str:
        tags = []
        for number, item in enumerate(self._list(tag, "structures", "")):
            place = f"structures[{number}]"
            self._known(item, place, ("begin", "schema", "end"))
            content = {"type": "json_schema", "json_schema": item.get("schema")}
            tags.append({"type": "tag", "begin": item.get("begin"), "content": content, "end": item.get("end")})
        format_ = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
        return self._triggered_tags(format_, "", "", 0)

    def format(self, value: Any, place: str, end: str, depth: int) -> str:
        """Returns the expression for a format and its end."""
        self._count(place)
        if depth > _MAX_DEPTH:
            raise self.problem(place[:100], f"is nested more than {_MAX_DEPTH} deep; nest less")
        if not isinstance(value, Mapping):
            raise self.problem(place, f"is {_shown(value)}; give an object with a type")
        kind = value.get("type")
        known = self._FORMATS.get(kind) if isinstance(kind, str) else None
        if known is None:
            supported = ", ".join(self._FORMATS)
            raise self.problem(f"{place}.type", f"is {_shown(kind)}, which is not supported; give one of {supported}")
        names, write = known
        self._known(value, place, ("type", *names))
        return write(self, value, place, end, depth)

    def _const_string(self, value: Mapping[str, Any], place: str, end: str, depth: int) -> str:
        return self._literals(self._text(value, "value", place), end)

    def _json_schema(self, value: Mapping[str, Any], place: str, end: str, depth: int) -> str:
        style, schema = value.get("style"), value.get("json_schema")
        if style not in (None, "json"):
            raise self.problem(f"{place}.style", f"is {_shown(style)}, which is not supported; give json")
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise self.problem(f"{place}.json_schema", f"is {_shown(schema)}; give an object or true")
        return f"{self._lark.rule(self._lark.json(closed(schema), self._json_form))} {self._lark.literal(end)}"

    def _regex(self, value: Mapping[str, Any], place: str, end: str, depth: int) -> str:
        pattern = self._text(value, "pattern", place)
        return f"{self._lark.rule(self._lark.regex(pattern))} {self._lark.literal(end)}"

    def _any_text(self, value: Mapping[str, Any], place: str, end: str, depth: int) -> str:
        if value.get("excludes") not in (None, []):
            raise self.problem(f"{place}.excludes", "is not supported; leave it out")
        return self._lark.until(end) if end else self._lark.text()

    def _sequence(self, value: Mapping[str, Any], place: str, end: str, depth: int) -> str:
        elements = self._list(value, "elements", place)
        written: list[str] = []
        # A constant is written by the part before it, since free text ends with the first occurrence of the constant.
        for number in reversed(range(len(elements))):
            element, at = elements[number], f"{place}.elements[{number}]"
            if number and isinstance(element, Mapping) and element.get("type") == "const_string":
                self._count(at)
                self._known(element, at, ("type", "value"))
                end = self._text(element, "value", at) + end
                continue
            if written and not end and _may_end_free(element):
                raise self.problem(at, "may end with free text, whose end cannot be found; put a const_string after it")
            written.insert(0, self.format(element, at, end, depth + 1))
            end = ""
        return " ".join(written)

    def _or(self, value: Mapping[str, Any], place: str, end: str, depth: int) -> str:
        elements = self._list(value, "elements", place)
        written = [
            self.format(each, f"{place}.elements[{number}]", end, depth + 1) for number, each in enumerate(elements)
        ]
        return self._choice(written)

    def _tag(self, value: Mapping[str, Any], place: str, end: str, depth: int, begun: str = "") -> str:
        """Writes a tag without the prefix `begun` of its begin, which the caller has written already."""
        begin = self._text(value, "begin", place)
        ends = value.get("end")
        if isinstance(ends, str):
            ends = [ends]
        if not isinstance(ends, list) or not ends or not all(isinstance(each, str) for each in ends):
            raise self.problem(f"{place}.end", f"is {_shown(value.get('end'))}; give a text or a list of texts")
        content = value.get("content")
        written = [self.format(content, f"{place}.content", each + end, depth + 1) for each in ends]
        return f"{self._lark.literal(begin.removeprefix(begun))} {self._choice(written)}"

    def _triggered_tags(self, value: Mapping[str, Any], place: str, end: str, depth: int) -> str:
        triggers, tags = self._texts(value, "triggers", place), self._list(value, "tags", place)
        self._no_excludes(value, place)
        bodies_by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for number, tag in enumerate(tags):
            at = f"{place}.tags[{number}]" if place else f"structures[{number}]"
            begin = self._text(self._read_tag(tag, at), "begin", at)
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(matching) != 1:
                some = "no trigger" if not matching else f"{len(matching)} triggers"
                raise self.problem(f"{at}.begin", f"= {_shown(begin)} begins with {some}; it must begin with one")
            bodies_by_trigger[matching[0]].append(self._tag(tag, at, "", depth, matching[0]))
        for trigger, bodies in bodies_by_trigger.items():
            if not bodies:
                raise self.problem(
                    f"{place}.triggers".lstrip("."), f"holds {_shown(trigger)}, with which no tag begins"
                )
        rules = {trigger: self._lark.rule(self._choice(each)) for trigger, each in bodies_by_trigger.items()}
        at_once = self._choice([f"{self._lark.literal(trigger)} {body}" for trigger, body in rules.items()])
        later = self._choice([f"{self._lark.until(trigger)} {body}" for trigger, body in rules.items()])
        first, once = self._flag(value, "at_least_one", place), self._flag(value, "stop_after_first", place)
        rest = self._any_text({}, place, end, depth)
        if once:
            closing = self._lark.literal(end)
            return f"{at_once} {closing}" if first else self._choice([f"{later} {closing}", rest])
        return f"{at_once if first else ''} {later}* {rest}"

    def _tags_with_separator(self, value: Mapping[str, Any], place: str, end: str, depth: int) -> str:
        tags, separator = self._list(value, "tags", place), self._text(value, "separator", place, may_be_empty=True)
        self._no_excludes(value, place)
        written = [
            self._tag(self._read_tag(tag, f"{place}.tags[{number}]"), f"{place}.tags[{number}]", "", depth)
            for number, tag in enumerate(tags)
        ]
        tag = self._lark.rule(self._choice(written))
        more = "" if self._flag(value, "stop_after_first", place) else f"({self._lark.literal(separator)} {tag})*"
        many = f"({tag} {more})" if self._flag(value, "at_least_one", place) else f"({tag} {more})?"
        return f"{many} {self._lark.literal(end)}"

    def _read_tag(self, tag: Any, place: str) -> Mapping[str, Any]:
        self._count(place)
        self._known(tag, place, ("type", "begin", "content", "end"))
        if tag.get("type", "tag") != "tag":
            raise self.problem(f"{place}.type", f"is {_shown(tag['type'])}; give tag")
        return dict(tag)

    def _no_excludes(self, value: Mapping[str, Any], place: str) -> None:
        if value.get("excludes") not in (None, []):
            raise self.problem(f"{place}.excludes".lstrip("."), "is not supported; leave it out")

    def _choice(self, written: Sequence[str]) -> str:
        return f"({' | '.join(written)})"

    def _literals(self, *texts: str) -> str:
        return self._lark.literal("".join(texts)) or '""'

    def _list(self, value: Mapping[str, Any], name: str, place: str) -> Sequence[Any]:
        found = value.get(name)
        if not isinstance(found, list) or not found:
            raise self.problem(f"{place}.{name}".lstrip("."), f"is {_shown(found)}; give a list with one entry or more")
        if len(found) > MAX_PARTS:
            raise self.problem(f"{place}.{name}".lstrip("."), f"has {len(found)} entries; give {MAX_PARTS} or fewer")
        return found

    def _texts(self, value: Mapping[str, Any], name: str, place: str) -> list[str]:
        found = self._list(value, name, place)
        for number, each in enumerate(found):
            self._count(place)
            if not isinstance(each, str) or not each:
                at = f"{place}.{name}[{number}]".lstrip(".")
                raise self.problem(at, f"is {_shown(each)}; give a text")
        return list(dict.fromkeys(found))

    def _text(self, value: Mapping[str, Any], name: str, place: str, *, may_be_empty: bool = False) -> str:
        found = value.get(name)
        if not isinstance(found, str) or not (found or may_be_empty):
            raise self.problem(f"{place}.{name}".lstrip("."), f"is {_shown(found)}; give a text")
        return found

    def _flag(self, value: Mapping[str, Any], name: str, place: str) -> bool:
        found = value.get(name)
        if not isinstance(found, bool | None):
            raise self.problem(f"{place}.{name}".lstrip("."), f"is {_shown(found)}; give true or false")
        return bool(found)

    def _known(self, value: Any, place: str, names: Sequence[str]) -> None:
        if not isinstance(value, Mapping):
            raise self.problem(place, f"is {_shown(value)}; give an object")
        for name, given in value.items():
            if name not in names and given is not None:
                raise self.problem(f"{place}.{name[:100]}", f"is not known there; give {', '.join(names)}")

    def _count(self, place: str) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise self.problem(place[:100], f"is one of more than {MAX_PARTS} parts; give fewer")

    # The fields of each format, and the method that writes it.
    _FORMATS: ClassVar[Mapping[str, tuple[tuple[str, ...], Callable[..., str]]]] = {
        "const_string": (("value",), _const_string),
        "json_schema": (("json_schema", "style"), _json_schema),
        "regex": (("pattern",), _regex),
        "any_text": (("excludes",), _any_text),
        "sequence": (("elements",), _sequence),
        "or": (("elements",), _or),
        "tag": (("begin", "content", "end"), _tag),
        "triggered_tags": (("triggers", "tags", "at_least_one", "stop_after_first", "excludes"), _triggered_tags),
        "tags_with_separator": (
            ("tags", "separator", "at_least_one", "stop_after_first", "excludes"),
            _tags_with_separator,
        ),
    }


def _may_end_free(value: Any) -> bool:
    """Returns whether a format's output may end with free text."""
    if not isinstance(value, Mapping):
        return False
    elements = value.get("elements")
    parts = elements if isinstance(elements, list) else []
    match value.get("type"):
        case "any_text":
            return True
        case "triggered_tags":
            return not (value.get("at_least_one") and value.get("stop_after_first"))
        case "tag":
            return (value.get("end") == "" or value.get("end") == [""]) and _may_end_free(value.get("content"))
        case "sequence":
            return any(map(_may_end_free, parts[-1:]))
        case "or":
            return any(map(_may_end_free, parts))
    return False


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]
