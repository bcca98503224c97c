"""Compares products with quantized weights on a CPU with the packed bf16 weight and the memory bandwidth.

There are two settings: a stack of 4096 x 4096 products that exceeds every cache, like the layers of a large model, and
two products that stay in the last-level cache. Each round runs every kind through the stack once. A figure is the
median of the rounds and a ratio the median of the rounds' ratios, so that other work on the machine affects both alike.
One thread is timed in processor time, which other work hardly changes; several are timed by the clock and need idle
cores. The floor is the kind's bytes at the rate at which as many threads read the bf16 stack.
`python -m benchmarks.engine.quantized_cpu [--threads N]`
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.common.report import Row, publish
from benchmarks.common.timing import Stopwatch
from engine.cpu.linear import TileLinear, pack_for_tiles
from engine.weights.quantized_weight import Kind, quantize_weight

_WIDTH = 4096
_NUM_LAYERS = 20  # 671 MB in bf16
_ROWS = (1, 16, 64, 256)
_KINDS: tuple[Kind, ...] = ("int8", "int4", "fp8")


def stacks(num_layers: int) -> dict[str, list[TileLinear]]:
    weight = torch.randn(_WIDTH, _WIDTH)
    made = {"bf16": [pack_for_tiles(weight.bfloat16(), None) for _ in range(num_layers)]}
    for kind in _KINDS:
        quantized = quantize_weight(weight, kind)
        made[kind] = [pack_for_tiles(quantized, None) for _ in range(num_layers)]
    found = {kind: [layer for layer in layers if layer is not None] for kind, layers in made.items()}
    if any(len(layers) < num_layers for layers in found.values()):
        raise SystemExit("this benchmark needs a C++ compiler, and a CPU that engine/cpu/isa.py knows")
    return found


def now_s() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def product_s(layers: Sequence[TileLinear], x: torch.Tensor) -> float:
    """Returns the seconds of one product, averaged over the stack."""
    with Stopwatch(now_s) as watch:
        for layer in layers:
            layer(x)
    return watch.seconds / len(layers)


def read_rate(layers: Sequence[TileLinear]) -> float:
    """Returns bytes per second, the best of a few reads by all threads."""
    took_s = []
    for _ in range(5):
        with Stopwatch(now_s) as watch:
            for layer in layers:
                layer.packed.view(torch.int64).sum()
        took_s.append(watch.seconds)
    return sum(layer.num_bytes for layer in layers) / min(took_s)


def measure(name: str, of_kind: dict[str, list[TileLinear]], num_rounds: int) -> list[Row]:
    rate = read_rate(of_kind["bf16"])
    rows = [Row(f"{name}: memory, read", rate / 1e9, "GB/s")]
    for num_rows in _ROWS:
        x = torch.randn(num_rows, _WIDTH).bfloat16()
        took: dict[str, list[float]] = {kind: [] for kind in of_kind}
        for _ in range(num_rounds + 1):
            for kind, layers in of_kind.items():
                took[kind].append(product_s(layers, x))
        for kind in _KINDS:  # the first round is a warm-up
            ms = statistics.median(took[kind][1:]) * 1e3
            ratio = statistics.median(a / b for a, b in zip(took[kind][1:], took["bf16"][1:], strict=True))
            floor_ms = of_kind[kind][0].num_bytes / rate * 1e3
            rows.append(Row(f"{name}: {kind}, {num_rows} rows", ms, "ms", "packed bf16, paired", ms / ratio))
            rows.append(Row(f"{name}: {kind}, {num_rows} rows", ms, "ms", "its bytes, read", floor_ms))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.quantized_cpu", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stack = stacks(_NUM_LAYERS)
    rows = measure("stack beyond the caches, one thread", stack, arguments.rounds)
    rows += measure("in the last cache, one thread", {kind: layers[:2] for kind, layers in stack.items()}, 15)
    if arguments.threads > 1:
        torch.set_num_threads(arguments.threads)
        rows += measure(f"stack beyond the caches, {arguments.threads} threads", stack, arguments.rounds)
    publish("quantized_cpu", f"{_WIDTH} x {_WIDTH}, each kind in turn", rows)


if __name__ == "__main__":
    main()
