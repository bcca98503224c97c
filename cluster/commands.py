"""The commands that talk to a running deployment: generate, chat, status, stop. They need the bare client alone."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import grpc
from google.protobuf.json_format import MessageToDict

from cluster.terminal import TIMING_HEADER, format_status, format_table, timing_row
from penstock.client import Client, GenerateStream
from penstock.client_auth import ClientTls
from penstock.completions import ChatMessage, Chunk
from penstock.errors import InvalidInput, PenstockError, Unavailable, from_rpc_error
from penstock.secret import digest_of, make_api_key
from penstock.security_config import TENANT_NAME
from penstock.v1 import admin_pb2, admin_pb2_grpc

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
_STATUS_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 90.0
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")


def generate(arguments: Namespace) -> int:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    with _client(arguments) as client:
        try:
            with client.generate(prompt, **_sampling(arguments)) as stream:
                printed = _print_stream(stream, sys.stdout)
        except Unavailable as error:
            raise Unavailable(f"{arguments.server}: {error.message}") from error
    if printed.interrupted:
        return INTERRUPTED
    last = printed.last
    if arguments.timing and last is not None and last.timing is not None and last.usage is not None:
        row = timing_row(last.timing, last.usage.completion_tokens)
        print("\n" + format_table(TIMING_HEADER, [row]), file=sys.stderr)
    return 0


def chat(arguments: Namespace) -> int:
    """Reads a line, streams the answer, remembers both. Ctrl-C ends the answer, Ctrl-D the conversation."""
    messages: list[ChatMessage] = []
    if arguments.system:
        messages.append({"role": "system", "content": arguments.system})
    with _client(arguments) as client:
        while True:
            try:
                line = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
            if not line:
                continue
            messages.append({"role": "user", "content": line})
            answer = _answer(client, arguments, messages)
            if answer is None:
                messages.pop()  # a turn that failed is not part of the conversation
            else:
                messages.append({"role": "assistant", "content": answer})


def _client(arguments: Namespace) -> Client:
    tls = None
    if arguments.tls or arguments.ca or arguments.cert:
        tls = ClientTls(arguments.ca, arguments.cert, arguments.cert_key)
    return Client(arguments.server, timeout_s=arguments.timeout, api_key=arguments.api_key, tls=tls)


def _answer(client: Client, arguments: Namespace, messages: list[ChatMessage]) -> str | None:
    try:
        with client.generate(messages, **_sampling(arguments)) as stream:
            return _print_stream(stream, sys.stdout).text
    except PenstockError as error:
        print(error.message, file=sys.stderr)
        return None


def _sampling(arguments: Namespace) -> dict[str, Any]:
    return {name: value for name in _SAMPLING if (value := getattr(arguments, name, None)) is not None}


@dataclass(frozen=True, slots=True)
class _Printed:
    text: str
    last: Chunk | None
    interrupted: bool  # by Ctrl-C, which cancelled the call


def _print_stream(stream: GenerateStream, out: TextIO) -> _Printed:
    """Prints text as it comes."""
    texts: list[str] = []
    last, interrupted = None, False
    try:
        for chunk in stream:
            last = chunk
            texts.append(chunk.text)
            print(chunk.text, end="", file=out, flush=True)
    except KeyboardInterrupt:
        stream.close()
        interrupted = True
    print(file=out)
    return _Printed("".join(texts), last, interrupted)


def new_key(arguments: Namespace) -> int:
    """Prints a new key once; nothing keeps it."""
    if not TENANT_NAME.fullmatch(arguments.tenant):
        raise InvalidInput("tenant", f"is {arguments.tenant!r}; give letters, digits, '-' and '_', 64 at most")
    key = make_api_key()
    print(key)
    print(
        f"The key of tenant {arguments.tenant}; it is shown this once. The configuration holds its digest:\n\n"
        f'[router.tenants.{arguments.tenant}]\nkeys = ["{digest_of(key)}"]',
        file=sys.stderr,
    )
    return 0


def status(arguments: Namespace) -> int:
    answer = _admin(arguments.admin, lambda stub: stub.Status(admin_pb2.StatusRequest(), timeout=_STATUS_TIMEOUT_S))
    if arguments.json:
        fields = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        print(json.dumps(fields, indent=2))
    else:
        print(format_status(answer))
    return 0


def stop(arguments: Namespace) -> int:
    _admin(arguments.admin, lambda stub: stub.Stop(admin_pb2.StopRequest(), timeout=_STOP_TIMEOUT_S))
    print("stopped")
    return 0


def _admin(address: str, call: Callable[[admin_pb2_grpc.AdminStub], Any]) -> Any:
    with grpc.insecure_channel(address) as channel:
        try:
            return call(admin_pb2_grpc.AdminStub(channel))
        except grpc.RpcError as error:
            typed = from_rpc_error(error)
            if type(typed) is Unavailable:
                raise Unavailable(
                    f"no deployment answers at {address}; start one with `penstock serve`, or give its --admin address"
                ) from error
            raise typed from error
