"""Renders docs/reference/grpc.md from the protos, comments included."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import google.rpc
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

ROOT = Path(__file__).resolve().parents[4]
FILES = ("inference.proto", "common.proto", "admin.proto")
_HEAD = """\
# gRPC reference

The public services, generated from `proto/penstock/v1` (`python -m tests.support.repository.reference --write`).
`Inference` is served at port 50051 of the routers, `Lookaside` by decode workers at a port of their own, and `Admin` by
the controller at port 50052, for operators alone ([ports](../security.md#ports)). What workers and routers say to each
other (`worker.proto`, `peer.proto`) is internal and changes between snapshots. Errors are gRPC status with
`google.rpc` details.
"""
_TYPES = {
    value: FieldDescriptorProto.Type.Name(value).removeprefix("TYPE_").lower()  # type: ignore[arg-type]
    for value in FieldDescriptorProto.Type.values()
}
Comments = Mapping[tuple[int, ...], str]


def render() -> str:
    """Returns the page."""
    files = [file for file in _compiled().file if Path(file.name).name in FILES]
    files.sort(key=lambda file: FILES.index(Path(file.name).name))
    known = {
        f".{file.package}.{each.name}": each.name for file in files for each in (*file.message_type, *file.enum_type)
    }
    parts = [_HEAD]
    for file in files:
        parts += [f"## {Path(file.name).name}", "", *_file(file, known)]
    return "\n".join(parts).rstrip() + "\n"


def _compiled() -> FileDescriptorSet:
    """Returns the protos with their comments. Raises CalledProcessError if one of them is not valid.

    The compiler has a process of its own: in one process with it, NIXL's library aborts while it is loaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "set")
        includes = (ROOT / "proto", Path(next(iter(google.rpc.__path__))).parents[1])
        names = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
        flags = ["--include_source_info", "--include_imports", f"--descriptor_set_out={target}"]
        command = [sys.executable, "-m", "grpc_tools.protoc", *(f"-I{path}" for path in includes)]
        subprocess.run([*command, *flags, *names], check=True, timeout=60)
        return FileDescriptorSet.FromString(target.read_bytes())


def _file(file: FileDescriptorProto, known: Mapping[str, str]) -> Iterator[str]:
    comments = {
        tuple(at.path): " ".join(f"{at.leading_comments} {at.trailing_comments}".split())
        for at in file.source_code_info.location
    }
    for index, service in enumerate(file.service):
        yield from (f"### {service.name} (service)", "")
        if about := comments.get((6, index)):
            yield from (about, "")
        yield from ("| call | takes | answers | effect |", "|---|---|---|---|")
        for number, call in enumerate(service.method):
            takes = ("stream of " if call.client_streaming else "") + _link(call.input_type, known)
            answers = ("stream of " if call.server_streaming else "") + _link(call.output_type, known)
            yield f"| `{call.name}` | {takes} | {answers} | {_cell(comments.get((6, index, 2, number), ''))} |"
        yield ""
    for index, message in enumerate(file.message_type):
        yield from _message(message, (4, index), comments, known)
    for index, enum in enumerate(file.enum_type):
        yield from _enum(enum, (5, index), comments)


def _message(
    message: DescriptorProto, path: tuple[int, ...], comments: Comments, known: Mapping[str, str]
) -> Iterator[str]:
    yield from (f"### {message.name}", "")
    if about := comments.get(path):
        yield from (about, "")
    if not message.field:
        yield from ("No fields.", "")
        return
    entries = {each.name: each for each in message.nested_type if each.options.map_entry}
    yield from ("| field | number | type | meaning |", "|---|---|---|---|")
    for index, field in enumerate(message.field):
        entry = entries.get(field.type_name.rsplit(".", 1)[-1])
        if entry is not None:
            kind = f"map of {_kind(entry.field[0], known)} to {_kind(entry.field[1], known)}"
        else:
            kind = _kind(field, known)
            if field.label == FieldDescriptorProto.LABEL_REPEATED:
                kind = f"list of {kind}"
            elif field.proto3_optional:
                kind = f"{kind}, optional"
            elif field.HasField("oneof_index"):
                kind = f"{kind}, of `{message.oneof_decl[field.oneof_index].name}`"
        yield f"| `{field.name}` | {field.number} | {kind} | {_cell(comments.get((*path, 2, index), ''))} |"
    yield ""


def _enum(enum: EnumDescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield from (f"### {enum.name}", "")
    if about := comments.get(path):
        yield from (about, "")
    yield from ("| value | number | meaning |", "|---|---|---|")
    for index, value in enumerate(enum.value):
        yield f"| `{value.name}` | {value.number} | {_cell(comments.get((*path, 2, index), ''))} |"
    yield ""


def _kind(field: FieldDescriptorProto, known: Mapping[str, str]) -> str:
    return _link(field.type_name, known) if field.type_name else _TYPES[field.type]


def _link(name: str, known: Mapping[str, str]) -> str:
    return f"[{known[name]}](#{known[name].lower()})" if name in known else f"`{name.rsplit('.', 1)[-1]}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
