"""Copies hidden states out of a step, for heads that propose tokens from them (`engine.models.heads`).

Shapes: `T` tokens of the step, `D` hidden, `X` = D for each tap.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
        for place, wanted in enumerate(self.num_layers):
            if wanted == num_layers:
                self.states_TX[:, place * width : (place + 1) * width] = residual_TD
