"""Describes the part of a stored tensor that one rank of a tensor-parallel worker reads. Torch-free.

`engine.models.sharding` decides the slices, `engine.weights.reader` reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engine.weights.quantization_config import WeightScheme, int4_group
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Places `start` to `stop` along dimension `dim`, then those of `more`; with `zeros`, zeros of the whole shape and
    nothing is read."""

    dim: int
    start: int
    stop: int
    zeros: bool = False
    more: tuple[tuple[int, int], ...] = ()  # further places, of a tensor that stores several products
    absent: bool = False  # only other ranks read the tensor

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The starts and stops of all runs of places, in the order in which they are read."""
        return ((self.start, self.stop), *self.more)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the slice of a tensor of shape `whole`."""
        if self.zeros:
            return whole
        count = sum(len(range(*slice(start, stop).indices(whole[self.dim]))) for start, stop in self.spans)
        return (*whole[: self.dim], count, *whole[self.dim + 1 :])


ABSENT = TensorSlice(0, 0, 0, absent=True)
TensorSlices = dict[str, TensorSlice]  # by tensor name


def check_slice_groups(
    slices: Mapping[str, TensorSlice],
    shapes: Mapping[str, tuple[int, ...]],
    scheme: WeightScheme | None,
    stored: Collection[str],
    quantization: str | None,
    dtype: str,
) -> None:
    """Raises ConfigError if a slice of a quantized weight begins or ends inside a group of inputs that share a scale,
    because such a slice could only be used dequantized, at several times the memory.

    `stored` holds the paths of the weights that the checkpoint stores quantized; `quantization` is what the others are
    quantized to while they are loaded. With `dtype` float32, weights are dequantized anyway unless their inputs are
    quantized too.
    """
    if dtype == "float32" and (scheme is None or scheme.activations is None):
        return
    for name, part in slices.items():
        inputs, is_stored = shapes.get(name, (0,))[-1], name.removesuffix(".weight") in stored
        is_product = name.endswith(".weight") and part.dim == 1 and not part.zeros
        if not is_product or not (is_stored or quantization == "int4"):
            continue
        group = scheme.group_of(inputs) if scheme is not None and is_stored else int4_group(inputs)
        if group >= inputs or not (part.start % group or part.stop % group):
            continue
        own = part.stop - part.start
        fix = f"weights in groups that divide {own}" if is_stored else "engine.quantization = int8, which scales rows"
        raise ConfigError(
            f"engine.tensor_parallel = {inputs // own} gives a rank {own} of the {inputs} inputs of {name}, which "
            f"splits its groups of {group} that share a scale; give a number of ranks that leaves each a multiple of "
            f"{group}, or {fix}"
        )
