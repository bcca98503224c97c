"""Reads the folder of a LoRA adapter as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`.

It refuses, by name, every setting that changes the computation and that the engine does not implement. It never reads
more than the largest adapter that a slot can hold.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from engine.adapters.products import AdaptedProduct, ProductPart
from engine.weights.checkpoint import model_name
from penstock.errors import CheckpointError
from penstock.kv.adapter_files import CONFIG_FILE, WEIGHTS_FILE, AdapterRef, revision_of

_MAX_CONFIG_BYTES = 1 << 20
_HEADER_BYTES = 1 << 20  # allowed for the header of the weights' file
_VALUE_BYTES = 4  # adapters are often stored in float32
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_HEAD_MODULES = ("lm_head", "embed_tokens")
# Settings that change the computation, with the values that leave it plain LoRA.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "modules_to_save": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "arrow_config": ({},),
    "use_bdlora": (False,),
}
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")  # others (PiSSA, OLoRA, LoftQ) change the model itself

AdapterTensors = dict[str, tuple[torch.Tensor, torch.Tensor]]  # by module: A [r, I], and B [O, r] times the scale


def read_adapter(ref: AdapterRef, products: Iterable[AdaptedProduct], max_rank: int) -> AdapterTensors:
    """Returns the adapter's matrices, on the CPU. Blocks.

    Raises CheckpointError, which names the adapter, what is wrong and the fix.
    """
    parts = {part.module: part for product in products for part in product.parts}
    most_values = sum(max_rank * sum(part.whole) for part in parts.values())
    folder = Path(ref.path)
    config_bytes = _read(ref, folder / CONFIG_FILE, _MAX_CONFIG_BYTES)
    weights_bytes = _read(ref, folder / WEIGHTS_FILE, most_values * _VALUE_BYTES + _HEADER_BYTES)
    revision = revision_of(config_bytes, weights_bytes)
    if revision != ref.revision:
        raise CheckpointError(
            f"{ref}: its files have revision {revision}, but revision {ref.revision} was requested; restart the "
            "routers, which read revisions at their start"
        )
    rank, scale = _read_config(ref, config_bytes, max_rank)
    try:
        tensors = load(weights_bytes)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{ref}: {WEIGHTS_FILE} is damaged ({error}); fetch the adapter again") from error
    return _pair_up(ref, tensors, parts, rank, scale)


def _read(ref: AdapterRef, path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{ref}: {path.name}: {error.strerror}; give the folder of a PEFT adapter") from error
    if len(content) > limit:
        raise CheckpointError(
            f"{ref}: {path.name} has more than {limit} bytes, the most that an adapter of engine.max_adapter_rank can "
            "have; raise that, or give an adapter of this model"
        )
    return content


def _read_config(ref: AdapterRef, content: bytes, max_rank: int) -> tuple[int, float]:
    """Returns the rank and the scale of the adapter's product."""
    try:
        config = json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"{ref}: {CONFIG_FILE} is not valid JSON ({error}); fetch the adapter again") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{ref}: peft_type = {kind!r}; only LORA is served")
    for name, plain in _PLAIN.items():
        value = config.get(name)
        if value is not None and value not in plain:
            raise CheckpointError(f"{ref}: {name} = {value!r} is not supported; train the adapter without it")
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{ref}: init_lora_weights = {start!r} changes the model's own weights; save the adapter converted to "
            "plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise CheckpointError(f"{ref}: r = {rank!r}; give a rank of 1 or more")
    if rank > max_rank:
        raise CheckpointError(f"{ref}: r = {rank}, but slots hold rank {max_rank}; raise engine.max_adapter_rank")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise CheckpointError(f"{ref}: lora_alpha = {alpha!r}; give a number")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pair_up(
    ref: AdapterRef,
    tensors: Mapping[str, torch.Tensor],
    parts: Mapping[str, ProductPart],
    rank: int,
    scale: float,
) -> AdapterTensors:
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        module = model_name(found["module"]) if found else ""
        if found is None or module not in parts:
            raise CheckpointError(f"{ref}: {_refusal(name, module)}")
        outputs, inputs = parts[module].whole
        wanted = (rank, inputs) if found["side"] == "A" else (outputs, rank)
        if tensor.shape != wanted or not tensor.is_floating_point():
            raise CheckpointError(
                f"{ref}: {name} is {tensor.dtype} {list(tensor.shape)}, expected floats {list(wanted)}; give an "
                "adapter of this model"
            )
        if not tensor.isfinite().all():
            raise CheckpointError(f"{ref}: {name} holds values that are not finite; train the adapter again")
        sides.setdefault(module, {})[found["side"]] = tensor.float()
    if not sides:
        raise CheckpointError(f"{ref}: {WEIGHTS_FILE} holds no tensors; fetch the adapter again")
    for module, pair in sides.items():
        if len(pair) < 2:
            raise CheckpointError(f"{ref}: {module} has only lora_{next(iter(pair))}; fetch the adapter again")
    return {module: (pair["A"], pair["B"] * scale) for module, pair in sides.items()}


def _refusal(name: str, module: str) -> str:
    if "lora_magnitude_vector" in name:
        return f"{name} belongs to DoRA, which is not supported; train the adapter without it"
    if ".experts" in name:
        return f"{name} adapts an expert, which is not supported; adapt only the attention"
    if "lora_embedding" in name or module.split(".")[-1] in _HEAD_MODULES:
        return f"{name} adapts the embedding or the head, which is not supported; leave them out of target_modules"
    return f"{name} adapts nothing in this model; give an adapter of this model"
