"""Describes the layer of DeepSeek-V3, R1 and GLM-4.5 checkpoints that predicts the token after the next one (MTP,
DeepSeek-V3, arXiv:2412.19437). Torch-free.

It is stored behind the last layer, as a layer of the same kind with tensors of its own before and after. The stored
copies of the embedding and the output head are not read: it shares those of the model.

Shapes: `D` hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.cache.kv_layout import DTYPE_BYTES
from engine.models.config import ModelConfig
from engine.models.shapes import LAYERS_PREFIX, Shapes, layer_shapes
from penstock.errors import ConfigError

MTP = "mtp"  # as `decode.draft_model`


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The shape of the first such layer."""

    layer: ModelConfig  # the target with this layer as its last one

    @classmethod
    def of(cls, target: ModelConfig, target_name: str) -> MtpConfig:
        """Raises ConfigError if the target has no such layer."""
        if not target.num_prediction_layers or target.experts is None:
            raise ConfigError(
                f"decode.draft_model = {MTP!r}: engine.model = {target_name!r} has no layers that predict further "
                "tokens; give an EAGLE-3 head or a small model with the same tokenizer"
            )
        experts = replace(target.experts, layers=target.experts.layers | {target.num_layers})
        layer = replace(
            target,
            num_layers=target.num_layers + 1,
            windows=(*target.windows, None),
            experts=experts,
            num_prediction_layers=target.num_prediction_layers - 1,
        )
        return cls(layer)

    @property
    def index(self) -> int:
        """The number of the layer."""
        return self.layer.num_layers - 1

    @property
    def taps(self) -> tuple[int, ...]:
        """After how many layers of the target its hidden states are taken: all, and the final norm."""
        return (self.index,)

    @property
    def prefix(self) -> str:
        return f"{LAYERS_PREFIX}{self.index}."

    def own_shapes(self) -> Shapes:
        """Returns the shapes of the tensors that other layers do not have, by name within the layer."""
        hidden = self.layer.hidden_size
        norms: Shapes = {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
        return norms | {"eh_proj.weight": (hidden, 2 * hidden)}

    def shapes(self) -> Shapes:
        """Returns the shape of each tensor that is read, by name."""
        within = self.own_shapes() | layer_shapes(self.layer, self.index)
        return {self.prefix + name: shape for name, shape in within.items()}

    def page_bytes(self, page_size: int, dtype: str) -> int:
        """Returns the size of a page of the layer's own KV."""
        return 2 * self.layer.num_kv_heads * page_size * self.layer.head_dim * DTYPE_BYTES[dtype]
