"""Measures how quantization changes the bundled model: its logits and greedy tokens compared with those in float32.

The model is given the tokens of held-out text (teacher forcing), so that every kind is compared at the same positions.
Attention reads KV as it is stored, even within a chunk. Further rows show the error of KV itself with one scale for
each token and head, as in our pages, and with one for each page and head. `python -m benchmarks.engine.quality`
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from tokenizers import Tokenizer

from benchmarks.common.report import Row, publish
from benchmarks.common.shapes import BUNDLED
from engine.engine import Engine
from engine.kernels.kv_quantization import dequantize, quantize
from engine.step.batch import build_batch
from engine.step.sequence import ScheduledSequence, Sequence
from models.train.corpus import documents
from penstock.config import EngineConfig
from penstock.types import RequestId, SamplingParams

KINDS: dict[str, dict[str, object]] = {
    "bf16": {"dtype": "bfloat16"},
    "KV fp8": {"dtype": "bfloat16", "kv_dtype": "fp8"},
    "KV int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "weights int8": {"dtype": "bfloat16", "quantization": "int8"},
    "weights fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "weights int4": {"dtype": "bfloat16", "quantization": "int4"},
    "weights int4, KV fp8": {"dtype": "bfloat16", "quantization": "int4", "kv_dtype": "fp8"},
}
_SEED = 20_000  # its documents were not trained on
_HEADROOM = {torch.int8: 2.0, torch.float8_e4m3fn: 16.0}  # above the first token's largest value


@dataclass(frozen=True, slots=True)
class Quality:
    """The distance of logits from those in float32."""

    error: float  # root mean square of the difference over that of the logits
    agreement: float  # share of positions with the same most likely token
    divergence: float  # mean Kullback-Leibler, nats


def texts(num_texts: int, num_tokens: int) -> list[list[int]]:
    """Returns the first tokens of held-out documents that are long enough."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    encoded = (tokenizer.encode(text).ids for text in documents(_SEED))
    return [tokens[:num_tokens] for tokens in islice((ids for ids in encoded if len(ids) >= num_tokens), num_texts)]


def load(**changes: object) -> Engine:
    settings = {"model": str(BUNDLED), "num_pages": 64, "device": "cpu", "share_weights": False, **changes}
    return Engine.load(EngineConfig.model_validate(settings))


def logits(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Returns the logits of every position, float32 [T, V]."""
    page_size = engine.layout.page_size
    sequence = Sequence(RequestId("quality"), list(tokens), len(tokens), SamplingParams(max_tokens=1), b"")
    sequence.pages = engine.pool.allocate(-(-len(tokens) // page_size))
    try:
        batch = build_batch([ScheduledSequence(sequence, len(tokens))], page_size, torch.device("cpu"))
        everywhere = replace(batch, logit_rows_R=torch.arange(len(tokens)))
        return engine.runner.forward(everywhere).float()
    finally:
        engine.pool.release(sequence.pages)


def compare(found_TV: torch.Tensor, wanted_TV: torch.Tensor) -> Quality:
    error = (found_TV - wanted_TV).square().mean().sqrt() / wanted_TV.square().mean().sqrt()
    same = (found_TV.argmax(-1) == wanted_TV.argmax(-1)).float().mean()
    divergence = torch.nn.functional.kl_div(
        found_TV.log_softmax(-1), wanted_TV.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    return Quality(float(error), float(same), float(divergence))


def measure(prompts: list[list[int]], kinds: dict[str, dict[str, object]]) -> dict[str, Quality]:
    """Compares each kind with float32."""
    exact = load(dtype="float32")
    wanted = torch.cat([logits(exact, tokens) for tokens in prompts])
    found = {}
    for name, changes in kinds.items():
        engine = load(**changes)
        found[name] = compare(torch.cat([logits(engine, tokens) for tokens in prompts]), wanted)
    return found


def kv_of(tokens: list[int]) -> torch.Tensor:
    """Returns the full pages of a text, float32 [P, L, 2, K, S, H]."""
    engine = load(dtype="float32")
    logits(engine, tokens)
    used = engine.kv_pages.abs().amax(dim=(1, 2, 3, 5)).gt(0).all(dim=1)
    return engine.kv_pages[used]


def page_scaled(kv: torch.Tensor, dtype: torch.dtype, by_first_token: bool) -> torch.Tensor:
    """Quantizes with one scale for each page and head, set by all of its tokens or by its first with headroom."""
    peaks = kv.abs().amax(dim=-1)
    peak = peaks[..., 0] * _HEADROOM[dtype] if by_first_token else peaks.amax(dim=-1)
    largest = 127.0 if dtype == torch.int8 else 448.0
    scale = (peak / largest).clamp(min=1e-30)[..., None, None]
    scaled = (kv / scale).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled.to(dtype).float()) * scale


def kv_rows(kv: torch.Tensor) -> Iterator[Row]:
    for name, dtype in (("fp8", torch.float8_e4m3fn), ("int8", torch.int8)):
        codes, scales = quantize(kv, dtype)
        layouts = {
            "a scale a token": dequantize(codes, scales, torch.float32),
            "a page, by its largest value": page_scaled(kv, dtype, by_first_token=False),
            "a page, by its first token": page_scaled(kv, dtype, by_first_token=True),
        }
        errors = {layout: float((values - kv).norm() / kv.norm()) for layout, values in layouts.items()}
        for layout, error in errors.items():
            yield Row(
                f"KV in {name}, {layout}: error", error, "of its size", "a scale a token", errors["a scale a token"]
            )


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.engine.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    torch.set_num_threads(2)
    prompts = texts(num_texts=8, num_tokens=384)
    rows = []
    for name, quality in measure(prompts, KINDS).items():
        rows.append(Row(f"{name}: logit error", quality.error, "of their size"))
        rows.append(Row(f"{name}: same greedy token", quality.agreement, "share"))
        rows.append(Row(f"{name}: divergence", quality.divergence, "nats"))
    rows += kv_rows(kv_of(prompts[0]))
    publish("quality", f"penstock-tiny, {sum(map(len, prompts))} tokens of held-out text, against float32", rows)


if __name__ == "__main__":
    main()
