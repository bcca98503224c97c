"""Reads a checkpoint's tensors for a model that is being built, checks them first, and casts them on the way.

All names and shapes are checked before anything is loaded. Quantized weights stay as they are stored if the machine has
a kernel for them, and are dequantized otherwise; plain weights can be quantized here. The model asks for tensors by
name, one at a time, so that at most one layer's weights are in memory twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open

from engine.weights.checkpoint import CODE_SUFFIXES, check_tensors
from engine.weights.file_readers import STRIPE_BYTES, DeviceReaders, FileSpan, ReadAhead
from engine.weights.quantization_config import WeightScheme
from engine.weights.quantized_weight import Kind, QuantizedWeight, Weight, quantize_weight
from engine.weights.tensor_slices import TensorSlice, check_slice_groups
from engine.weights.unpack_quantized import unpack

log = logging.getLogger(__name__)

_FLOAT32_SUFFIX = ".e_score_correction_bias"  # few values, and the choice of experts depends on their last bits
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_AHEAD_READERS = 2  # into the page cache, while the main thread packs weights


class WeightReader:
    """Reads a folder's tensors one by one. A context manager, because it keeps the files open."""

    def __init__(
        self,
        folder: Path,
        expected: Mapping[str, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        can_multiply: Callable[[QuantizedWeight, torch.dtype, bool], bool],
        optional: frozenset[str] = frozenset(),
        slices: Mapping[str, TensorSlice] | None = None,
        scheme: WeightScheme | None = None,
        quantization: Kind | None = None,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`expected` maps every tensor that the model reads to its shape, `optional` names stored tensors that are not
        read, `slices` has those of which this rank reads a part. `scheme` describes how the checkpoint stores quantized
        weights, `quantization` what plain weights are quantized to. `can_multiply(weight, dtype, is_expert)` returns
        whether the machine has a kernel for a quantized weight.

        Raises CheckpointError if the folder does not fit, ConfigError if slices split quantization groups."""
        self._stored, self._layouts = check_tensors(folder, expected, optional, scheme)
        self._scheme, self._quantization, self._can_multiply = scheme, quantization, can_multiply
        self._folder, self._shapes = folder, expected
        self._num_quantized, self._num_dequantized = 0, 0
        self._dtype, self._device = dtype, device
        self._slices = slices or {}
        check_slice_groups(
            self._slices, expected, scheme, self._layouts, quantization, str(dtype).removeprefix("torch.")
        )
        self._on_progress = on_progress
        self._expected = tuple(
            name for name in expected if name.removesuffix(".weight") not in self._layouts and not self._is_absent(name)
        )
        held = [path for path in self._layouts if not self._is_absent(f"{path}.weight")]
        quantized = [f"{path}.{suffix}" for path in held for suffix in self._parts(path)]
        self._total_bytes = sum(self._stored[name].num_bytes for name in (*self._expected, *quantized))
        self._read_bytes = 0
        self._files = ExitStack()
        self._open: dict[Path, safe_open] = {}
        self._readers: DeviceReaders | None = None

    def __enter__(self) -> WeightReader:
        spans = {name: self._span(name) for name in self._expected if not self._is_zeros(name)}
        if self._device.type == "cuda" and self._quantization is None:  # weights to quantize are read whole
            known = {name: span for name, span in spans.items() if self._stored[name].dtype in _TORCH_DTYPES}
            self._readers = DeviceReaders(known, self._device)
            self._files.callback(self._readers.close)
        elif self._device.type == "cpu" and self._total_bytes > STRIPE_BYTES:  # smaller files are read at once
            self._files.callback(ReadAhead(spans, _AHEAD_READERS).close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()
        if self._num_quantized:
            log.info(
                "%s: %d weights are used quantized, %d were dequantized to %s because this %s has no kernel for them",
                self._folder,
                self._num_quantized - self._num_dequantized,
                self._num_dequantized,
                self._dtype,
                self._device.type,
            )

    def _is_absent(self, name: str) -> bool:
        part = self._slices.get(name)
        return part is not None and part.absent

    def _is_zeros(self, name: str) -> bool:
        part = self._slices.get(name)
        return part is not None and part.zeros

    def _span(self, name: str) -> FileSpan:
        """Returns the bytes to read: this rank's rows, or the whole tensor where its part is not contiguous."""
        stored, part = self._stored[name], self._slices.get(name)
        if part is None or part.dim or part.more:
            return FileSpan(stored.file, stored.offset, stored.num_bytes)
        row_bytes = stored.num_bytes // stored.shape[0]
        start, stop, _ = slice(part.start, part.stop).indices(stored.shape[0])
        return FileSpan(stored.file, stored.offset + start * row_bytes, max(0, stop - start) * row_bytes)

    def within(self, prefix: str) -> LayerReader:
        """Returns a reader of the tensors whose names begin with `prefix`."""
        return LayerReader(self, prefix)

    def weight(self, name: str, is_expert: bool = False) -> Weight:
        """Returns the weight of a matrix product, quantized if it is stored so or quantized while loading, and the
        machine can multiply with it.
        """
        path = name.removesuffix(".weight")
        if self._device.type == "meta" or (path not in self._layouts and self._quantization is None):
            return self.read(name)
        if path in self._layouts:
            quantized = self._read_quantized(name, path)
        else:  # quantized as a whole, so that all ranks have the same scales
            assert self._quantization is not None, "else it was read plain"
            exact = self._whole(name).to(device=self._device, dtype=self._dtype)
            quantized = _narrow(quantize_weight(exact, self._quantization), self._slices.get(name))
        return self.multipliable(quantized, is_expert)

    def head(self, name: str, tied: torch.Tensor | None) -> Weight:
        """Returns the weight of the output head: `name`, or the embedding that it is `tied` to. A head that is
        quantized here always becomes int8, regardless of the layers, because every token passes through it.
        """
        if self._device.type == "meta" or self._quantization is None:
            return self.weight(name) if tied is None else tied
        return self.multipliable(quantize_weight(self.read(name) if tied is None else tied, "int8"))

    def multipliable(self, quantized: QuantizedWeight, is_expert: bool = False) -> Weight:
        """Returns the weight as it is if the machine can multiply with it, and otherwise its values. On a CPU a weight
        whose inputs are quantized stays as it is, because its values alone do not say what the checkpoint means."""
        self._num_quantized += 1
        if self._can_multiply(quantized, self._dtype, is_expert):
            return quantized
        if quantized.activations is not None and self._device.type == "cpu":
            return replace(quantized, has_kernel=False)
        self._num_dequantized += 1
        return quantized.dequantize(self._dtype)

    def _read_quantized(self, name: str, path: str) -> QuantizedWeight:
        shape = self._shapes[name]
        tensors = {suffix: self._whole(f"{path}.{suffix}") for suffix in self._parts(path)}
        assert self._scheme is not None, "layouts come from a scheme"
        return _narrow(unpack(self._scheme, tensors, (shape[0], shape[1])), self._slices.get(name)).to(self._device)

    def _parts(self, path: str) -> list[str]:
        """Returns the suffixes of the tensors to read for a quantized weight."""
        layout = self._layouts[path]
        return [suffix for suffix, tensor in layout.items() if tensor.is_read and f"{path}.{suffix}" in self._stored]

    def _whole(self, name: str) -> torch.Tensor:
        tensor = self._file_of(name).get_tensor(self._stored[name].name)
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
        """Returns the tensor, or this rank's part of it, cast and on the device; on meta nothing is read."""
        if self._device.type == "meta":
            return self._blank(name)
        path = name.removesuffix(".weight")
        if path != name and path in self._layouts:
            self._num_quantized += 1
            self._num_dequantized += 1
            return self._read_quantized(name, path).dequantize(self._dtype)
        stored = self._stored[name]
        dtype = self._dtype_of(name)
        if self._readers is not None and not self._is_zeros(name) and stored.dtype in _TORCH_DTYPES:
            tensor = self._take(self._readers, name, dtype)
        else:
            tensor = _read_slice(self._file_of(name), stored.name, self._slices.get(name)).to(self._device, dtype)
        self._count(name)
        return tensor

    def _blank(self, name: str) -> torch.Tensor:
        path = name.removesuffix(".weight")
        for part in [f"{path}.{suffix}" for suffix in self._parts(path)] if path in self._layouts else [name]:
            self._count(part)
        whole, own = self._shapes[name], self._slices.get(name)
        return torch.empty(whole if own is None else own.shape(whole), dtype=self._dtype_of(name), device=self._device)

    def _dtype_of(self, name: str) -> torch.dtype:
        if name.endswith(CODE_SUFFIXES):
            return torch.uint8
        return torch.float32 if name.endswith(_FLOAT32_SUFFIX) else self._dtype

    def _take(self, readers: DeviceReaders, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored, part = self._stored[name], self._slices.get(name)
        values = readers.take(name).view(_TORCH_DTYPES[stored.dtype])
        if part is None:
            return values.view(stored.shape).to(dtype)
        if part.more:
            whole = values.view(stored.shape)
            parts = [whole.narrow(part.dim, start, stop - start) for start, stop in part.spans]
            return torch.cat(parts, dim=part.dim).to(dtype)
        if part.dim == 0:
            return values.view(-1, *stored.shape[1:]).to(dtype)
        return values.view(stored.shape).narrow(part.dim, part.start, part.stop - part.start).to(dtype).contiguous()


class LayerReader:
    """Reads one layer's tensors. See `engine.layers.linear.LayerTensors`."""

    def __init__(self, reader: WeightReader, prefix: str) -> None:
        self._reader, self._prefix = reader, prefix

    def __call__(self, name: str) -> torch.Tensor:
        return self._reader.read(self._prefix + name)

    def weight(self, name: str, is_expert: bool = False) -> Weight:
        return self._reader.weight(self._prefix + name, is_expert)

    def multipliable(self, quantized: QuantizedWeight, is_expert: bool = False) -> Weight:
        return self._reader.multipliable(quantized, is_expert)


def _narrow(weight: QuantizedWeight, part: TensorSlice | None) -> QuantizedWeight:
    if part is None:
        return weight
    if part.more:
        return weight.take_rows(torch.cat([torch.arange(start, stop) for start, stop in part.spans]))
    return weight.narrow(part.dim, part.start, part.stop - part.start)


def _read_slice(file: safe_open, name: str, part: TensorSlice | None) -> torch.Tensor:
    if part is None:
        return file.get_tensor(name)
    stored = file.get_slice(name)
    if part.zeros:
        return torch.zeros(stored.get_shape())
    before = (slice(None),) * part.dim
    parts = [stored[(*before, slice(start, stop))] for start, stop in part.spans]
    return torch.cat(parts, dim=part.dim) if part.more else parts[0].contiguous()
