"""Trains the bundled model and its draft from scratch: `python -m models.train.train --out models --steps N --seed 0`.

It works offline and writes two Hugging Face folders that share one tokenizer. Training runs in fp32 (bf16 autocast with
`--fast`) on one thread; tensors are stored in bf16 and config.json asks for float32, so that loading is exact and every
engine computes the same function. Equal seed, steps and machine type give equal weights.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from models.train import corpus

VOCAB_SIZE = 2048
CONTEXT_TOKENS = 2048
TOKENIZER_DOCUMENTS = 8000
SHORT_TOKENS = 256  # in most batches: one to four documents a row
LONG_EVERY = 8  # every eighth batch has rows of the whole context, so that all RoPE positions are trained


@dataclass(frozen=True)
class BundledShape:
    """The architecture of one of the two models."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 32
    peak_lr: float = 3e-3


MAIN = BundledShape("penstock-tiny", 192, 512, num_layers=6, num_heads=6, num_kv_heads=2)
DRAFT = BundledShape("penstock-tiny-draft", 96, 256, num_layers=2, num_heads=3, num_kv_heads=1, peak_lr=6e-3)


def train_tokenizer(seed: int, num_documents: int = TOKENIZER_DOCUMENTS) -> Tokenizer:
    """Trains byte-level BPE over the corpus; digits stay single, so that the model learns sums by column."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(corpus.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain = (_without_specials(text) for text in islice(corpus.documents(seed), num_documents))
    tokenizer.train_from_iterator(plain, trainer)
    # Plain prompts start with bos, as in training; the chat template writes its own.
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{corpus.BOS} $A",
                pair=f"{corpus.BOS} $A $B",
                special_tokens=[(corpus.BOS, corpus.SPECIAL_TOKENS.index(corpus.BOS))],
            ),
        ]
    )
    return tokenizer


def _without_specials(text: str) -> str:
    for token in corpus.SPECIAL_TOKENS:
        text = text.replace(token, "\n")
    return text


def packed_batches(tokenizer: Tokenizer, seed: int, batch_tokens: int) -> Iterator[torch.Tensor]:
    """Yields [rows, length] batches of new documents laid end to end; no document occurs twice."""
    stream = corpus.documents(seed)
    buffer: list[int] = []
    for index in range(1 << 62):
        length = CONTEXT_TOKENS if index % LONG_EVERY == LONG_EVERY - 1 else SHORT_TOKENS
        length = min(length, batch_tokens)
        while len(buffer) < batch_tokens:
            for encoded in tokenizer.encode_batch(list(islice(stream, 64)), add_special_tokens=False):
                buffer += encoded.ids
        yield torch.tensor(buffer[:batch_tokens]).view(-1, length)
        del buffer[:batch_tokens]


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Returns a linear warm-up over 100 steps (5 % of short runs), then a cosine down to a fiftieth of the peak."""
    warmup = max(1, min(100, num_steps // 20))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def _loss_function(model: LlamaForCausalLM, bf16: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    embedding = model.model.embed_tokens

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
            logits = F.linear(hidden[:, :-1], embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def _optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Returns Muon for the matrices of the layers, AdamW for embedding and norms; one learning rate suits both."""
    layers = [p for p in model.model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in layers)]
    return [
        torch.optim.Muon(layers, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    shape: BundledShape,
    tokenizer: Tokenizer,
    seed: int,
    num_steps: int,
    batch_tokens: int = 4096,
    fast: bool = False,
) -> tuple[LlamaForCausalLM, float]:
    """Trains one model and returns it with the mean loss over its last steps (nats per token).

    `fast` compiles the step and computes in bf16 where that is safe; it needs a C++ compiler. Raises
    FloatingPointError if the loss diverges.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**_configs(shape)["config.json"]))
    model.train()
    optimizers = _optimizers(model)
    long_loss = _loss_function(model, bf16=fast)
    short_loss = torch.compile(long_loss, dynamic=False) if fast else long_loss
    # The tokenizer was trained on the stream of `seed`; the models are trained on others.
    batches = packed_batches(tokenizer, seed + 1, batch_tokens)
    recent: list[float] = []
    started_s = time.monotonic()
    for step, tokens in enumerate(islice(batches, num_steps)):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(step, num_steps, shape.peak_lr)
        is_short = tokens.shape[1] <= SHORT_TOKENS
        # On a CPU, fused attention takes twice as long as plain on short rows, and a sixth as long on long rows.
        model.set_attn_implementation("eager" if is_short else "sdpa")
        loss = (short_loss if is_short else long_loss)(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-49:], loss.item()]
        if not math.isfinite(recent[-1]):
            raise FloatingPointError(f"loss {recent[-1]} at step {step}: lower peak_lr ({shape.peak_lr})")
        if (step + 1) % 50 == 0 or step + 1 == num_steps:
            elapsed_s = time.monotonic() - started_s
            print(
                f"{shape.name} step {step + 1}/{num_steps} loss {sum(recent) / len(recent):.4f} {elapsed_s:.0f} s",
                flush=True,
            )
    return model.eval(), sum(recent) / max(1, len(recent))


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, shape: BundledShape, folder: Path) -> None:
    """Writes a Hugging Face folder: bf16 tensors, a config with the keys that every loader knows, the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it readable for its owner only
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in _configs(shape).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _configs(shape: BundledShape) -> dict[str, dict[str, Any]]:
    bos, eos, end, pad = range(4)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": CONTEXT_TOKENS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pad_token_id": pad,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
    }
    tokenizer_config: dict[str, object] = {
        "bos_token": corpus.BOS,
        "chat_template": corpus.CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": corpus.EOS,
        "model_max_length": CONTEXT_TOKENS,
        "pad_token": corpus.PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation: dict[str, object] = {"bos_token_id": bos, "eos_token_id": [eos, end], "pad_token_id": pad}
    special: dict[str, object] = {"bos_token": corpus.BOS, "eos_token": corpus.EOS, "pad_token": corpus.PAD}
    return {
        "config.json": config,
        "generation_config.json": generation,
        "special_tokens_map.json": special,
        "tokenizer_config.json": tokenizer_config,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled model and its draft.")
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder that receives the two model folders")
    parser.add_argument("--steps", type=int, default=1800, help="optimizer steps of each model, 4096 tokens a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=(MAIN.name, DRAFT.name), help="train one of the two")
    parser.add_argument("--fast", action="store_true", help="compile and use bf16 (needs a C++ compiler)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the sum order, and so the weights, depend on the number of threads
    tokenizer = train_tokenizer(args.seed)
    for shape in (MAIN, DRAFT):
        if args.only in (None, shape.name):
            model, loss = train(shape, tokenizer, args.seed, args.steps, fast=args.fast)
            export(model, tokenizer, shape, args.out / shape.name)
            print(f"{shape.name}: {model.num_parameters()} parameters, final loss {loss:.4f}")


if __name__ == "__main__":
    main()
