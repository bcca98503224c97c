"""Makes tiny DeepSeek-V3 and GLM-4.5 checkpoints with a layer that predicts further tokens (MTP), and computes what it
predicts in plain torch over the layers of `transformers`: no pages, no batches, whole texts at once.

Shapes: `T` entries, `D` hidden, `V` vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.engine.checkpoints import make_checkpoint


def make_mtp_checkpoint(
    family: str, folder: Path, num_layers: int = 3, *, is_often_right: bool = False, **overrides: Any
) -> Path:
    """Writes a random checkpoint whose layer behind the last one predicts further tokens, and returns its folder.

    If it `is_often_right`, layers add little to the residual, so the next token depends mostly on the last one, and
    `eh_proj` passes on the embedding and a little of the hidden state.
    """
    make_checkpoint(family, folder, num_hidden_layers=num_layers + 1, **overrides)
    [file] = folder.glob("*.safetensors")
    tensors, prefix = load_file(file), f"model.layers.{num_layers}."
    if is_often_right:
        tensors["model.embed_tokens.weight"].mul_(5.0)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.mul_(0.01)
    random = torch.Generator().manual_seed(3)
    embedding_VD = tensors["model.embed_tokens.weight"]
    hidden, noise = embedding_VD.shape[1], 0.03 if is_often_right else 0.3
    passed_DD = torch.eye(hidden) + noise * torch.randn((hidden, hidden), generator=random)
    mixed_DD = noise * torch.randn((hidden, hidden), generator=random)
    for name in ("enorm", "hnorm"):
        tensors[f"{prefix}{name}.weight"] = 1.0 + 0.1 * torch.randn(hidden, generator=random)
    tensors[f"{prefix}eh_proj.weight"] = torch.cat((passed_DD, mixed_DD), dim=1)
    tensors[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"] + 0.05
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{prefix}embed_tokens.weight"] = embedding_VD.clone()
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
    config.pop("num_mtp_layers", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class PlainMtp:
    """A target and its layer that predicts further tokens, in float32."""

    def __init__(self, folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text())
        self._num_layers = data["num_hidden_layers"]
        config = AutoConfig.from_pretrained(folder)
        config.num_hidden_layers = self._num_layers + 1
        deep = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
        self._layer = deep.model.layers[self._num_layers]
        self.target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        [file] = folder.glob("*.safetensors")
        prefix = f"model.layers.{self._num_layers}."
        self._own = {name.removeprefix(prefix): each for name, each in load_file(file).items()}
        self._eps = self.target.config.rms_norm_eps

    @torch.no_grad()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        """Returns the hidden states behind the target's final norm, [T, D]."""
        found: torch.Tensor = self.target.model(torch.tensor([token_ids])).last_hidden_state[0]
        return found

    @torch.no_grad()
    def draft(self, token_ids: list[int], count: int, first: int = 0) -> list[int]:
        """Returns the `count` likeliest tokens after a text, one after another, from the hidden states of its tokens
        from `first` on."""
        hidden, text = [*self.states(token_ids)[first:-1]], list(token_ids)
        for _ in range(count):
            out_D = self._last(text[first + 1 :], torch.stack(hidden), first)
            text.append(int((self._own["shared_head.head.weight"] @ out_D).argmax()))
            hidden.append(out_D)
        return text[len(token_ids) :]

    def _last(self, token_ids: list[int], hidden_TD: torch.Tensor, first: int) -> torch.Tensor:
        """Returns the hidden state [D] of the last entry."""
        embedding_TD = self._norm(self._own["embed_tokens.weight"][token_ids], "enorm")
        joined_TX = torch.cat((embedding_TD, self._norm(hidden_TD, "hnorm")), dim=1)
        x_1TD = (joined_TX @ self._own["eh_proj.weight"].T)[None]
        count = len(token_ids)
        positions = torch.arange(first, first + count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        out = self._layer(
            x_1TD,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.target.model.rotary_emb(x_1TD, positions),
        )
        out_1TD = out[0] if isinstance(out, tuple) else out
        return self._norm(out_1TD[0, -1], "shared_head.norm")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._own[f"{name}.weight"], self._eps)
