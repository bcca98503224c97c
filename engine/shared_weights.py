"""One copy of the weights for all replicas on a host that compute on CPUs: packed once, mapped by all.

The first replica reads and packs as ever, then moves each tensor into a file in memory (`engine.host_files`) and keeps
the mapping. The next ones build the model of tensors without values (torch's meta device), so that they read and pack
nothing, and put the mapped ones in their places. Both walk the same objects in the same order; a file whose tensors are
not those that the model asks for is left alone.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from engine.host_files import HostFile, open_host_file
from engine.layers import packed_blob
from engine.layers.linear import Linear

log = logging.getLogger(__name__)

_LABEL = "penstock-weights"
_ALIGN = 4096
_LENGTH_BYTES = 8  # of the index, at the file's end
_ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model holds a tensor."""

    path: str
    tensor: torch.Tensor
    put: Callable[[torch.Tensor], None]


def places(root: object) -> Iterator[Place]:
    """Every tensor of the objects of this package beneath `root`, in the order in which they were made."""
    return _places(root, "", set())


def _places(node: object, path: str, seen: set[int]) -> Iterator[Place]:
    if id(node) in seen:
        return
    seen.add(id(node))
    for name, value in _children(node):
        where = f"{path}.{name}"
        if isinstance(value, torch.Tensor):
            yield Place(where, value, lambda tensor, name=name: _put(node, name, tensor))  # type: ignore[misc]
        elif isinstance(value, tuple) and any(isinstance(one, torch.Tensor) for one in value):
            for index, one in enumerate(value):
                yield Place(f"{where}.{index}", one, lambda tensor, n=name, i=index: _put_into(node, n, i, tensor))  # type: ignore[misc]
        else:
            yield from _places(value, where, seen)


def _children(node: object) -> Iterator[tuple[str, Any]]:
    if isinstance(node, list | tuple):
        yield from ((str(index), value) for index, value in enumerate(node))
    elif isinstance(node, dict):
        yield from ((str(key), value) for key, value in node.items())
    elif type(node).__module__.startswith("engine."):
        names = [*getattr(node, "__dict__", {}), *getattr(type(node), "__slots__", ())]
        yield from [(name, getattr(node, name)) for name in names if hasattr(node, name)]


def _put(node: object, name: str, tensor: torch.Tensor) -> None:
    if isinstance(node, list):
        node[int(name)] = tensor
    elif isinstance(node, dict):
        node[name] = tensor
    else:
        object.__setattr__(node, name, tensor)  # of frozen ones too: nobody else has them yet


def _put_into(node: object, name: str, index: int, tensor: torch.Tensor) -> None:
    held = getattr(node, name)
    object.__setattr__(node, name, (*held[:index], tensor, *held[index + 1 :]))


def linears(root: object, path: str = "") -> Iterator[tuple[str, Linear]]:
    for name, value in _children(root):
        if isinstance(value, Linear):
            yield f"{path}.{name}", value
        elif not isinstance(value, torch.Tensor):
            yield from linears(value, f"{path}.{name}")


def load_shared(
    key: str, lock_path: Path, build: Callable[[], object], build_blank: Callable[[], object]
) -> tuple[object, bool]:
    """The model, and whether its weights were there already. `key` says all that the weights depend on; `build` reads
    them, `build_blank` makes the same model of meta tensors. Blocks."""
    file = open_host_file(f"{_LABEL}-{_digest(key)}", lock_path)
    if file is None:
        return build(), False
    try:
        if not file.is_mine:
            model = _map(file, build_blank)
            return (model, True) if model is not None else (build(), False)
        model = build()
        try:
            _move(file, model)
        except (OSError, RuntimeError) as error:  # torch says RuntimeError where it cannot map
            log.warning("no other replica can share these weights, this one keeps its own: %s", error)
        return model, False
    finally:
        file.close()


def _digest(key: str) -> str:
    """Of the key, and of what decides how weights are laid out: this package's files and torch."""
    digest = blake2b(f"{key} {torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode(), digest_size=16)
    for file in sorted(_ROOT.rglob("*")):
        if file.suffix in (".py", ".cpp", ".h"):
            status = file.stat()
            digest.update(f"{file} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


def _move(file: HostFile, model: object) -> None:
    """Each tensor of the model into the file, one after the other: at most one is there twice. An error leaves the
    model whole, some of it in the file, which is nobody else's then."""
    entries, offset = [], 0
    for place in places(model):
        blob = packed_blob.describe(place.tensor)
        entries.append({"path": place.path, "offset": offset, **blob})
        offset += -(-blob["bytes"] // _ALIGN) * _ALIGN
    index = json.dumps({"linears": {path: one.layout for path, one in linears(model)}, "tensors": entries}).encode()
    os.ftruncate(file.fd, offset)
    _write(file.fd, memoryview(index + len(index).to_bytes(_LENGTH_BYTES, "little")), offset)
    mapped = _mapping(file.fd)
    for place, entry in zip(list(places(model)), entries, strict=True):
        _write(file.fd, packed_blob.content(place.tensor), entry["offset"])
        place.put(packed_blob.on_memory(mapped, entry))
    file.finish()
    weakref.finalize(mapped.untyped_storage(), os.close, file.detach())


def _map(file: HostFile, build_blank: Callable[[], object]) -> object | None:
    """None where the file does not hold what the model asks for."""
    size = os.fstat(file.fd).st_size
    length = int.from_bytes(os.pread(file.fd, _LENGTH_BYTES, size - _LENGTH_BYTES), "little")
    index = json.loads(os.pread(file.fd, length, size - _LENGTH_BYTES - length))
    try:
        model = build_blank()
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        log.warning("this model cannot be laid out without its values, hence it is not shared: %r", error)
        return None
    for path, one in linears(model):
        one.become(index["linears"].get(path, {"kind": "plain"}))
    wanted = list(places(model))
    found = {entry["path"]: entry for entry in index["tensors"]}
    told = [(path, tuple(entry["shape"]), entry["dtype"]) for path, entry in found.items()]
    if told != [(one.path, tuple(one.tensor.shape), str(one.tensor.dtype)) for one in wanted]:
        log.warning("the weights that other replicas share are not laid out as this one needs them: it loads its own")
        return None
    mapped = _mapping(file.fd)
    for place in wanted:
        place.put(packed_blob.on_memory(mapped, found[place.path]))
    weakref.finalize(mapped.untyped_storage(), os.close, file.detach())
    return model


def _mapping(fd: int) -> torch.Tensor:
    """Its bytes. What writes there gets a page of its own, and nobody does."""
    size = os.fstat(fd).st_size
    return torch.from_file(f"/proc/self/fd/{fd}", shared=False, size=size, dtype=torch.uint8)


def _write(fd: int, data: memoryview | ctypes.Array[ctypes.c_char], offset: int) -> None:
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
