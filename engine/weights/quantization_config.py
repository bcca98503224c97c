"""Parses and checks `quantization_config` in config.json: how a checkpoint stores quantized weights. Torch-free.

Supported are GPTQ, AWQ (gemm packing), fp8 (a scale for a tensor or a block), and the compressed-tensors formats
pack-quantized, int-quantized and float-quantized, the first two also with inputs that are quantized to int8, each
token with its own scale (W8A8, W4A8). The stored tensors decide which weights are quantized; the config's
list of unquantized weights is checked against them. `engine.weights.quantized_layouts` has the tensors of each layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.errors import CheckpointError

KEY = "quantization_config"
Layout = Literal["gptq", "awq", "packed", "codes"]
Activations = Literal["int8"]
_MAX_GROUP = 1 << 16
_SHOWN = 200  # characters of the value in an error message
_PLAIN = ", or a checkpoint without it, which engine.quantization can quantize while it is loaded"
_INT4_GROUPS = (128, 64, 32)


def int4_group(inputs: int) -> int:
    """Returns how many inputs share a scale and a zero point when a row is quantized to int4 while it is loaded."""
    return next((size for size in _INT4_GROUPS if inputs % size == 0), inputs)


class _Unsupported(Exception):
    """Names the unsupported part of the object and what is supported instead."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    method: str  # as config.json names it
    layout: Layout
    kind: Literal["int4", "int8", "fp8"]
    group_size: int | None = None  # inputs that share a scale; None: the whole row
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale
    zero_offset: int = 0  # the stored value is the zero point minus this
    ignored: tuple[str, ...] = ()  # modules that are not quantized: names, or regular expressions after "re:"
    by_part: bool = False  # an ignored name matches anywhere within a module's name
    activations: Activations | None = None  # what the inputs of quantized weights are quantized to, token by token

    def group_of(self, inputs: int) -> int:
        """Returns how many inputs share a scale in a row of `inputs`."""
        return self.group_size or (self.block[1] if self.block is not None else inputs)

    def ignores(self, path: str) -> bool:
        for entry in self.ignored:
            if entry.startswith("re:"):
                if re.match(entry.removeprefix("re:"), path):
                    return True
            elif path == entry or path.endswith(f".{entry}") or (self.by_part and entry in path):
                return True
        return False


def parse_scheme(data: Mapping[str, Any], file: Path) -> WeightScheme | None:
    """Parses a whole config.json; None for plain weights. Raises CheckpointError for unsupported quantization."""
    config = data.get(KEY) or data.get("compression_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: {KEY} = {config!r}: a JSON object is needed")
    method = str(config.get("quant_method", ""))
    readers = {"gptq": _parse_gptq, "awq": _parse_awq, "fp8": _parse_fp8, "compressed-tensors": _parse_compressed}
    if method not in readers:
        raise CheckpointError(
            f"{file}: {KEY}: quant_method = {method!r} is not supported; give one of {', '.join(readers)}{_PLAIN}"
        )
    try:
        return readers[method](config)
    except _Unsupported as problem:
        raise CheckpointError(f"{file}: {KEY} = {str(config)[:_SHOWN]}: {problem}{_PLAIN}") from problem


def _parse_gptq(config: Mapping[str, Any]) -> WeightScheme:
    bits = _choice(config, "bits", (4, 8))
    if config.get("dynamic"):
        raise _unsupported("dynamic", config["dynamic"], "one with the same bits for every layer")
    form = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _unsupported("checkpoint_format", form, "gptq or gptq_v2")
    return WeightScheme(
        "gptq",
        "gptq",
        "int4" if bits == 4 else "int8",
        _group_size(config),
        zero_offset=1 if form == "gptq" else 0,
        ignored=_names(config.get("modules_to_not_convert")),
        by_part=True,
    )


def _parse_awq(config: Mapping[str, Any]) -> WeightScheme:
    _choice(config, "bits" if "bits" in config else "w_bit", (4,))
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise _unsupported("version", version, "gemm")
    if config.get("zero_point") is False:
        raise _unsupported("zero_point", False, "true")
    size = _group_size(config if "group_size" in config else {"group_size": config.get("q_group_size")})
    return WeightScheme("awq", "awq", "int4", size, ignored=_names(config.get("modules_to_not_convert")), by_part=True)


def _parse_fp8(config: Mapping[str, Any]) -> WeightScheme:
    if str(config.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported("fmt", config["fmt"], "e4m3")
    if config.get("scale_fmt") not in (None, "float", "ue8m0"):
        raise _unsupported("scale_fmt", config["scale_fmt"], "float or ue8m0")
    ignored = _names(config.get("modules_to_not_convert") or config.get("ignored_layers"))
    block = _block(config.get("weight_block_size"), "weight_block_size")
    return WeightScheme("fp8", "codes", "fp8", block=block, ignored=ignored, by_part=True)


def _parse_compressed(config: Mapping[str, Any]) -> WeightScheme:
    for key in ("kv_cache_scheme", "transform_config"):
        if config.get(key):
            raise _unsupported(key, config[key], "null; pages are quantized by engine.kv_dtype")
    sparsity = config.get("sparsity_config") or {}
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise _unsupported("sparsity_config", sparsity, "dense weights")
    if config.get("quantization_status", "compressed") not in ("compressed", "frozen"):
        raise _unsupported("quantization_status", config["quantization_status"], "compressed")
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or not isinstance(groups[0].get("weights"), dict):
        raise _unsupported("config_groups", config.get("config_groups"), "exactly one group with weights")
    form = str(groups[0].get("format") or config.get("format"))
    weights = groups[0]["weights"]
    strategy = str(weights.get("strategy") or "tensor")
    _choice({"strategy": strategy}, "strategy", ("tensor", "channel", "group", "block"))
    size = _group_size(weights) if strategy == "group" else None
    block = _block(weights.get("block_structure"), "block_structure") if strategy == "block" else None
    kind = _compressed_kind(form, weights)
    return WeightScheme(
        "compressed-tensors",
        "packed" if form == "pack-quantized" else "codes",
        kind,
        size,
        block,
        ignored=_names(config.get("ignore")),
        activations=None if kind == "fp8" else _activations(groups[0], weights),
    )


def _activations(group: Mapping[str, Any], weights: Mapping[str, Any]) -> Activations | None:
    inputs = group.get("input_activations")
    if not inputs:
        return None
    served = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    implied = {"type": "int", "num_bits": None, "strategy": None, "dynamic": False, "symmetric": True}
    described = {key: default if inputs.get(key) is None else inputs[key] for key, default in implied.items()}
    if described != served:
        raise _unsupported(
            "input_activations",
            described,
            "8 bits, type int, strategy token, dynamic and symmetric, or null, which leaves inputs as they are",
        )
    if weights.get("symmetric", True) is not True:
        raise _unsupported("symmetric", weights["symmetric"], "symmetric weights where inputs are quantized")
    if weights.get("actorder") in ("group", True):
        raise _unsupported("actorder", weights["actorder"], "null, weight or static where inputs are quantized")
    return "int8"


def _compressed_kind(form: str, weights: Mapping[str, Any]) -> Literal["int4", "int8", "fp8"]:
    described = (form, weights.get("type", "int"), weights.get("num_bits"))
    match described:
        case ("pack-quantized" | "int-quantized", "int", 4):
            return "int4"
        case ("pack-quantized" | "int-quantized" | "naive-quantized", "int", 8):
            return "int8"
        case ("float-quantized" | "naive-quantized", "float", 8):
            return "fp8"
    raise _unsupported(
        "format, type, num_bits",
        described,
        "pack-quantized or int-quantized with 4 or 8 bits, or float-quantized with 8",
    )


def _group_size(config: Mapping[str, Any]) -> int | None:
    size = config.get("group_size")
    if size in (None, -1):
        return None
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _MAX_GROUP:
        raise _unsupported("group_size", size, "a positive number, or -1 for whole rows")
    return size


def _block(value: Any, key: str) -> tuple[int, int] | None:
    match value:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise _unsupported(key, value, "two positive numbers")


def _choice(config: Mapping[str, Any], key: str, allowed: tuple[Any, ...]) -> Any:
    if config.get(key) not in allowed:
        raise _unsupported(key, config.get(key), " or ".join(map(str, allowed)))
    return config[key]


def _names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _unsupported("list of modules that are not quantized", value, "a list of names")
    for name in value:
        if name.startswith("re:"):
            _check_expression(name.removeprefix("re:"))
    return tuple(value)


def _check_expression(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise _Unsupported(f"{pattern!r} is not a regular expression ({error}); correct it") from error


def _unsupported(key: str, value: object, wanted: str) -> _Unsupported:
    return _Unsupported(f"{key} = {value!r} is not supported; give {wanted}")
