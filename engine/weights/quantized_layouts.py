"""Lists the tensors that store one quantized weight in each layout of `engine.weights.quantization_config`, with their
shapes.

Torch-free: `engine.weights.checkpoint` checks the files' headers against it before anything is loaded.

Shapes: `O` outputs, `I` inputs, `G` groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.weights.quantization_config import WeightScheme
from penstock.errors import CheckpointError

FLOATS = ("BF16", "F16", "F32")
_INTS = ("I32",)
_WEIGHT = ".weight"
BITS = {"int4": 4, "int8": 8, "fp8": 8}
_CODE_DTYPES = {"int4": "I8", "int8": "I8", "fp8": "F8_E4M3"}


@dataclass(frozen=True, slots=True)
class LayoutTensor:
    """A tensor of a quantized weight."""

    shapes: tuple[tuple[int, ...], ...]  # the allowed ones
    dtypes: tuple[str, ...]
    is_required: bool = True
    is_read: bool = True


QuantizedLayout = dict[str, LayoutTensor]  # by the suffix of the name, behind the path of the product


class TensorHeader(Protocol):
    """A tensor as a file's header describes it (`engine.weights.checkpoint.StoredTensor`)."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


def find_layouts(
    scheme: WeightScheme | None, stored: Mapping[str, TensorHeader], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, QuantizedLayout]:
    """Returns the layout of each weight that is stored quantized, by the path of its product. Raises CheckpointError
    for tensors that contradict the scheme."""
    layouts: dict[str, QuantizedLayout] = {}
    for name, shape in expected.items():
        path = name.removesuffix(_WEIGHT)
        if scheme is None or len(shape) != 2 or path == name or not _is_quantized(scheme, path, stored):
            continue
        if scheme.ignores(path):
            raise CheckpointError(
                f"{path} is stored quantized, though quantization_config says that it is not; give the config.json "
                "that belongs to these weights"
            )
        layouts[path] = _layout(scheme, *shape)
        _check(path, layouts[path], stored)
    return layouts


def _is_quantized(scheme: WeightScheme, path: str, stored: Mapping[str, TensorHeader]) -> bool:
    marks = {"gptq": "qweight", "awq": "qweight", "packed": "weight_packed"}
    if scheme.layout in marks:
        return f"{path}.{marks[scheme.layout]}" in stored
    weight = stored.get(f"{path}.weight")
    return weight is not None and weight.dtype == _CODE_DTYPES[scheme.kind]


def _layout(scheme: WeightScheme, rows: int, columns: int) -> QuantizedLayout:
    groups = 1 if scheme.group_size is None else -(-columns // scheme.group_size)
    in_word = 32 // BITS[scheme.kind]
    if scheme.layout == "gptq":
        return {
            "qweight": LayoutTensor(((columns // in_word, rows),), _INTS),
            "qzeros": LayoutTensor(((groups, rows // in_word),), _INTS),
            "scales": LayoutTensor(((groups, rows),), FLOATS),
            "g_idx": LayoutTensor(((columns,),), _INTS, is_required=False),
        }
    if scheme.layout == "awq":
        return {
            "qweight": LayoutTensor(((columns, rows // in_word),), _INTS),
            "qzeros": LayoutTensor(((groups, rows // in_word),), _INTS),
            "scales": LayoutTensor(((groups, rows),), FLOATS),
        }
    if scheme.layout == "packed":
        return {
            "weight_packed": LayoutTensor(((rows, -(-columns // in_word)),), _INTS),
            "weight_scale": LayoutTensor(_scale_shapes(scheme, rows, columns), FLOATS),
            "weight_zero_point": LayoutTensor(((-(-rows // in_word), groups),), _INTS, is_required=False),
            "weight_g_idx": LayoutTensor(((columns,),), _INTS, is_required=False),
            "weight_shape": LayoutTensor(((2,),), ("I64", "I32"), is_required=False, is_read=False),
        }
    # Calibrated scales for products that quantize their inputs to fp8 too; here such inputs stay as they are.
    of_inputs = LayoutTensor(((1,), ()), (*FLOATS, "I8", "F8_E4M3"), is_required=False, is_read=False)
    shapes = _scale_shapes(scheme, rows, columns)
    scale = "weight_scale_inv" if scheme.method == "fp8" and scheme.block else "weight_scale"
    other = LayoutTensor(shapes, FLOATS, is_required=False)
    return {
        "weight": LayoutTensor(((rows, columns),), (_CODE_DTYPES[scheme.kind],)),
        scale: LayoutTensor(shapes, FLOATS, is_required=scheme.method != "fp8"),
        **({} if scheme.method != "fp8" or scheme.block else {"weight_scale_inv": other}),
        "weight_zero_point": LayoutTensor(shapes, ("I8",), is_required=False),
        "input_scale": of_inputs,
        "activation_scale": of_inputs,
        "input_zero_point": of_inputs,
    }


def _scale_shapes(scheme: WeightScheme, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    if scheme.block is not None:
        height, width = scheme.block
        return ((-(-rows // height), -(-columns // width)),)
    if scheme.group_size is not None:
        return ((rows, -(-columns // scheme.group_size)),)
    return (rows, 1), (rows,), (1,), ()


def _check(path: str, layout: QuantizedLayout, stored: Mapping[str, TensorHeader]) -> None:
    for suffix, tensor in layout.items():
        found = stored.get(f"{path}.{suffix}")
        if found is None:
            if tensor.is_required:
                raise CheckpointError(f"{path}.{suffix} is missing; fetch the checkpoint again")
            continue
        if found.shape not in tensor.shapes or found.dtype not in tensor.dtypes:
            raise CheckpointError(
                f"{path}.{suffix} is {found.dtype} {list(found.shape)}; quantization_config and the model's shape ask "
                f"for {' or '.join(tensor.dtypes)} {' or '.join(str(list(shape)) for shape in tensor.shapes)}"
            )
