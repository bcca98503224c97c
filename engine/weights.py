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

from engine.checkpoint import check_tensors
from engine.models.cuts import Cut

_FLOAT32_SUFFIX = ".e_score_correction_bias"  # few values, and who is chosen hangs on their last bits


class WeightReader:
    """Reads a folder's tensors one by one. A context manager: it holds the files open.

    `expected` is name to shape of all that the model reads, `optional` what may be there and is not read; `cuts` has
    the tensors of which this rank reads a part.
    """

    def __init__(
        self,
        folder: Path,
        expected: Mapping[str, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        optional: frozenset[str] = frozenset(),
        cuts: Mapping[str, Cut] | None = None,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._stored = check_tensors(folder, expected, optional)
        self._dtype, self._device = dtype, device
        self._cuts = cuts or {}
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
        """The tensor, or this rank's part of it, cast to its dtype on its device; on meta nothing is read."""
        stored = self._stored[name]
        dtype = torch.float32 if name.endswith(_FLOAT32_SUFFIX) else self._dtype
        if self._device.type == "meta":
            shape = _shape(stored.shape, self._cuts.get(name))
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        else:
            if stored.file not in self._open:
                self._open[stored.file] = self._files.enter_context(safe_open(stored.file, framework="pt"))
            read = _read(self._open[stored.file], name, self._cuts.get(name))
            tensor = read.to(device=self._device, dtype=dtype)
        self._read_bytes += stored.num_bytes
        self._on_progress(self._read_bytes / self._total_bytes)
        return tensor


def _read(file: safe_open, name: str, cut: Cut | None) -> torch.Tensor:
    if cut is None:
        return file.get_tensor(name)
    stored = file.get_slice(name)
    if cut.zeros:
        return torch.zeros(stored.get_shape())
    return stored[cut.start : cut.stop] if cut.dim == 0 else stored[:, cut.start : cut.stop].contiguous()


def _shape(stored: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
    if cut is None or cut.zeros:
        return stored
    count = len(range(*slice(cut.start, cut.stop).indices(stored[cut.dim])))
    return (*stored[: cut.dim], count, *stored[cut.dim + 1 :])
