"""Renders a chat template in a process of its own, under limits: `python -m router.text.template_sandbox`.

A template comes with a checkpoint and is not trusted. jinja2's sandbox keeps it away from the interpreter's internals,
but stops neither endless nested loops nor a string of gigabytes. A timer that ends the process and a bound on its
memory do.

A frame on stdin or stdout is a length (4 bytes, big endian) and that many bytes. In: first the template and its limits,
then a conversation for each rendering (msgpack). Out: for each rendering its text, or the reason why there is none.
Because the process is untrusted, this module must import neither grpc nor anything of penstock.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

import jinja2
import msgpack

from router.text.frames import NICENESS, read_frame, used_bytes, write_frame
from router.text.template_functions import compile_template

# The first byte of an answer. INVALID is followed by a field's name, a line feed and the problem with the field.
RENDERED, REFUSED, INVALID = b"+", b"-", b"!"
TOOL_TEMPLATE = "tool_source"  # key in the first frame: the separate template for conversations with tools

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # its final space shows whether the template trims contents


def main() -> None:
    """Renders until stdin ends, or until the timer ends a rendering and the process with it."""
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    given = msgpack.unpackb(first)
    memory_bytes = used_bytes() + given["max_memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    templates = {name: compile_template(given[name]) for name in ("source", TOOL_TEMPLATE) if given.get(name)}
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        # The default action of SIGALRM ends the process whatever it does, even if the router is gone.
        signal.setitimer(signal.ITIMER_REAL, given["max_s"])
        answer = _render(templates, msgpack.unpackb(frame), given)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(sys.stdout.buffer, answer)


class _InvalidField(Exception):
    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}\n{problem}")


def _render(templates: dict[str, jinja2.Template], conversation: dict[str, Any], given: dict[str, Any]) -> bytes:
    try:
        text = _text_of(templates, conversation, given["special_tokens"])
        if len(text) > given["max_characters"]:
            problem = f"it renders them to {len(text)} characters; the limit is {given['max_characters']}"
            return REFUSED + problem.encode()
        return RENDERED + text.encode()
    except _InvalidField as error:
        return INVALID + str(error).encode(errors="replace")
    except MemoryError:
        return REFUSED + f"it takes more than {given['max_memory_bytes'] >> 20} MiB of memory".encode()
    except Exception as error:  # a template may fail like any program; these messages made it fail
        return REFUSED + str(error).encode(errors="replace")


def _text_of(
    templates: dict[str, jinja2.Template], conversation: dict[str, Any], special_tokens: dict[str, str]
) -> str:
    """Returns the rendered text. Raises _InvalidField, or whatever the template raises."""
    messages, tools = conversation["messages"], conversation["tools"]
    _parse_json(messages, tools)
    template = templates.get(TOOL_TEMPLATE, templates["source"]) if tools else templates["source"]
    last = messages[-1].get("content") if messages else None
    continues = conversation["continue_final_message"]
    if continues:
        if not last:
            raise _InvalidField("messages", "end with a message without content, which cannot be continued")
        messages[-1]["content"] = last + _CONTINUED
    arguments = json.loads(conversation["template_arguments"]) if conversation["template_arguments"] else {}
    text = template.render(
        {
            **special_tokens,
            **arguments,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": conversation["add_generation_prompt"],
        }
    )
    return _cut_after(text, last) if continues and last else text


def _cut_after(text: str, content: str) -> str:
    """Returns the rendering up to the end of the final message's content, as transformers does."""
    at = text.rfind(_CONTINUED.strip())
    if at < 0 or content.strip() not in text:
        raise _InvalidField("continue_final_message", "is not possible: the chat template alters the final message")
    return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()


def _parse_json(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    """Replaces the JSON texts of tools and tool calls by their values, which templates expect.

    Arguments of a call that are not a JSON object stay text, since a model may write anything.
    """
    for number, tool in enumerate(tools):
        function = tool["function"]
        if "parameters" in function:
            parameters = _json_object(function["parameters"])
            if parameters is None:
                raise _InvalidField(f"chat.tools[{number}].parameters", "is not a JSON object; give a JSON schema")
            function["parameters"] = parameters
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            parsed = _json_object(function["arguments"] or "{}")
            function["arguments"] = function["arguments"] if parsed is None else parsed


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


if __name__ == "__main__":
    main()
