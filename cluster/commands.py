"""The commands that talk to a running deployment: generate, chat, status, drain, stop. The bare client suffices."""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from cluster.admin_token import find_token
from cluster.settling import all_ready, wait_until
from cluster.terminal import TIMING_HEADER, format_decision, format_drain, format_status, format_table, timing_row
from penstock.client import Client, GenerateStream
from penstock.client_auth import ClientTls, auth_metadata
from penstock.completions import ChatMessage, Chunk
from penstock.errors import InvalidInput, PenstockError, Unauthenticated, Unavailable, from_rpc_error
from penstock.secret import ClusterSecret, digest_of, make_api_key, read_private
from penstock.security_config import TENANT_NAME
from penstock.trust import ADMIN
from penstock.v1 import admin_pb2, admin_pb2_grpc

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
_STATUS_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 90.0
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")


def generate(arguments: Namespace) -> int:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    with _client(arguments) as client:
        try:
            sampling = _sampling(arguments)
            with client.generate(prompt, lane=arguments.lane, explain=arguments.explain, **sampling) as stream:
                printed = _print_stream(stream, sys.stdout)
                decision = stream.decision if arguments.explain and not printed.interrupted else None
        except Unavailable as error:
            raise Unavailable(f"{arguments.server}: {error.message}") from error
    if printed.interrupted:
        return INTERRUPTED
    last = printed.last
    if arguments.timing and last is not None and last.timing is not None and last.usage is not None:
        row = timing_row(last.timing, last.usage.completion_tokens)
        print("\n" + format_table(TIMING_HEADER, [row]), file=sys.stderr)
    if decision is not None:
        print("\n" + format_decision(decision), file=sys.stderr)
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
    api_key, tls = arguments.api_key, client_tls(arguments)
    lookaside = getattr(arguments, "lookaside", False)
    return Client(arguments.server, timeout_s=arguments.timeout, api_key=api_key, tls=tls, lookaside=lookaside)


def client_tls(arguments: Namespace) -> ClientTls | None:
    if not (arguments.tls or arguments.ca or arguments.cert):
        return None
    return ClientTls(arguments.ca, arguments.cert, arguments.cert_key, arguments.server_name)


def _answer(client: Client, arguments: Namespace, messages: list[ChatMessage]) -> str | None:
    try:
        with client.generate(messages, lane=arguments.lane, **_sampling(arguments)) as stream:
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
        f'[tenants.{arguments.tenant}]\nkeys = ["{digest_of(key)}"]',
        file=sys.stderr,
    )
    return 0


def status(arguments: Namespace) -> int:
    if arguments.wait is not None:
        with admin_stub(arguments) as (stub, metadata):
            answer = wait_until(stub, metadata, all_ready, arguments.wait)
    else:
        answer = admin_call(arguments, "Status", admin_pb2.StatusRequest(), _STATUS_TIMEOUT_S)
    if arguments.json:
        fields = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        print(json.dumps(fields, indent=2))
    else:
        print(format_status(answer))
    return 0


def stop(arguments: Namespace) -> int:
    admin_call(arguments, "Stop", admin_pb2.StopRequest(), _STOP_TIMEOUT_S)
    print("stopped")
    return 0


def drain(arguments: Namespace) -> int:
    """Prints how far it is; Ctrl-C leaves, and the drain goes on."""
    if (arguments.worker is None) is (arguments.node is None):
        raise InvalidInput("worker", "and --node: give one of the two")
    if arguments.within is not None and (arguments.node is None or arguments.within <= 0):
        raise InvalidInput("within", f"is {arguments.within:g}; give seconds above 0, beside --node")
    if arguments.timeout <= 0:
        raise InvalidInput("timeout", f"is {arguments.timeout:g}; give a number of seconds above 0")
    request = admin_pb2.DrainRequest(worker_id=arguments.worker, timeout_s=arguments.timeout, replace=arguments.replace)

    whole = admin_pb2.DrainNodeRequest(node=arguments.node or "", within_s=arguments.within or 0.0)

    with admin_stub(arguments) as (stub, metadata):
        if arguments.node is not None:
            told = stub.DrainNode(whole, metadata=metadata)
        else:
            told = stub.Drain(request, timeout=arguments.timeout + _STOP_TIMEOUT_S, metadata=metadata)
        for progress in told:
            if arguments.json:
                fields = MessageToDict(
                    progress, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
                )
                print(json.dumps(fields), flush=True)
            else:
                print(format_drain(progress), flush=True)
    return 0


def admin_call(arguments: Namespace, method: str, request: Message, timeout_s: float) -> Any:
    """One call to the Admin service, for one answer."""
    with admin_stub(arguments) as (stub, metadata):
        return getattr(stub, method)(request, timeout=timeout_s, metadata=metadata)


@contextlib.contextmanager
def admin_stub(arguments: Namespace) -> Iterator[tuple[admin_pb2_grpc.AdminStub, Any]]:
    """The Admin service, and the token that the deployment left for this account, or the secret's."""
    address = arguments.admin
    if arguments.secret_file:
        token = ClusterSecret(read_private(arguments.secret_file, "--secret-file")).token(ADMIN)
    else:
        token = find_token(address)
    tls = client_tls(arguments)
    options = tls.options() if tls else None
    with grpc.secure_channel(address, tls.credentials(), options) if tls else grpc.insecure_channel(address) as channel:
        try:
            yield admin_pb2_grpc.AdminStub(channel), auth_metadata(token)
        except grpc.RpcError as error:
            raise _explained(from_rpc_error(error), address) from error


def _explained(error: PenstockError, address: str) -> PenstockError:
    """Says what to do about it here."""
    if type(error) is Unavailable:
        return Unavailable(
            f"no deployment answers at {address}; start one with `penstock serve`, or give its --admin address"
        )
    if isinstance(error, Unauthenticated):
        return Unauthenticated(
            f"{address} wants another token; call from the account that runs the deployment, or give its --secret-file"
        )
    return error
