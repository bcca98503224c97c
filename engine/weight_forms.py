"""Which tensors stand for one quantized product in each layout of `engine.weight_scheme`, and what shape they have.
Torch-free: the headers of the files are held against it before anything is loaded.

Shapes: `O` outputs, `I` inputs, `G` groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.weight_scheme import WeightScheme
from penstock.errors import CheckpointError

FLOATS = ("BF16", "F16", "F32")
_INTS = ("I32",)
_WEIGHT = ".weight"
BITS = {"int4": 4, "int8": 8, "fp8": 8}
_CODES = {"int4": "I8", "int8": "I8", "fp8": "F8_E4M3"}


@dataclass(frozen=True, slots=True)
class FormTensor:
    """One of the tensors of a product."""

    shapes: tuple[tuple[int, ...], ...]  # any of these
    dtypes: tuple[str, ...]
    is_required: bool = True
    is_read: bool = True


Form = dict[str, FormTensor]  # by the part of the name behind the product's


class Header(Protocol):
    """What a file says of one tensor: `engine.checkpoint.StoredTensor`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


def find_forms(
    scheme: WeightScheme | None, stored: Mapping[str, Header], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, Form]:
    """Of each product that is stored quantized, by its path. Raises CheckpointError where that contradicts itself."""
    forms: dict[str, Form] = {}
    for name, shape in expected.items():
        path = name.removesuffix(_WEIGHT)
        if scheme is None or len(shape) != 2 or path == name or not _is_quantized(scheme, path, stored):
            continue
        if scheme.ignores(path):
            raise CheckpointError(
                f"{path} is stored quantized, though quantization_config says that it is not; give the config.json "
                "that belongs to these weights"
            )
        form = _form(scheme, *shape)
        _check(path, form, stored)
        forms[path] = form
    return forms


def _is_quantized(scheme: WeightScheme, path: str, stored: Mapping[str, Header]) -> bool:
    marks = {"gptq": "qweight", "awq": "qweight", "packed": "weight_packed"}
    if scheme.layout in marks:
        return f"{path}.{marks[scheme.layout]}" in stored
    weight = stored.get(f"{path}.weight")
    return weight is not None and weight.dtype == _CODES[scheme.kind]


def _form(scheme: WeightScheme, rows: int, columns: int) -> Form:
    groups = 1 if scheme.group_size is None else -(-columns // scheme.group_size)
    in_word = 32 // BITS[scheme.kind]
    if scheme.layout == "gptq":
        return {
            "qweight": FormTensor(((columns // in_word, rows),), _INTS),
            "qzeros": FormTensor(((groups, rows // in_word),), _INTS),
            "scales": FormTensor(((groups, rows),), FLOATS),
            "g_idx": FormTensor(((columns,),), _INTS, is_required=False),
        }
    if scheme.layout == "awq":
        return {
            "qweight": FormTensor(((columns, rows // in_word),), _INTS),
            "qzeros": FormTensor(((groups, rows // in_word),), _INTS),
            "scales": FormTensor(((groups, rows),), FLOATS),
        }
    if scheme.layout == "packed":
        return {
            "weight_packed": FormTensor(((rows, -(-columns // in_word)),), _INTS),
            "weight_scale": FormTensor(_scale_shapes(scheme, rows, columns), FLOATS),
            "weight_zero_point": FormTensor(((-(-rows // in_word), groups),), _INTS, is_required=False),
            "weight_g_idx": FormTensor(((columns,),), _INTS, is_required=False),
            "weight_shape": FormTensor(((2,),), ("I64", "I32"), is_required=False, is_read=False),
        }
    # What inputs were calibrated to, for products that quantize them: here they stay as they are.
    of_inputs = FormTensor(((1,), ()), (*FLOATS, "I8", "F8_E4M3"), is_required=False, is_read=False)
    shapes = _scale_shapes(scheme, rows, columns)
    scale = "weight_scale_inv" if scheme.method == "fp8" and scheme.block else "weight_scale"
    other = FormTensor(shapes, FLOATS, is_required=False)
    return {
        "weight": FormTensor(((rows, columns),), (_CODES[scheme.kind],)),
        scale: FormTensor(shapes, FLOATS, is_required=scheme.method != "fp8"),
        **({} if scheme.method != "fp8" or scheme.block else {"weight_scale_inv": other}),
        "weight_zero_point": FormTensor(shapes, ("I8",), is_required=False),
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


def _check(path: str, form: Form, stored: Mapping[str, Header]) -> None:
    for suffix, tensor in form.items():
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
