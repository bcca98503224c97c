"""The grammar of a whole output: reasoning, then either only calls or text with calls in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.text.lark import LarkWriter
from router.parsers.grammars.calls import CallGrammar, call_grammar
from router.parsers.tools import ToolFunction

_HARMONY_NEXT = "<|end|><|start|>assistant"


def write_grammar(
    format_name: str,
    reasoning_marks: tuple[str, str] | None,
    tools: Sequence[ToolFunction],
    *,
    required: bool,
    parallel: bool,
    special_tokens: Mapping[str, int],
    starts_in_reasoning: bool,
) -> str:
    """Returns a Lark grammar of outputs with valid calls of `tools`; if `required`, with at least one call and no text.

    `reasoning_marks` open and close the reasoning that may come first. If calls are not required, tools that are not
    strict accept any object as arguments.
    """
    lark = LarkWriter(special_tokens, "tools")
    form = call_grammar(format_name, special_tokens)
    if not required:
        tools = [tool if tool.strict else replace(tool, parameters={}) for tool in tools]
    call = lark.rule(" | ".join([lark.rule(form.call(lark, tool)) for tool in tools]))
    if format_name == "harmony":
        return lark.finish(_harmony(lark, call, required=required, starts_in_reasoning=starts_in_reasoning))
    body = _calls_only(lark, form, call, parallel) if required else _text_with_calls(lark, form, call, parallel)
    return lark.finish(f"{_reasoning(lark, reasoning_marks, required, starts_in_reasoning)} {body}")


def _reasoning(lark: LarkWriter, marks: tuple[str, str] | None, required: bool, starts_in_reasoning: bool) -> str:
    if marks is None:
        return ""
    thoughts = f"{lark.until(marks[1])} /\\n{{0,2}}/"
    if starts_in_reasoning:
        return thoughts
    # The text that follows may itself contain the reasoning, unless the opening mark is a special token.
    return f"({lark.literal(marks[0])} {thoughts})?" if required or marks[0] in lark.special_tokens else ""


def _calls_only(lark: LarkWriter, form: CallGrammar, call: str, parallel: bool, begun: str = "") -> str:
    """Returns an expression of calls without text. Leaves out `begun`, with which the calls have already begun."""
    beginning = lark.literal((form.opening + form.mark).removeprefix(begun))
    more = (
        f"({lark.literal(form.separator)} {lark.literal(form.mark)} {call})*" if parallel and not form.one_only else ""
    )
    return f"{beginning} {call} {more} {lark.literal(form.closing)}"


def _text_with_calls(lark: LarkWriter, form: CallGrammar, call: str, parallel: bool) -> str:
    trigger = form.trigger or form.opening or form.mark
    if len(trigger) > 1:
        group = lark.rule(_calls_only(lark, form, call, parallel, trigger))
        many = "*" if parallel else "?"
        return f"({lark.until(trigger)} {group}){many} {lark.text()}"
    # No mark begins a call: it begins with the first character of the output.
    first = trigger or "{"
    calls = _calls_only(lark, form, call, parallel)
    return f"({calls} | /([^\\{first}\\s](.|\\n)*)?/)"


def _harmony(lark: LarkWriter, call: str, *, required: bool, starts_in_reasoning: bool) -> str:
    following = lark.literal(_HARMONY_NEXT)
    channels = '"analysis"' if required else '("analysis" | "commentary")'
    message = f"{lark.literal('<|channel|>')} {channels} {lark.literal('<|message|>')} {lark.text()} {following}"
    begun = f"{lark.text()} {following}" if starts_in_reasoning else ""
    if required:
        return f"{begun} ({message})* {call}"
    final = f"{lark.literal('<|channel|>final<|message|>')} {lark.text()}"
    return f"{begun} ({message})* ({call} | {final})"
