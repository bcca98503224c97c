"""Tensors of a checkpoint, checked against the model's plan before any is loaded, and cast as they are read.

A model asks for each tensor by name while it is built (`WeightReader.read`), so that at most one layer's worth stands
in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open

from engine.checkpoint import StoredTensor, list_weight_files, read_headers
from penstock.errors import CheckpointError

_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"  # old exports store what the configuration already says


class WeightReader:
    """Reads a folder's tensors one by one. A context manager: it holds the files open.

    `expected` is name to shape of all that the model reads, `optional` what may be there and is not read.
    """

    def __init__(
        self,
        folder: Path,
        expected: Mapping[str, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        optional: frozenset[str] = frozenset(),
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._stored = read_headers(list_weight_files(folder))
        _check(folder, self._stored, expected, optional)
        self._dtype, self._device = dtype, device
        self._on_progress = on_progress
        self._total_bytes = sum(self._stored[name].num_bytes for name in expected)
        self._read_bytes = 0
        self._files = ExitStack()
        self._open: dict[Path, safe_open] = {}

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def read(self, name: str) -> torch.Tensor:
        """The tensor, cast to the model's dtype on its device."""
        stored = self._stored[name]
        if stored.file not in self._open:
            self._open[stored.file] = self._files.enter_context(safe_open(stored.file, framework="pt"))
        tensor = self._open[stored.file].get_tensor(name).to(device=self._device, dtype=self._dtype)
        self._read_bytes += stored.num_bytes
        self._on_progress(self._read_bytes / self._total_bytes)
        return tensor


def _check(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    optional: frozenset[str],
) -> None:
    missing = sorted(set(expected) - set(stored))
    if missing:
        raise CheckpointError(
            f"{folder}: tensor {missing[0]} ({len(missing)} in all) is missing; config.json and the weights must be of "
            "one checkpoint"
        )
    for name, tensor in stored.items():
        if name not in expected:
            if name in optional or name.endswith(_DERIVED_SUFFIX):
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
        if tensor.dtype not in _FLOAT_DTYPES:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} is stored as {tensor.dtype}; give unquantized weights "
                f"({', '.join(_FLOAT_DTYPES)})"
            )
