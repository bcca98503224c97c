"""Compiles grammars in a process of its own, under limits: `python -m router.text.grammar_sandbox`.

The grammar library's own limits do not bound every grammar, and a thread inside the library cannot be stopped. So each
grammar is compiled by a fork of this process, under a timer of processor time that ends the fork. The fork inherits the
tokens' trie, which takes up to a second to build; this process itself compiles nothing and goes on.

A frame on stdin or stdout is a length (4 bytes, big endian) and that many bytes. In: first the checkpoint's folder, the
vocabulary size and the limits, then one grammar for each compilation (msgpack). Out: `READY` once the trie is built,
then for each grammar `VALID` or the reason why it is refused.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from typing import Any, NoReturn

import msgpack

from penstock.errors import CheckpointError, InvalidInput
from penstock.text.grammars import GrammarCompiler
from penstock.types import Grammar, GrammarKind
from router.text.frames import NICENESS, read_frame, used_bytes, write_frame

# The first byte of an answer. The problem with the grammar follows REFUSED, that with the checkpoint UNKNOWN.
READY, VALID, REFUSED, UNKNOWN = b"=", b"+", b"-", b"!"


def main() -> None:
    """Compiles grammars until stdin ends."""
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    given = msgpack.unpackb(first)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal also interrupts the router, which then closes stdin
    compiler = GrammarCompiler(given["folder"], given["vocab_size"])
    with contextlib.suppress(CheckpointError):  # raised again, and reported, for each grammar
        compiler.prepare()
    write_frame(sys.stdout.buffer, READY)
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        kind, source = msgpack.unpackb(frame)
        child = os.fork()
        if child == 0:
            _compile(compiler, Grammar(GrammarKind(kind), source), given)
        _, status = os.waitpid(child, 0)  # bounded by the fork's timer and memory limit
        code = os.waitstatus_to_exitcode(status)
        if code:
            write_frame(sys.stdout.buffer, REFUSED + _explain(code, given).encode())


def _compile(compiler: GrammarCompiler, grammar: Grammar, given: dict[str, Any]) -> NoReturn:
    """Writes the answer and ends the fork with status 0. A fork that exceeds a limit ends without writing an answer,
    and with another status.
    """
    memory_bytes = used_bytes() + given["max_memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # The default action of SIGPROF ends the fork whatever it does.
    signal.setitimer(signal.ITIMER_PROF, given["max_cpu_s"])
    answer = VALID
    try:
        compiler.compile(grammar)
    except InvalidInput as error:
        answer = REFUSED + error.problem.encode(errors="replace")
    except CheckpointError as error:
        answer = UNKNOWN + error.message.encode(errors="replace")
    except MemoryError:
        os._exit(1)
    signal.setitimer(signal.ITIMER_PROF, 0)
    write_frame(sys.stdout.buffer, answer)
    os._exit(0)


def _explain(code: int, given: dict[str, Any]) -> str:
    if code == -signal.SIGPROF:
        return f"takes more than {given['max_cpu_s'] * 1e3:g} ms of processor time to compile; simplify it"
    return f"does not compile within {given['max_memory_bytes'] >> 20} MiB of memory; simplify it"


if __name__ == "__main__":
    main()
