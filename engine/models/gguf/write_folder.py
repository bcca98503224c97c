"""Writes the checkpoint folder of a GGUF file: config.json, safetensors, and the tokenizer next to the file.

A tensor is dequantized a few rows at a time, so memory never holds more than one file of the folder. The folder appears
only when it is complete.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import save_file

from engine.models.config import ModelConfig
from engine.models.gguf.header import GgufHeader, GgufTensor, read_header
from engine.models.gguf.model import FREQUENCIES, find_gguf_family, make_config, translate_name
from engine.models.shapes import tensor_shapes
from engine.weights.checkpoint import CONFIG_FILE, INDEX_FILE
from penstock.errors import CheckpointError

Dtype = Literal["bfloat16", "float32"]
TOKENIZER = "tokenizer.json"
# Further files that a server reads; each is copied if it exists.
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
_FILE_BYTES = 1 << 30  # of weights, in one file of the folder
_CHUNK_VALUES = 1 << 22  # dequantized at once: 16 MiB of float32
_SPARE_BYTES = 1 << 26  # of the disk, beyond the weights


@dataclass(frozen=True, slots=True)
class ImportedFolder:
    architecture: str
    num_tensors: int
    num_bytes: int  # of weights, in the folder


def import_gguf(
    file: Path,
    folder: Path,
    tokenizer: Path | None = None,
    dtype: Dtype = "bfloat16",
    on_progress: Callable[[float], None] = lambda share: None,
) -> ImportedFolder:
    """Writes `folder`, which must not exist. `tokenizer` is the folder of tokenizer.json, by default the file's own.

    `on_progress` receives the share of the values that are written. Blocks. Raises CheckpointError, and then leaves
    nothing behind.
    """
    header = read_header(file)
    source = tokenizer or file.parent
    if not (source / TOKENIZER).is_file():
        raise CheckpointError(
            f"{source / TOKENIZER} is missing, and a GGUF file holds no tokenizer that can be read exactly; fetch the "
            f"{TOKENIZER} of the original model, put it next to the file or name its folder with --tokenizer"
        )
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; name a folder that does not")
    _check_room(header, folder.absolute().parent, dtype)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.absolute().parent) as made:
        target = Path(made, "folder")
        target.mkdir()
        writer = _FolderWriter(header, target, getattr(torch, dtype), on_progress)
        (target / CONFIG_FILE).write_text(json.dumps(make_config(header, writer.frequencies(), dtype), indent=2) + "\n")
        _copy_tokenizer(header, source, target)
        num_bytes = writer.write(tensor_shapes(ModelConfig.from_folder(target, has_weights=False)))
        target.rename(folder)
    return ImportedFolder(find_gguf_family(header).architecture, len(header.tensors), num_bytes)


def _check_room(header: GgufHeader, disk: Path, dtype: Dtype) -> None:
    needed = sum(_num_values(tensor) for tensor in header.tensors.values()) * getattr(torch, dtype).itemsize
    if not disk.is_dir():
        raise CheckpointError(f"{disk} is not a folder; name one that exists")
    free = shutil.disk_usage(disk).free
    if needed + _SPARE_BYTES > free:
        raise CheckpointError(
            f"{header.file} takes {needed} bytes in {dtype}, and {disk} has {free} free; make room or name another disk"
        )


def _copy_tokenizer(header: GgufHeader, source: Path, target: Path) -> None:
    shutil.copyfile(source / TOKENIZER, target / TOKENIZER)
    for name in _BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    template, config = header.metadata.get("tokenizer.chat_template"), target / "tokenizer_config.json"
    if isinstance(template, str) and not config.exists() and not (target / "chat_template.jinja").exists():
        config.write_text(json.dumps({"chat_template": template}, indent=2) + "\n")


class _FolderWriter:
    def __init__(
        self, header: GgufHeader, target: Path, dtype: torch.dtype, on_progress: Callable[[float], None]
    ) -> None:
        self._header, self._target, self._dtype, self._on_progress = header, target, dtype, on_progress
        self._num_total = max(1, sum(_num_values(tensor) for tensor in header.tensors.values()))
        self._num_done = 0

    def frequencies(self) -> list[float] | None:
        tensor = self._header.tensors.get(FREQUENCIES)
        if tensor is None:
            return None
        with self._header.file.open("rb") as stream:
            found: list[float] = self._read(tensor, stream, torch.float32).flatten().tolist()
        return found

    def write(self, expected: Mapping[str, tuple[int, ...]]) -> int:
        """Writes the weights, which must be exactly `expected`, and returns their bytes."""
        named = self._check(expected)
        files = list(self._in_files(named))
        places: dict[str, str] = {}
        num_bytes = 0
        with self._header.file.open("rb") as stream:
            for number, names in enumerate(files, 1):
                name = f"model-{number:05}-of-{len(files):05}.safetensors"
                values = {each: self._convert(named[each], stream) for each in names}
                num_bytes += sum(value.nbytes for value in values.values())
                save_file(values, self._target / name, metadata={"format": "pt"})
                places |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
        (self._target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        return num_bytes

    def _check(self, expected: Mapping[str, tuple[int, ...]]) -> dict[str, GgufTensor]:
        """Returns the tensors by their names in the folder."""
        file, named = self._header.file, {}
        for tensor in self._header.tensors.values():
            if tensor.name == FREQUENCIES:
                continue
            name = translate_name(tensor.name)
            if name is None or name not in expected:
                raise CheckpointError(
                    f"{file}: tensor {tensor.name} is not part of the model that the metadata describes; give the "
                    "Hugging Face folder of the model"
                )
            if tensor.shape != expected[name]:
                raise CheckpointError(
                    f"{file}: tensor {tensor.name} has shape {list(tensor.shape)}, the metadata asks for "
                    f"{list(expected[name])}; fetch the file again"
                )
            named[name] = tensor
        missing = sorted(expected.keys() - named.keys())
        if missing:
            raise CheckpointError(
                f"{file}: {missing[0]} ({len(missing)} tensors in all) is missing; give a file of the whole model"
            )
        return named

    def _in_files(self, named: Mapping[str, GgufTensor]) -> Iterator[list[str]]:
        """Yields the names of the tensors in each file."""
        names: list[str] = []
        num_bytes = 0
        for name, tensor in named.items():
            size = _num_values(tensor) * self._dtype.itemsize
            if names and num_bytes + size > _FILE_BYTES:
                yield names
                names, num_bytes = [], 0
            names.append(name)
            num_bytes += size
        yield names

    def _convert(self, tensor: GgufTensor, stream: BinaryIO) -> torch.Tensor:
        values = self._read(tensor, stream, self._dtype)
        part = tensor.name.split(".")[-2]
        if find_gguf_family(self._header).swaps_rows and part in ("attn_q", "attn_k"):
            arch = self._header.metadata["general.architecture"]
            heads = int(self._header.metadata[f"{arch}.attention.head_count"])
            if part == "attn_k":
                heads = int(self._header.metadata.get(f"{arch}.attention.head_count_kv", heads))
            values = unswap_rows(values, heads)
        self._num_done += values.numel()
        self._on_progress(self._num_done / self._num_total)
        return values

    def _read(self, tensor: GgufTensor, stream: BinaryIO, dtype: torch.dtype) -> torch.Tensor:
        kind = GGMLQuantizationType[tensor.kind]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        values = torch.empty(_num_values(tensor), dtype=dtype)
        stream.seek(tensor.offset)
        for first in range(0, len(values), _CHUNK_VALUES):
            count = min(_CHUNK_VALUES, len(values) - first)
            data = stream.read(count // block * block_bytes)
            if len(data) < count // block * block_bytes:
                raise CheckpointError(f"{self._header.file} is cut short: tensor {tensor.name}; fetch the file again")
            decoded = dequantize(np.frombuffer(data, np.uint8), kind)
            values[first : first + count] = torch.from_numpy(np.array(decoded, np.float32))
        return values.view(tensor.shape)


def unswap_rows(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders the rows of each head from pairs that rotate together to all first values, then all second ones."""
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape).contiguous()


def _num_values(tensor: GgufTensor) -> int:
    return int(np.prod(tensor.shape, dtype=object))
