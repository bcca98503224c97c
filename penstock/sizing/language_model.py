"""Finds the language model in the `config.json` of a multi-modal model. Pure.

Published folders of Gemma-3 and Llama 4 describe it in `text_config`, beside the parts that read images, which are not
served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """The language model of a multi-modal architecture."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of `transformers`, for what published files leave out


LANGUAGE_MODELS = {  # by multi-modal architecture
    "Gemma3ForConditionalGeneration": LanguageModel(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
        },
    ),
    "Llama4ForConditionalGeneration": LanguageModel("Llama4ForCausalLM", "llama4_text"),
}
# Keys of the whole file that concern images only.
_IMAGE_KEYS = frozenset({
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index", "boi_token_id",
    "eoi_token_id", "image_token_id",
})  # fmt: skip
_END_TOKENS = "eos_token_id"


def is_multi_modal(config: Mapping[str, Any]) -> bool:
    return _find(config) is not None


def language_model_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the language model's configuration in the form of a folder of its own; any other file's as it is.

    Keys of the whole file hold for it too, such as the quantization. Where both have one, that of `text_config` counts,
    except for end tokens: instruct models add theirs to the whole file.
    """
    found = _find(config)
    if found is None:
        return config
    text = config.get("text_config")
    whole = {key: value for key, value in config.items() if key not in _IMAGE_KEYS and key != "text_config"}
    own: dict[str, Any] = {"architectures": [found.architecture], "model_type": found.model_type}
    if whole.get(_END_TOKENS) is not None:
        own[_END_TOKENS] = whole[_END_TOKENS]
    return {**found.defaults, **whole, **(text if isinstance(text, Mapping) else {}), **own}


def _find(config: Mapping[str, Any]) -> LanguageModel | None:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        return None
    return LANGUAGE_MODELS.get(architectures[0])
