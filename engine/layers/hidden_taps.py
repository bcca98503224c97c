"""Copies hidden states out of a step, for heads that propose tokens from them (`engine.models.heads`).

Shapes: `T` tokens of the step, `D` hidden, `X` = D for each tap.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# torch copies this many values or more with its own threads, which then spin and take a core from the kernels of
# `engine.cpu`: a step of 64 tokens of a 135M shape took 1.5 times as long (2026-11).
_PARALLEL_VALUES = 32768


class HiddenTaps:
    """The residual stream of one step's tokens, as it is after some numbers of layers."""

    def __init__(self, num_layers: Sequence[int], residual_TD: torch.Tensor) -> None:
        """`num_layers` are the numbers of layers, each above 0 and below the model's; `residual_TD` gives the size,
        dtype and device."""
        self.num_layers = num_layers
        num_tokens, width = residual_TD.shape
        self.states_TX = residual_TD.new_empty((num_tokens, len(num_layers) * width))

    def keep(self, num_layers: int, residual_TD: torch.Tensor) -> None:
        """Copies the residual if the number of layers that it has passed is one of the taps."""
        width = residual_TD.shape[1]
        num_rows = max(1, (_PARALLEL_VALUES - 1) // width) if residual_TD.device.type == "cpu" else len(residual_TD)
        for place, wanted in enumerate(self.num_layers):
            if wanted != num_layers:
                continue
            tapped_TD = self.states_TX[:, place * width : (place + 1) * width]
            for into, rows in zip(tapped_TD.split(num_rows), residual_TD.split(num_rows), strict=True):
                into.copy_(rows)
