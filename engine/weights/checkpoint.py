"""Lists and checks the safetensors files of a checkpoint folder, and computes the revision that names their content.

Torch-free: reads headers and samples, never whole tensors. `engine.weights.reader` loads the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from engine.weights.quantization_config import WeightScheme
from engine.weights.quantized_layouts import QuantizedLayout, find_layouts
from penstock.errors import CheckpointError

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_METADATA = "__metadata__"  # a header entry that is not a tensor
_MAX_HEADER_BYTES = 100 * 1024 * 1024  # the safetensors format's own limit
_SAMPLES = 16  # per file, evenly spread: hashing everything would take minutes
_SAMPLE_BYTES = 4096
# Also one sample per tensor, for so many tensors: some fine-tunes change a few tensors, but change those throughout.
_MAX_TENSOR_SAMPLES = 4096
CODE_SUFFIXES = ("_blocks", "_scales")  # of stacked experts in MXFP4: bytes
_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
# How multi-modal folders name the tensors of their language model, and its own names for them.
_LANGUAGE_MODEL = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"  # stored by old exports, though it follows from the configuration


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    name: str  # in the file
    dtype: str  # safetensors' names: BF16, F16, F32, ...
    shape: tuple[int, ...]
    num_bytes: int
    offset: int  # of its first byte in the file


def has_weight_files(folder: Path) -> bool:
    """Returns whether the folder holds weights, or an index of them."""
    return any((folder / name).exists() for name in (INDEX_FILE, SINGLE_FILE))


def list_weight_files(folder: Path) -> list[Path]:
    """Returns every file that the index names, or the single file. Raises CheckpointError if a file is missing."""
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


def model_name(stored: str) -> str:
    """Returns the model's name of a tensor or a module, given the one that a checkpoint or an adapter has for it."""
    return next(
        (own + stored.removeprefix(start) for start, own in _LANGUAGE_MODEL if stored.startswith(start)), stored
    )


def read_headers(files: list[Path]) -> dict[str, StoredTensor]:
    """Returns every stored tensor by its name in the model. Raises CheckpointError for a truncated or invalid
    safetensors file."""
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
            own = model_name(name)
            if own in tensors:
                raise CheckpointError(f"{file}: {name} and {tensors[own].name} are one tensor; store only one of them")
            place = (end - begin, data_start + begin)
            tensors[own] = StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]), *place)
    return tensors


def check_tensors(
    folder: Path, expected: Mapping[str, tuple[int, ...]], optional: frozenset[str], scheme: WeightScheme | None = None
) -> tuple[dict[str, StoredTensor], dict[str, QuantizedLayout]]:
    """Returns the stored tensors by name, and the layout of each weight that `scheme` stores quantized, by path.

    Raises CheckpointError as `check_stored`, or if the files cannot be read."""
    stored = read_headers(list_weight_files(folder))
    return stored, check_stored(folder, stored, expected, optional, scheme)


def check_stored(
    source: Path,
    stored: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    optional: frozenset[str],
    scheme: WeightScheme | None = None,
) -> dict[str, QuantizedLayout]:
    """Returns the layout of each weight that `scheme` stores quantized, by path.

    Raises CheckpointError unless `source` stores exactly `expected` (name to shape) and at most `optional` besides:
    names, or prefixes of names that end with a dot."""
    prefixes = tuple(name for name in optional if name.endswith("."))
    layouts = find_layouts(scheme, stored, expected)
    quantized = {f"{path}.{suffix}" for path, layout in layouts.items() for suffix in layout}
    missing = sorted(set(expected) - set(stored) - {f"{path}.weight" for path in layouts})
    if missing:
        raise CheckpointError(
            f"{source}: tensor {missing[0]} ({len(missing)} in all) is missing; config.json and the weights must be of "
            "one checkpoint"
        )
    for name, tensor in stored.items():
        if name in quantized and name not in expected:
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
        known = ("U8",) if name.endswith(CODE_SUFFIXES) else _FLOAT_DTYPES
        if tensor.dtype not in known and name not in quantized:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} is stored as {tensor.dtype}; give unquantized weights "
                f"({', '.join(_FLOAT_DTYPES)}), or the quantization_config that belongs to these"
            )
    return layouts


def checkpoint_revision(folder: Path) -> str:
    """Returns a digest of config.json and of each weight file's size, header and data samples, some of which are taken
    from the middle of a tensor."""
    digest = blake2b(digest_size=16, person=b"penstock-model")
    digest.update((folder / CONFIG_FILE).read_bytes())
    _digest_files(digest, folder)
    return digest.hexdigest()


def weights_digest(folder: Path) -> str:
    """Returns the part of `checkpoint_revision` that depends on the weight files. Raises CheckpointError."""
    digest = blake2b(digest_size=16, person=b"penstock-weights")
    _digest_files(digest, folder)
    return digest.hexdigest()


def _digest_files(digest: blake2b, folder: Path) -> None:
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


def _sampled(names: Iterable[str]) -> set[str]:
    """Chooses the tensors to sample: all, or as many as allowed with experts last, chosen by a hash of the name."""
    found = list(names)
    if len(found) > _MAX_TENSOR_SAMPLES:
        found.sort(key=lambda name: (".experts." in name, blake2b(name.encode(), digest_size=8).digest()))
    return set(found[:_MAX_TENSOR_SAMPLES])


def checkpoint_writes(folder: Path) -> str:
    """Identifies the weight files on this host and their last writes. A revision only samples the data, so a changed
    tensor may lie between two samples."""
    found = [file.stat() for file in list_weight_files(folder)]
    return " ".join(f"{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}" for status in found)


def _read_header(file: Path) -> tuple[dict, int]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(_read_exactly(stream, 8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(_read_exactly(stream, length))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}; fetch the file again") from error
    return header, 8 + length


def _read_exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise ValueError(f"it ends after {len(data)} of {count} bytes")
    return data
