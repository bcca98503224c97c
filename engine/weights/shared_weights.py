"""Shares one copy of the weights among all CPU replicas of a host: the first packs them, the others map them.

The first replica reads and packs its weights as usual, then moves each tensor into an in-memory file
(`engine.weights.memory_files`) and maps it. Later replicas build the model from tensors without values (torch's meta
device), so they read and pack nothing, and put the mapped tensors in their places. Both walk the same objects in the
same order. A file whose tensors differ from what the model needs is not used.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from engine.weights import tensor_bytes
from engine.weights.memory_files import MemoryFile, open_memory_file

log = logging.getLogger(__name__)

_LABEL = "penstock-weights"
_ALIGN = 4096
_LENGTH_BYTES = 8  # of the index, at the file's end
_ROOT = Path(__file__).resolve().parents[1]


@runtime_checkable
class LaidOut(Protocol):
    """A product whose weight is laid out for the machine (`engine.layers.linear.Linear`)."""

    @property
    def layout(self) -> dict[str, Any]: ...

    def apply_layout(self, layout: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A place in a model that holds a tensor."""

    path: str
    tensor: torch.Tensor
    put: Callable[[torch.Tensor], None]


def places(root: object) -> Iterator[TensorPlace]:
    """Yields every tensor held by this package's objects below `root`, in the order in which they were made."""
    return _places(root, "", set())


def walk(root: object) -> Iterator[tuple[str, object]]:
    """Yields every object of this package below `root`, lists and dicts included, with its path."""
    seen: set[int] = set()
    left: list[tuple[str, object]] = [("", root)]
    while left:
        path, node = left.pop()
        if id(node) in seen or isinstance(node, torch.Tensor):
            continue
        seen.add(id(node))
        yield path, node
        left += [(f"{path}.{name}", value) for name, value in _children(node)]


def _places(node: object, path: str, seen: set[int]) -> Iterator[TensorPlace]:
    if id(node) in seen:
        return
    seen.add(id(node))
    for name, value in _children(node):
        where = f"{path}.{name}"
        if isinstance(value, torch.Tensor):
            yield TensorPlace(where, value, lambda tensor, name=name: _put(node, name, tensor))  # type: ignore[misc]
        elif isinstance(value, tuple) and any(isinstance(item, torch.Tensor) for item in value):
            for index, item in enumerate(value):
                yield TensorPlace(
                    f"{where}.{index}",
                    item,
                    lambda tensor, n=name, i=index: _put_into(node, n, i, tensor),  # type: ignore[misc]
                )
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
        object.__setattr__(node, name, tensor)  # also into frozen objects: the model is not in use yet


def _put_into(node: object, name: str, index: int, tensor: torch.Tensor) -> None:
    held = getattr(node, name)
    object.__setattr__(node, name, (*held[:index], tensor, *held[index + 1 :]))


def linears(root: object, path: str = "") -> Iterator[tuple[str, LaidOut]]:
    """Yields every product below `root` with its path."""
    for name, value in _children(root):
        if isinstance(value, torch.Tensor):
            continue
        if isinstance(value, LaidOut):
            yield f"{path}.{name}", value
        else:
            yield from linears(value, f"{path}.{name}")


def load_shared(
    key: str, lock_path: Path, build: Callable[[], object], build_blank: Callable[[], object]
) -> tuple[object, bool]:
    """Returns the model, and whether another replica had its weights. Blocks.

    `key` names everything that the weights depend on; `build` reads them, `build_blank` builds the same model from meta
    tensors. `lock_path` is a file that all replicas can open."""
    file = open_memory_file(f"{_LABEL}-{_digest(key)}", lock_path)
    if file is None:
        return build(), False
    try:
        if not file.is_mine:
            model = _map(file, build_blank)
            return (model, True) if model is not None else (build(), False)
        model = build()
        try:
            _move(file, model)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError where it cannot map
            log.warning("these weights cannot be shared, this replica keeps its own copy: %s", error)
        return model, False
    finally:
        file.close()


def _digest(key: str) -> str:
    """Returns a digest of the key and of what decides how weights are laid out: this package's files and torch."""
    digest = blake2b(f"{key} {torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode(), digest_size=16)
    for file in sorted(_ROOT.rglob("*")):
        if file.suffix in (".py", ".cpp", ".h"):
            status = file.stat()
            digest.update(f"{file} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


def _move(file: MemoryFile, model: object) -> None:
    """Moves the model's tensors into the file one by one, so that at most one is in memory twice. After an error the
    model is still whole, with some tensors in the file, which no other replica will use."""
    entries, offset = [], 0
    for place in places(model):
        described = tensor_bytes.describe(place.tensor)
        entries.append({"path": place.path, "offset": offset, **described})
        offset += -(-described["bytes"] // _ALIGN) * _ALIGN
    layouts = {path: linear.layout for path, linear in linears(model)}
    index = json.dumps({"linears": layouts, "tensors": entries}).encode()
    os.ftruncate(file.fd, offset)
    _write(file.fd, memoryview(index + len(index).to_bytes(_LENGTH_BYTES, "little")), offset)
    mapped = _mapping(file.fd)
    for place, entry in zip(list(places(model)), entries, strict=True):
        _write(file.fd, tensor_bytes.content(place.tensor), entry["offset"])
        place.put(tensor_bytes.on_memory(mapped, entry))
    file.finish()
    weakref.finalize(mapped.untyped_storage(), os.close, file.detach())


def _map(file: MemoryFile, build_blank: Callable[[], object]) -> object | None:
    """Returns the model over the file's tensors, or None if the file does not hold what the model asks for."""
    size = os.fstat(file.fd).st_size
    length = int.from_bytes(os.pread(file.fd, _LENGTH_BYTES, size - _LENGTH_BYTES), "little")
    index = json.loads(os.pread(file.fd, length, size - _LENGTH_BYTES - length))
    try:
        model = build_blank()
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        log.warning("this model cannot be built without its values, so its weights are not shared: %r", error)
        return None
    for path, linear in linears(model):
        linear.apply_layout(index["linears"].get(path, {"kind": "plain"}))
    wanted = list(places(model))
    found = {entry["path"]: entry for entry in index["tensors"]}
    stored = [(path, tuple(entry["shape"]), entry["dtype"]) for path, entry in found.items()]
    if stored != [(place.path, tuple(place.tensor.shape), str(place.tensor.dtype)) for place in wanted]:
        log.warning("the shared weights are laid out differently from what this replica needs: it loads its own")
        return None
    mapped = _mapping(file.fd)
    for place in wanted:
        place.put(tensor_bytes.on_memory(mapped, found[place.path]))
    weakref.finalize(mapped.untyped_storage(), os.close, file.detach())
    return model


def _mapping(fd: int) -> torch.Tensor:
    """Returns the file's bytes. The mapping is copy-on-write, though nothing writes to it."""
    size = os.fstat(fd).st_size
    return torch.from_file(f"/proc/self/fd/{fd}", shared=False, size=size, dtype=torch.uint8)


def _write(fd: int, data: memoryview | ctypes.Array[ctypes.c_char], offset: int) -> None:
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
