"""Measures what determinism costs on a CPU, beside the fastest products whose rounding depends on the batch.

The engine's own products sum a row in one order, whatever rows are beside it; oneDNN chooses an order by the number of
rows. Both are timed over all layers of the 135M shape in bf16, and then in whole steps: of the engine as it is, and of
one whose products are left to oneDNN, as they are where there is no kernel for a layer. Subjects alternate, and the
quickest call of each counts. `python -m benchmarks.steps.determinism`
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import torch

from benchmarks.common.report import Row, publish
from benchmarks.common.shapes import random_llama
from benchmarks.common.timing import print_duration
from benchmarks.engine.__main__ import OwnEngine, in_turns
from engine.layers import linear
from engine.layers.linear import Linear
from engine.models.config import ModelConfig

ROWS, BATCHES, PROMPTS, CONTEXT = (1, 16, 64, 512, 2048), (1, 16, 64), (512, 2048), 512
OURS, LIBRARY = "one order", "oneDNN"


def left_to_library() -> contextlib.AbstractContextManager[object]:
    """Lays out the layers that are made within the block for oneDNN."""
    return mock.patch.object(linear, "pack_for_tiles", return_value=None)


class Products:
    """The matrix products of all layers. Each has its own weights, so that they do not stay in the CPU cache."""

    def __init__(self, model: ModelConfig) -> None:
        q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        inner, hidden = model.intermediate_size, model.hidden_size
        self._shapes = [(q_size + 2 * kv_size, hidden), (hidden, q_size), (2 * inner, hidden), (hidden, inner)]
        self._layers = [
            [Linear(torch.randn(shape).bfloat16()) for shape in self._shapes] for _ in range(model.num_layers)
        ]

    def of_rows(self, num_rows: int) -> Callable[[], None]:
        inputs = [torch.randn(num_rows, num_inputs).bfloat16() for _, num_inputs in self._shapes]

        def multiply() -> None:
            with torch.inference_mode():
                for layer in self._layers:
                    for product, x_TI in zip(layer, inputs, strict=True):
                        product(x_TI)

        return multiply


def _row(name: str, calls: Mapping[str, Callable[[], object]], rounds: int) -> Row:
    took_s = in_turns(calls, rounds)
    return Row(name, took_s[OURS] * 1e3, "ms", LIBRARY, took_s[LIBRARY] * 1e3)


def measure(folder: Path, num_threads: int, rounds: int) -> list[Row]:
    torch.set_num_threads(num_threads)
    model = ModelConfig.from_folder(str(folder))
    products = {OURS: Products(model)}
    with left_to_library():
        products[LIBRARY] = Products(model)
    rows = [
        _row(f"products of {count} rows", {name: each.of_rows(count) for name, each in products.items()}, rounds)
        for count in ROWS
    ]
    del products
    engines = {OURS: OwnEngine(folder, num_threads, share_weights=False)}
    with left_to_library():
        engines[LIBRARY] = OwnEngine(folder, num_threads, share_weights=False)
    for batch in BATCHES:
        calls = {name: engine.decode(batch, CONTEXT) for name, engine in engines.items()}
        rows.append(_row(f"decode step, {batch} at {CONTEXT}", calls, rounds))
    for count in PROMPTS:
        calls = {name: engine.prefill(count) for name, engine in engines.items()}
        rows.append(_row(f"prompt of {count}", calls, rounds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steps.determinism",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with print_duration():
        rows = measure(random_llama(), options.threads, options.rounds)
        publish("determinism", f"135M shape, bf16, {options.threads} threads; best of {options.rounds} rounds", rows)


if __name__ == "__main__":
    main()
