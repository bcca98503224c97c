"""Renders a chat template in a process of its own, under limits: `python -m router.text.template_sandbox`.

A template comes with a checkpoint and is not trusted. jinja2's sandbox keeps it away from the interpreter's internals,
but stops neither endless nested loops nor a string of gigabytes. A timer that ends the process and a bound on its
memory do.

Frames on stdin and stdout are a length (4 bytes, big endian) and as many bytes. In: first the template and its limits,
then a list of messages for each rendering (msgpack). Out: for each rendering its text, or the reason why there is none.
Whatever this module imports is in the untrusted process too; hence neither grpc nor anything of penstock.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import IO, Any, NoReturn

import jinja2
import msgpack
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDERED, REFUSED = b"+", b"-"  # the first byte of an answer

_LENGTH = struct.Struct(">I")


def compile_template(source: str) -> jinja2.Template:
    """Runs nothing of the template, not even its constant expressions. Raises jinja2.TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols],
        undefined=jinja2.Undefined,
        optimized=False,
        finalize=_as_it_is,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def write_frame(stream: IO[bytes], data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Returns None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


def main() -> None:
    """Renders until stdin ends, or until the timer ends a rendering and the process with it."""
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    given = msgpack.unpackb(first)
    memory_bytes = _used_bytes() + given["max_memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template = compile_template(given["source"])
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        # The default action of SIGALRM ends the process wherever it is, even after its router has gone.
        signal.setitimer(signal.ITIMER_REAL, given["max_s"])
        answer = _render(template, msgpack.unpackb(frame), given)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(sys.stdout.buffer, answer)


def _render(template: jinja2.Template, messages: list[dict[str, str]], given: dict[str, Any]) -> bytes:
    try:
        text = template.render(messages=messages, add_generation_prompt=True, **given["special_tokens"])
        if len(text) > given["max_characters"]:
            return REFUSED + f"it made {len(text)} characters of them, of at most {given['max_characters']}".encode()
        return RENDERED + text.encode()
    except MemoryError:
        return REFUSED + f"it took more than {given['max_memory_bytes'] >> 20} MiB of memory".encode()
    except Exception as error:  # a template may fail like any program; these messages made it fail
        return REFUSED + str(error).encode(errors="replace")


def _used_bytes() -> int:
    """Returns the bytes of address space in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@jinja2.pass_context
def _as_it_is(_: object, value: object) -> object:
    """Demands the context, so that jinja2 evaluates constants when it renders and not when it compiles."""
    return value


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


if __name__ == "__main__":
    main()
