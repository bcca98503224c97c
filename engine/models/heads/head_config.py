"""Parses an EAGLE-3 checkpoint (Li et al. 2025, arXiv:2503.01840) and checks that it fits its target. Torch-free.

Tensors are named as SafeAILab and SpecForge write them (`midlayer.`), or as vLLM does (`layers.0.`). `d2t` holds, for
each token of the head's vocabulary, the difference between its id in the target's vocabulary and its own.

Shapes: `D` hidden, `G` hidden of the target, `V` vocabulary of the head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.cache.kv_layout import DTYPE_BYTES
from engine.models.config import ModelConfig
from engine.models.config_fields import positive_int, read_json
from engine.models.shapes import Shapes, layer_shapes
from engine.weights.checkpoint import CONFIG_FILE, list_weight_files, read_headers
from penstock.errors import CheckpointError, ConfigError

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
HEAD_EMBEDDING, HEAD_MAP = "embed_tokens.weight", "d2t"
_LAYER_PREFIXES = ("midlayer.", "layers.0.")
_TARGET_KEYS = ("target_hidden_size", "draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids")
_NUM_TAPS = 3


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head's shape."""

    layer: ModelConfig  # its only layer, as that of a Llama model, and the vocabulary of the target
    target_hidden_size: int
    vocab_size: int
    taps: tuple[int, ...]  # after how many layers of the target its hidden states are taken
    norm_before_residual: bool  # the residual starts with the normalised hidden state
    layer_prefix: str
    has_embedding: bool  # otherwise it reads the target's
    has_map: bool  # otherwise its vocabulary is the target's

    @classmethod
    def from_folder(cls, path: str, target: ModelConfig, target_name: str) -> HeadConfig:
        """Parses a checkpoint folder. Raises CheckpointError if it is no EAGLE-3 head that can be served, ConfigError
        if it is not a head of the target."""
        folder = Path(path)
        file = folder / CONFIG_FILE
        data = read_json(file)
        options = {**(data.get("eagle_config") or {}), **data}
        if options.get("use_aux_hidden_state", True) is not True:
            raise CheckpointError(f"{file}: use_aux_hidden_state is false (EAGLE-1): only EAGLE-3 heads are supported")
        layer = ModelConfig.from_data(_layer_data(data), file)
        if layer.num_layers != 1:
            raise CheckpointError(f"{file}: num_hidden_layers = {layer.num_layers}: a head of one layer is needed")
        stored = read_headers(list_weight_files(folder))
        prefix = next((each for each in _LAYER_PREFIXES if f"{each}hidden_norm.weight" in stored), _LAYER_PREFIXES[0])
        config = cls(
            layer,
            positive_int(options, "target_hidden_size", file, layer.hidden_size),
            positive_int(options, "draft_vocab_size", file, layer.vocab_size),
            _read_taps(options, target, file),
            bool(options.get("norm_before_residual", False)),
            prefix,
            HEAD_EMBEDDING in stored,
            HEAD_MAP in stored,
        )
        config._check(path, target, target_name)
        return config

    def _check(self, path: str, target: ModelConfig, target_name: str) -> None:
        head = f"decode.draft_model = {path!r}"
        if self.target_hidden_size != target.hidden_size:
            raise ConfigError(
                f"{head} reads hidden states of {self.target_hidden_size} values and those of engine.model = "
                f"{target_name!r} have {target.hidden_size}; give the head of this model"
            )
        if self.layer.vocab_size != target.vocab_size:
            raise ConfigError(
                f"{head} is a head for {self.layer.vocab_size} tokens and engine.model = {target_name!r} has "
                f"{target.vocab_size}; give the head of this model"
            )
        if not self.has_map and self.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"{path} predicts {self.vocab_size} of {target.vocab_size} tokens and has no tensor {HEAD_MAP}, which "
                "says which ones; give a complete checkpoint"
            )
        if not self.has_embedding and self.layer.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"{path} holds no {HEAD_EMBEDDING}, and the embedding of engine.model = {target_name!r} has "
                f"{target.hidden_size} values instead of {self.layer.hidden_size}; give a complete checkpoint"
            )
        if not self.has_embedding and target.family.scaled_embedding:
            raise ConfigError(
                f"{head} holds no {HEAD_EMBEDDING}, and {target.family.architecture} scales its own, which heads "
                "cannot share; give a complete checkpoint"
            )

    def shapes(self) -> Shapes:
        """Returns the shape of each stored tensor that is read, by name."""
        hidden = self.layer.hidden_size
        shapes: Shapes = {
            "fc.weight": (hidden, len(self.taps) * self.target_hidden_size),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.vocab_size, hidden),
            f"{self.layer_prefix}hidden_norm.weight": (hidden,),
        }
        if self.has_embedding:
            shapes[HEAD_EMBEDDING] = (self.layer.vocab_size, hidden)
        for name, shape in layer_shapes(self.layer, 0).items():
            is_qkv = name.startswith("self_attn.") and name.endswith(".weight") and "o_proj" not in name
            shapes[self.layer_prefix + name] = (shape[0], 2 * hidden) if is_qkv else shape
        return shapes

    def page_bytes(self, page_size: int, dtype: str) -> int:
        """Returns the size of a page of the head's own KV."""
        return 2 * self.layer.num_kv_heads * page_size * self.layer.head_dim * DTYPE_BYTES[dtype]

    def weight_bytes(self, dtype: str, max_context: int) -> int:
        """Returns the size of the loaded head, tables of the rotary embedding included."""
        values = sum(math.prod(shape) for shape in self.shapes().values())
        return values * DTYPE_BYTES[dtype] + max_context * self.layer.rope_dim * 4


def is_head(path: str) -> bool:
    """Returns whether a checkpoint folder holds a head of the supported kind."""
    return any(name in ARCHITECTURES for name in _architectures(path))


def check_no_head(path: str) -> None:
    """Raises ConfigError if a checkpoint folder holds a head of another kind."""
    heads = [name for name in _architectures(path) if "eagle" in name.lower() or "mtp" in name.lower()]
    if heads:
        raise ConfigError(
            f"decode.draft_model = {path!r} is {heads[0]}, a head over another model's hidden states that is not "
            f"supported; give an EAGLE-3 head ({', '.join(ARCHITECTURES)}) or a small model with the same tokenizer"
        )


def _architectures(path: str) -> list[str]:
    return read_json(Path(path, CONFIG_FILE)).get("architectures") or []


def _layer_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a Llama model with the head's layer."""
    kept = {key: value for key, value in data.items() if key not in (*_TARGET_KEYS, "eagle_config")}
    return kept | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def _read_taps(options: Mapping[str, Any], target: ModelConfig, file: Path) -> tuple[int, ...]:
    """Returns the taps that the checkpoint names, or those that the authors of EAGLE-3 use."""
    layers = target.num_layers
    given = options.get("eagle_aux_hidden_state_layer_ids")
    taps = [2, layers // 2, layers - 3] if given is None else given
    is_list = isinstance(taps, list) and len(taps) == _NUM_TAPS
    if not is_list or not all(isinstance(tap, int) and 0 < tap < layers for tap in taps):
        raise CheckpointError(
            f"{file}: eagle_aux_hidden_state_layer_ids = {taps!r}: {_NUM_TAPS} layers of the target are needed, from 1 "
            f"to {layers - 1}"
        )
    return tuple(taps)
