"""Tensors of a checkpoint, checked against the model's plan before any is loaded, and cast as they are read.

Quantized products come as they are stored where the machine has a kernel for them, else dequantized; plain ones can be
quantized here. A model asks for each tensor by name while it is built (`WeightReader.read`), so that at most one
layer's worth stands in memory twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open

from engine.checkpoint import check_tensors
from engine.file_readers import STRIPE_BYTES, DeviceReaders, ReadAhead, Span
from engine.layers.linear import can_multiply
from engine.layers.quantized import Kind, QuantizedWeight, Weight, quantize_weight
from engine.models.cuts import Cut, check_groups
from engine.weight_scheme import WeightScheme
from engine.weight_unpack import unpack

log = logging.getLogger(__name__)

_FLOAT32_SUFFIX = ".e_score_correction_bias"  # few values, and who is chosen hangs on their last bits
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_AHEAD_READERS = 2  # into the page cache, beside the one who packs


class WeightReader:
    """Reads a folder's tensors one by one. A context manager: it holds the files open.

    `expected` is name to shape of all that the model reads, `optional` what may be there and is not read; `cuts` has
    the tensors of which this rank reads a part. `scheme` says how quantized products are stored, `quantization` as
    what plain ones are to be kept.
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
        scheme: WeightScheme | None = None,
        quantization: Kind | None = None,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._stored, self._forms = check_tensors(folder, expected, optional, scheme)
        self._scheme, self._quantization = scheme, quantization
        self._folder, self._shapes = folder, expected
        self._num_quantized, self._num_dequantized = 0, 0
        self._dtype, self._device = dtype, device
        self._cuts = cuts or {}
        if dtype != torch.float32:  # else nothing is computed with codes
            check_groups(self._cuts, expected, scheme, self._forms, quantization)
        self._on_progress = on_progress
        self._expected = tuple(name for name in expected if name.removesuffix(".weight") not in self._forms)
        coded = [f"{path}.{suffix}" for path in self._forms for suffix in self._parts(path)]
        self._total_bytes = sum(self._stored[name].num_bytes for name in (*self._expected, *coded))
        self._read_bytes = 0
        self._files = ExitStack()
        self._open: dict[Path, safe_open] = {}
        self._readers: DeviceReaders | None = None

    def __enter__(self) -> WeightReader:
        spans = {name: self._span(name) for name in self._expected if not self._is_zeros(name)}
        if self._device.type == "cuda" and self._quantization is None:  # what is quantized here is read whole
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
        if self._num_quantized:
            log.info(
                "%s: %d products computed with quantized weights, %d dequantized to %s while loaded, for want of a "
                "kernel on this %s",
                self._folder,
                self._num_quantized - self._num_dequantized,
                self._num_dequantized,
                self._dtype,
                self._device.type,
            )

    def within(self, prefix: str) -> LayerReader:
        """Reads the tensors whose names begin so."""
        return LayerReader(self, prefix)

    def weight(self, name: str, is_expert: bool = False) -> Weight:
        """Of a product, quantized where it is stored or to be kept so and can be computed with."""
        path = name.removesuffix(".weight")
        if self._device.type == "meta" or (path not in self._forms and self._quantization is None):
            return self.read(name)
        self._num_quantized += 1
        if path in self._forms:
            quantized = self._read_quantized(name, path)
        else:  # the whole, so that ranks have scales of one weight
            assert self._quantization is not None, "else it was read plain"
            exact = self._whole(name).to(device=self._device, dtype=self._dtype)
            quantized = _cut(quantize_weight(exact, self._quantization), self._cuts.get(name))
        if can_multiply(quantized, self._dtype, is_expert):
            return quantized
        self._num_dequantized += 1
        return quantized.dequantize(self._dtype)

    def head(self, name: str, tied: torch.Tensor | None) -> Weight:
        """Of the output head: `name`, or the embedding that it is `tied` to. What is quantized here is so in int8,
        whatever the layers are kept as: all that a model says goes through it."""
        if self._device.type == "meta" or self._quantization is None:
            return self.weight(name) if tied is None else tied
        quantized = quantize_weight(self.read(name) if tied is None else tied, "int8")
        self._num_quantized += 1
        if can_multiply(quantized, self._dtype):
            return quantized
        self._num_dequantized += 1
        return quantized.dequantize(self._dtype)

    def _read_quantized(self, name: str, path: str) -> QuantizedWeight:
        shape = self._shapes[name]
        tensors = {suffix: self._whole(f"{path}.{suffix}") for suffix in self._parts(path)}
        assert self._scheme is not None, "forms come of a scheme"
        return _cut(unpack(self._scheme, tensors, (shape[0], shape[1])), self._cuts.get(name)).to(self._device)

    def _parts(self, path: str) -> list[str]:
        """Of a quantized product, what is read."""
        form = self._forms[path]
        return [suffix for suffix, tensor in form.items() if tensor.is_read and f"{path}.{suffix}" in self._stored]

    def _whole(self, name: str) -> torch.Tensor:
        tensor = self._file_of(name).get_tensor(name)
        self._count(name)
        return tensor

    def _file_of(self, name: str) -> safe_open:
        file = self._stored[name].file
        if file not in self._open:
            self._open[file] = self._files.enter_context(safe_open(file, framework="pt"))
        return self._open[file]

    def _count(self, name: str) -> None:
        self._read_bytes += self._stored[name].num_bytes
        self._on_progress(self._read_bytes / self._total_bytes)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, or this rank's part of it, cast to its dtype on its device; on meta nothing is read."""
        if self._device.type == "meta":
            return self._blank(name)
        path = name.removesuffix(".weight")
        if path != name and path in self._forms:
            self._num_quantized += 1
            self._num_dequantized += 1
            return self._read_quantized(name, path).dequantize(self._dtype)
        stored = self._stored[name]
        dtype = self._dtype_of(name)
        if self._readers is not None and not self._is_zeros(name) and stored.dtype in _TORCH_DTYPES:
            tensor = self._take(self._readers, name, dtype)
        else:
            read = _read(self._file_of(name), name, self._cuts.get(name))
            tensor = read.to(device=self._device, dtype=dtype)
        self._count(name)
        return tensor

    def _blank(self, name: str) -> torch.Tensor:
        path = name.removesuffix(".weight")
        for read in [f"{path}.{suffix}" for suffix in self._parts(path)] if path in self._forms else [name]:
            self._count(read)
        shape = _shape(self._shapes[name], self._cuts.get(name))
        return torch.empty(shape, dtype=self._dtype_of(name), device=self._device)

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if name.endswith(_FLOAT32_SUFFIX) else self._dtype

    def _take(self, readers: DeviceReaders, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored, cut = self._stored[name], self._cuts.get(name)
        values = readers.take(name).view(_TORCH_DTYPES[stored.dtype])
        if cut is None:
            return values.view(stored.shape).to(dtype)
        if cut.dim == 0:
            return values.view(-1, *stored.shape[1:]).to(dtype)
        return values.view(stored.shape)[:, cut.start : cut.stop].to(dtype).contiguous()


class LayerReader:
    """See `engine.layers.linear.LayerTensors`."""

    def __init__(self, reader: WeightReader, prefix: str) -> None:
        self._reader, self._prefix = reader, prefix

    def __call__(self, name: str) -> torch.Tensor:
        return self._reader.read(self._prefix + name)

    def weight(self, name: str, is_expert: bool = False) -> Weight:
        return self._reader.weight(self._prefix + name, is_expert)


def _cut(weight: QuantizedWeight, cut: Cut | None) -> QuantizedWeight:
    return weight if cut is None else weight.narrow(cut.dim, cut.start, cut.stop - cut.start)


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
