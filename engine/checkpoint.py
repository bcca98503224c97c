"""The safetensors files of a checkpoint folder: which there are, what each holds, and one name for all of it.

Torch-free: reads headers and samples, never whole tensors. `engine.weights` loads the tensors themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from engine.weight_forms import Form, find_forms
from engine.weight_scheme import WeightScheme
from penstock.errors import CheckpointError

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_METADATA = "__metadata__"  # an entry of headers that is no tensor
_MAX_HEADER_BYTES = 100 * 1024 * 1024  # the safetensors format's own limit
_SAMPLES = 16  # of each file, evenly spread: hashing all would take minutes
_SAMPLE_BYTES = 4096
_MAX_TENSOR_SAMPLES = 4096  # one of each tensor, of so many: some fine-tunes change a few tensors, but those throughout
_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"  # old exports store what the configuration already says


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    dtype: str  # safetensors' names: BF16, F16, F32, ...
    shape: tuple[int, ...]
    num_bytes: int
    offset: int  # of its first byte in the file


def list_weight_files(folder: Path) -> list[Path]:
    """Every shard that the index names, or the single file. Raises CheckpointError where one is missing."""
    index = folder / INDEX_FILE
    if not index.exists():
        single = folder / SINGLE_FILE
        if not single.exists():
            raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; give safetensors weights")
        return [single]
    files = [folder / name for name in sorted(set(_read_weight_map(index).values()))]
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file} is missing, though {INDEX_FILE} names it; fetch the checkpoint again")
    return files


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}; fetch the checkpoint again") from error
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:  # a path would reach outside the folder
            raise CheckpointError(f"{index}: weight_map holds {name!r}; names of files in the same folder are needed")
    return weight_map


def read_headers(files: list[Path]) -> dict[str, StoredTensor]:
    """Name to place of every stored tensor. Raises CheckpointError on a file that is cut short or no safetensors."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        header, data_start = _read_header(file)
        data_bytes = file.stat().st_size - data_start
        for name, entry in header.items():
            if name == _METADATA:
                continue
            begin, end = entry["data_offsets"]
            if end > data_bytes:
                raise CheckpointError(
                    f"{file} is cut short: {name} ends at byte {end} of {data_bytes}; fetch the file again"
                )
            tensors[name] = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), end - begin, data_start + begin)
    return tensors


def check_tensors(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    optional: frozenset[str],
    scheme: WeightScheme | None = None,
) -> tuple[dict[str, StoredTensor], dict[str, Form]]:
    """What the folder stores, where that is `expected`, name to shape, and beyond it `optional` at most,
    names or beginnings of names that end with a dot; and what stands for each product that is stored quantized, as
    `scheme` has it. Raises CheckpointError."""
    stored = read_headers(list_weight_files(folder))
    prefixes = tuple(name for name in optional if name.endswith("."))
    forms = find_forms(scheme, stored, expected)
    of_forms = {f"{path}.{suffix}" for path, form in forms.items() for suffix in form}
    missing = sorted(set(expected) - set(stored) - {f"{path}.weight" for path in forms})
    if missing:
        raise CheckpointError(
            f"{folder}: tensor {missing[0]} ({len(missing)} in all) is missing; config.json and the weights must be of "
            "one checkpoint"
        )
    for name, tensor in stored.items():
        if name in of_forms and name not in expected:
            continue
        if name not in expected:
            if name in optional or name.startswith(prefixes) or name.endswith(_DERIVED_SUFFIX):
                continue
            raise CheckpointError(
                f"{tensor.file}: tensor {name} of shape {list(tensor.shape)} is not part of the model that config.json "
                "describes; give the config.json that belongs to these weights"
            )
        if tensor.shape != expected[name]:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(expected[name])}; both must be of one checkpoint"
            )
        if tensor.dtype not in _FLOAT_DTYPES and name not in of_forms:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} is stored as {tensor.dtype}; give unquantized weights "
                f"({', '.join(_FLOAT_DTYPES)}), or the quantization_config that belongs to these"
            )
    return stored, forms


def checkpoint_revision(folder: Path) -> str:
    """Digest of config.json and, for each weight file, its size, its header and samples of its data, some of them from
    the middle of a tensor."""
    digest = blake2b(digest_size=16, person=b"penstock-model")
    digest.update((folder / CONFIG_FILE).read_bytes())
    headers = {file: _read_header(file) for file in list_weight_files(folder)}
    sampled = _sampled(name for header, _ in headers.values() for name in header if name != _METADATA)
    for file, (header, data_start) in headers.items():
        size = file.stat().st_size
        digest.update(f"{file.name} {size} {json.dumps(header, sort_keys=True)}".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(data_start + (size - data_start) * sample // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
            for name in sorted(sampled & header.keys()):
                begin, end = header[name]["data_offsets"]
                middle = (begin + end) // 2
                stream.seek(data_start + middle)
                digest.update(stream.read(min(_SAMPLE_BYTES, end - middle)))
    return digest.hexdigest()


def _sampled(names: Iterable[str]) -> set[str]:
    """Tensors to take a sample of: all, or those of experts last, of whom any are as good as others."""
    found = list(names)
    if len(found) > _MAX_TENSOR_SAMPLES:
        found.sort(key=lambda name: (".experts." in name, blake2b(name.encode(), digest_size=8).digest()))
    return set(found[:_MAX_TENSOR_SAMPLES])


def checkpoint_writes(folder: Path) -> str:
    """Which weight files of this host these are, and when each was last written: a revision samples their data, and one
    tensor that was changed may lie between two samples."""
    found = [file.stat() for file in list_weight_files(folder)]
    return " ".join(f"{one.st_dev}:{one.st_ino}:{one.st_mtime_ns}" for one in found)


def _read_header(file: Path) -> tuple[dict, int]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(_read_exactly(stream, 8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(_read_exactly(stream, length))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is no safetensors file: {error}; fetch the file again") from error
    return header, 8 + length


def _read_exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise ValueError(f"it ends after {len(data)} of {count} bytes")
    return data
