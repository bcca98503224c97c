"""Makes random EAGLE-3 checkpoints, and computes what they predict in plain torch, from the paper (arXiv:2503.01840)
and the published format: no pages, no batches, whole texts at once.

Shapes: `T` entries, `D` hidden, `V` vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

Tensors = dict[str, torch.Tensor]


def make_head(target: Path, folder: Path, *, prefix: str = "midlayer.", embeds: bool = False, **overrides: Any) -> Path:
    """Writes a random head for a Llama checkpoint that predicts half of its tokens, and returns its folder."""
    found = json.loads((target / "config.json").read_text())
    hidden, vocab = found["hidden_size"], found["vocab_size"]
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
    config: dict[str, Any] = {key: found[key] for key in keys}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "rope_theta": 5000.0, "hidden_act": "silu"}
    config |= {"draft_vocab_size": vocab // 2} | overrides
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    inner, drafted = config["intermediate_size"], config["draft_vocab_size"]
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafted, hidden),
        **{
            f"{prefix}{name}.weight": (hidden,)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        f"{prefix}self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        f"{prefix}self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        f"{prefix}self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        f"{prefix}self_attn.o_proj.weight": (hidden, heads * head_dim),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
    }
    if embeds:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(shape, generator=generator) * (1.0 if len(shape) == 1 else 3.0 * shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }
    if drafted < vocab:
        chosen = torch.randperm(vocab, generator=generator)[:drafted].sort().values
        tensors["d2t"] = chosen - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class PlainHead:
    """A head and its target in float32."""

    def __init__(self, target: Path, head: Path) -> None:
        self.config = json.loads((head / "config.json").read_text())
        stored = load_file(head / "model.safetensors")
        self.tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in stored.items()}
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        layers = self.target.config.num_hidden_layers
        self.taps = self.config.get("eagle_aux_hidden_state_layer_ids", [2, layers // 2, layers - 3])
        own = self.tensors.get("embed_tokens.weight")
        self.embedding_VD = self.target.get_input_embeddings().weight.detach() if own is None else own

    @torch.no_grad()
    def draft(self, token_ids: list[int], count: int, first: int = 0) -> list[int]:
        """Returns the `count` likeliest tokens after a text, one after another, from the hidden states of its tokens
        from `first` on."""
        states = self.target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        fused_TD = torch.cat([states[tap][0] for tap in self.taps], dim=1) @ self.tensors["fc.weight"].T
        hidden = [*fused_TD[first:-1]]
        text = list(token_ids)
        for _ in range(count):
            out_D, logits_V = self.last(text[first + 1 :], torch.stack(hidden), first)
            text.append(int(logits_V.argmax()))
            hidden.append(out_D)
        return text[len(token_ids) :]

    def last(self, token_ids: list[int], hidden_TD: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the last entry's hidden state [D] and logits [V]."""
        layer = {name.removeprefix("midlayer."): each for name, each in self.tensors.items()}
        normed_TD = self._norm(hidden_TD, layer["hidden_norm.weight"])
        residual_TD = normed_TD if self.config.get("norm_before_residual") else hidden_TD
        embedding_TD = self._norm(self.embedding_VD[token_ids], layer["input_layernorm.weight"])
        x_TX = torch.cat((embedding_TD, normed_TD), dim=1)
        residual_TD = residual_TD + self._attend(x_TX, layer, first)
        x_TD = self._norm(residual_TD, layer["post_attention_layernorm.weight"])
        inner_TF = F.silu(x_TD @ layer["mlp.gate_proj.weight"].T) * (x_TD @ layer["mlp.up_proj.weight"].T)
        out_D = (residual_TD + inner_TF @ layer["mlp.down_proj.weight"].T)[-1]
        drafted_W = layer["lm_head.weight"] @ self._norm(out_D, layer["norm.weight"])
        ids_W = torch.arange(len(drafted_W)) + layer.get("d2t", 0)
        return out_D, torch.full((len(self.embedding_VD),), -torch.inf).index_copy(0, ids_W, drafted_W)

    def _attend(self, x_TX: torch.Tensor, layer: Tensors, first: int) -> torch.Tensor:
        head_dim, (count, _) = self.config["head_dim"], x_TX.shape
        q, k, v = (
            (x_TX @ layer[f"self_attn.{name}_proj.weight"].T).view(count, -1, head_dim).transpose(0, 1)
            for name in "qkv"
        )
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.arange(first, first + count)[:, None] * frequencies
        q, k = (_rotate(each, torch.cat((angles, angles), dim=1)) for each in (q, k))
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        return mixed.transpose(0, 1).flatten(1) @ layer["self_attn.o_proj.weight"].T

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config["rms_norm_eps"])


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
