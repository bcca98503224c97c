"""Trains the EAGLE-3 head of the bundled model: `python -m models.train.train_head --out models --steps N --seed 0`.

It works offline. As in the paper (Li et al. 2025, arXiv:2503.01840), the head is trained on its own outputs for a few
steps, so that it can draft several tokens: in step k the entry at p reads the head's output of step k - 1 at p - 1, and
attends to the entries of the target's hidden states up to p - k and to those of the steps since. It learns the target's
distribution over the most frequent tokens.

Shapes: `B` rows, `T` entries, `D` hidden, `H` head dim, `V` vocabulary of the head.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaForCausalLM

from models.train.train import MAIN, learning_rate, packed_batches

NAME = "penstock-tiny-eagle3"
VOCAB_SIZE = 1024
UNROLLED_STEPS = 3
_DECAY = 0.8  # of the loss from one unrolled step to the next
_PEAK_LR = 4e-3
_COUNTED_BATCHES = 40  # from which the most frequent tokens are known
_INNER = 512
_EPS = 1e-6
_THETA = 10000.0


class _Attention(nn.Module):
    """The projections, by the names that checkpoints have."""

    def __init__(self) -> None:
        super().__init__()
        heads, kv_heads = MAIN.num_heads * MAIN.head_dim, MAIN.num_kv_heads * MAIN.head_dim
        self.q_proj = nn.Linear(2 * MAIN.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(2 * MAIN.hidden_size, kv_heads, bias=False)
        self.v_proj = nn.Linear(2 * MAIN.hidden_size, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, MAIN.hidden_size, bias=False)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(MAIN.hidden_size, _INNER, bias=False)
        self.up_proj = nn.Linear(MAIN.hidden_size, _INNER, bias=False)
        self.down_proj = nn.Linear(_INNER, MAIN.hidden_size, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(MAIN.hidden_size, _EPS) for _ in range(3)
        )
        self.self_attn, self.mlp = _Attention(), _Block()


class TrainedHead(nn.Module):
    """A head whose parameters have the names of a checkpoint's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * MAIN.hidden_size, MAIN.hidden_size, bias=False)
        self.midlayer = _Layer()
        self.norm = nn.RMSNorm(MAIN.hidden_size, _EPS)
        self.lm_head = nn.Linear(MAIN.hidden_size, VOCAB_SIZE, bias=False)

    def unroll(self, embedding_BTD: torch.Tensor, states_BTX: torch.Tensor) -> list[torch.Tensor]:
        """Returns the logits [B, T, V] of each step; those of step k mean nothing before entry k."""
        layer, hidden_BTD = self.midlayer, self.fc(states_BTX)
        embedding_BTD = layer.input_layernorm(embedding_BTD)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        logits = []
        for step in range(UNROLLED_STEPS):
            x = torch.cat((embedding_BTD, layer.hidden_norm(hidden_BTD)), dim=-1)
            q = _turn(_heads(layer.self_attn.q_proj(x)))
            keys.append(_turn(_heads(layer.self_attn.k_proj(x))))
            values.append(_heads(layer.self_attn.v_proj(x)))
            residual = hidden_BTD + layer.self_attn.o_proj(_attend(q, keys, values))
            hidden_BTD = residual + layer.mlp(layer.post_attention_layernorm(residual))
            logits.append(self.lm_head(self.norm(hidden_BTD)))
            if step + 1 < UNROLLED_STEPS:
                hidden_BTD = F.pad(hidden_BTD[:, :-1], (0, 0, 1, 0))
        return logits


def _heads(x_BTA: torch.Tensor) -> torch.Tensor:
    return x_BTA.unflatten(-1, (-1, MAIN.head_dim)).transpose(1, 2)


def _turn(x_BNTH: torch.Tensor) -> torch.Tensor:
    frequencies = _THETA ** (-torch.arange(0, MAIN.head_dim, 2) / MAIN.head_dim)
    angles_TH = (torch.arange(x_BNTH.shape[2])[:, None] * frequencies).repeat(1, 2)
    first, second = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * angles_TH.cos() + torch.cat((-second, first), dim=-1) * angles_TH.sin()


def _attend(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Attends from the newest step: to the first step's entries up to that many before the query, and to one entry of
    each step since.
    """
    step, count, groups = len(keys) - 1, q.shape[2], MAIN.num_heads // MAIN.num_kv_heads
    k, v = (torch.stack(each).repeat_interleave(groups, dim=2) for each in (keys, values))
    scores = q @ k[0].transpose(-1, -2)
    scores = scores.masked_fill(~torch.ones(count, count, dtype=torch.bool).tril(-step), -torch.inf)
    shifted_k, shifted_v = ([each[i].roll(step - i, dims=2) for i in range(1, step + 1)] for each in (k, v))
    own = [(q * each).sum(-1, keepdim=True) for each in shifted_k]
    weights = (torch.cat((scores, *own), dim=-1) * MAIN.head_dim**-0.5).softmax(-1)
    mixed = weights[..., :count] @ v[0]
    for place, each in enumerate(shifted_v):
        mixed = mixed + weights[..., count + place, None] * each
    return mixed.transpose(1, 2).flatten(2)


def frequent_tokens(tokenizer: Tokenizer, seed: int, batch_tokens: int) -> torch.Tensor:
    """Returns the `VOCAB_SIZE` most frequent tokens in ascending order."""
    counts = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.int64)
    for tokens in islice(packed_batches(tokenizer, seed, batch_tokens), _COUNTED_BATCHES):
        counts += torch.bincount(tokens.flatten(), minlength=len(counts))
    return counts.argsort(descending=True, stable=True)[:VOCAB_SIZE].sort().values


def loss_of(head: TrainedHead, target: LlamaForCausalLM, ids_V: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy between the target's distribution and the head's; later steps count less."""
    with torch.no_grad():
        output = target(tokens_BT, output_hidden_states=True)
        layers = target.config.num_hidden_layers
        states = torch.cat([output.hidden_states[tap] for tap in (2, layers // 2, layers - 3)], dim=-1)[:, :-1]
        # The entry at p predicts the token at p + 2, whose distribution the target gives at p + 1.
        wanted = output.logits[:, 1:, ids_V].softmax(-1)
        embedding = target.get_input_embeddings()(tokens_BT[:, 1:])
    total = torch.zeros(())
    for step, logits in enumerate(head.unroll(embedding, states)):
        entropy = -(wanted * logits.log_softmax(-1)).sum(-1)
        total = total + _DECAY**step * entropy[:, step:].mean()
    return total


def train_head(folder: Path, num_steps: int, seed: int, batch_tokens: int = 1024) -> tuple[TrainedHead, torch.Tensor]:
    """Trains a head for the model in `folder`, and returns it with the target's token for each of its own."""
    torch.manual_seed(seed)
    target = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids_V = frequent_tokens(tokenizer, seed + 2, batch_tokens)
    head = TrainedHead()
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[ids_V])
    matrices = [each for each in head.parameters() if each.dim() == 2 and each is not head.lm_head.weight]
    others = [each for each in head.parameters() if not any(each is matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    recent: list[float] = []
    started_s = time.monotonic()
    # The models were trained on the streams of the two seeds before.
    for step, tokens in enumerate(islice(packed_batches(tokenizer, seed + 3, batch_tokens), num_steps)):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(step, num_steps, _PEAK_LR)
        loss = loss_of(head, target, ids_V, tokens if tokens.shape[1] <= 512 else tokens.view(-1, 512))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-49:], loss.item()]
        if (step + 1) % 50 == 0 or step + 1 == num_steps:
            mean, elapsed_s = sum(recent) / len(recent), time.monotonic() - started_s
            print(f"{NAME} step {step + 1}/{num_steps} loss {mean:.4f} {elapsed_s:.0f} s", flush=True)
    return head.eval(), ids_V


def export_head(head: TrainedHead, ids_V: torch.Tensor, vocab_size: int, folder: Path) -> None:
    """Writes a checkpoint folder: bf16 tensors and the map between the vocabularies."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    tensors["d2t"] = ids_V - torch.arange(len(ids_V))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids_V, True)
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it readable for its owner only
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(ids_V),
        "head_dim": MAIN.head_dim,
        "hidden_act": "silu",
        "hidden_size": MAIN.hidden_size,
        "intermediate_size": _INNER,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": MAIN.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": MAIN.num_kv_heads,
        "rms_norm_eps": _EPS,
        "rope_theta": _THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the bundled models")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    head, ids_V = train_head(arguments.out / MAIN.name, arguments.steps, arguments.seed)
    export_head(head, ids_V, 2048, arguments.out / NAME)


if __name__ == "__main__":
    main()
