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
from engine.file_readers import STRIPE_BYTES, DeviceReaders, ReadAhead, Span
from engine.models.cuts import Cut

_FLOAT32_SUFFIX = ".e_score_correction_bias"  # few values, and who is chosen hangs on their last bits
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_AHEAD_READERS = 2  # into the page cache, beside the one who packs


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
        self._expected = tuple(expected)
        self._readers: DeviceReaders | None = None

    def __enter__(self) -> WeightReader:
        spans = {name: self._span(name) for name in self._expected if not self._is_zeros(name)}
        if self._device.type == "cuda":
            known = {name: span for name, span in spans.items() if self._stored[name].dtype in _TORCH_DTYPES}
            self._readers = DeviceReaders(known, self._device)
            self._files.callback(self._readers.close)
        elif self._device.type == "cpu" and self._total_bytes > STRIPE_BYTES:  # less is there at once
            self._files.callback(ReadAhead(spans, _AHEAD_READERS).close)
        return self

    def _is_zeros(self, name: str) -> bool:
        cut = self._cuts.get(name)
        return cut is not None and cut.zeros

    def _span(self, name: str) -> Span:
        """What is read of it: of a part that is no run of bytes, the whole."""
        stored, cut = self._stored[name], self._cuts.get(name)
        if cut is None or cut.dim:
            return Span(stored.file, stored.offset, stored.num_bytes)
        row_bytes = stored.num_bytes // stored.shape[0]
        start, stop, _ = slice(cut.start, cut.stop).indices(stored.shape[0])
        return Span(stored.file, stored.offset + start * row_bytes, max(0, stop - start) * row_bytes)

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
        elif self._readers is not None and not self._is_zeros(name) and stored.dtype in _TORCH_DTYPES:
            tensor = self._take(self._readers, name, dtype)
        else:
            if stored.file not in self._open:
                self._open[stored.file] = self._files.enter_context(safe_open(stored.file, framework="pt"))
            read = _read(self._open[stored.file], name, self._cuts.get(name))
            tensor = read.to(device=self._device, dtype=dtype)
        self._read_bytes += stored.num_bytes
        self._on_progress(self._read_bytes / self._total_bytes)
        return tensor

    def _take(self, readers: DeviceReaders, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored, cut = self._stored[name], self._cuts.get(name)
        values = readers.take(name).view(_TORCH_DTYPES[stored.dtype])
        if cut is None:
            return values.view(stored.shape).to(dtype)
        if cut.dim == 0:
            return values.view(-1, *stored.shape[1:]).to(dtype)
        return values.view(stored.shape)[:, cut.start : cut.stop].to(dtype).contiguous()


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
