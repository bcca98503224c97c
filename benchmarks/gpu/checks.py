"""Checks results on the device: captured, eager and plain-torch steps agree, and one layer of a large pool is read as
it would be alone. Also runs every kernel under compute-sanitizer where that is installed.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import Row
from benchmarks.gpu.bench_device import BenchDevice
from benchmarks.gpu.kernels import TOY_HEADS, paged
from benchmarks.gpu.steps import LoadedModel
from engine.cache.pool_memory import allocate_pool
from engine.graphs.cuda_graphs import GraphRunner
from engine.kernels.attention_interface import AttentionBackend
from engine.kernels.kv_quantization import layers_of
from engine.kernels.layer_ops import TorchOps
from engine.kernels.reference import TorchAttention
from engine.step.batch import HostBatch, to_device, upload_step
from engine.step.model_runner import ModelRunner

_GRAPHS, _TORCH = 1e-3, 3e-2  # largest differences, as shares of the norm; bf16 rounds each layer's results
_LAYERS = 32  # of the pool that is strided over
_LONGEST = 500  # tokens of a decode's context
_SANITIZER_S = 240.0


def agreement_rows(bench: BenchDevice, model: LoadedModel) -> Iterator[Row]:
    """Yields the largest difference of logits between replayed, eager and plain-torch steps, over every batch size that
    is captured.
    """
    engine, graphs = model.engine, model.engine._graphs
    assert graphs is not None
    pages = layers_of(engine.kv_pages, engine.layout)
    plain = ModelRunner(engine._part.decoder, pages, TorchAttention(), TorchOps())
    worst = {"graphs": (0.0, 0), "plain torch": (0.0, 0)}
    for size in graphs.sizes():
        host = _decodes(size, engine.layout.page_size, engine.pool.num_pages, engine.model.vocab_size)
        eager = engine.runner.run(to_device(host, engine.kv_pages.device)).logits_RV.float()
        for name, runner in (("graphs", graphs), ("plain torch", plain)):
            difference = _difference(_logits(runner, host, engine.kv_pages.device), eager)
            worst[name] = max(worst[name], (difference, size))
    for name, wanted in (("graphs", _GRAPHS), ("plain torch", _TORCH)):
        difference, size = worst[name]
        at = f"logits of {model.name}, {name} against eager, {len(graphs.sizes())} batches, largest at {size}"
        yield Row(f"check: {at}", difference, "of the norm", "wanted at most", wanted)


def _logits(runner: GraphRunner | ModelRunner, host: HostBatch, device: torch.device) -> torch.Tensor:
    if not isinstance(runner, GraphRunner):
        return runner.run(to_device(host, device)).logits_RV.float()
    return runner.forward(upload_step(host, device, runner.tables).batch).logits_RV.float()


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = float((found - wanted).norm() / wanted.norm())
    return difference if math.isfinite(difference) else math.inf


def _decodes(size: int, page_size: int, num_pages: int, vocab_size: int) -> HostBatch:
    """Returns a step in which `size` sequences of different lengths decode, each with its own pages."""
    width = min(num_pages // size, -(-_LONGEST // page_size))
    context_B = 1 + np.arange(size) * 37 % min(width * page_size, _LONGEST)
    position_B = context_B - 1
    table_BW = np.arange(size * width, dtype=np.int32).reshape(size, width)
    rows = np.arange(size)
    return HostBatch(
        token_ids_T=rows * 7919 % vocab_size,
        positions_T=position_B,
        query_start_B1=np.arange(size + 1),
        context_B=context_B,
        page_table_BW=table_BW[:, : -(-int(context_B.max()) // page_size)].copy(),
        slot_page_T=table_BW[rows, position_B // page_size].astype(np.int64),
        slot_offset_T=position_B % page_size,
        max_query_len=1,
        num_decodes=size,
        sampled_places=rows,
        logit_rows_R=rows,
    )


def large_pool_rows(bench: BenchDevice, backend: AttentionBackend) -> Iterator[Row]:
    """Yields decode attention over the first and the last layer of a pool that fills most of the device, compared with
    a copy of that layer alone.
    """
    (heads, kv_heads), dim, page_size = bench.pick((32, 8), TOY_HEADS), bench.pick(128, 16), 16
    layers, batch, context = bench.pick((_LAYERS, 64, 4096), (3, 2, 40))
    page_bytes = layers * 2 * kv_heads * page_size * dim * 2
    num_pages = bench.pick(int(min(100e9, 0.75 * bench.free_bytes())), 8 * page_bytes) // page_bytes
    shape = (num_pages, layers, 2, kv_heads, page_size, dim)
    pool = allocate_pool(shape, torch.bfloat16, bench.device)
    for part in pool.split(max(1, num_pages // 64)):
        part.normal_()
    meta, num_used = paged([1] * batch, [context] * batch, page_size, bench.device)
    spread = (num_pages - 1) // max(num_used - 1, 1)
    meta.page_table_BP.mul_(max(spread, 1))  # also pages at the end
    q = bench.noise(batch, heads, dim)
    for layer in (0, layers - 1):
        used = torch.zeros(num_pages, dtype=torch.bool, device=bench.device)
        used[meta.page_table_BP.flatten().long()] = True
        alone, numbers = pool[used, layer], (used.cumsum(0) - 1).int()
        compact = paged([1] * batch, [context] * batch, page_size, bench.device)[0]
        compact.page_table_BP.copy_(numbers[meta.page_table_BP.long()])
        found = backend.paged_attention(q, pool[:, layer], meta, dim**-0.5, None)
        wanted = backend.paged_attention(q, alone, compact, dim**-0.5, None)
        at = f"layer {layer} of {layers} in a pool of {pool.nbytes / 1e9:.3g} GB, {batch} x {context}"
        yield Row(f"check: {at}", _difference(found.float(), wanted.float()), "of the norm", "wanted at most", 1e-3)
        strided_s = bench.seconds(lambda: backend.paged_attention(q, pool[:, layer], meta, dim**-0.5, None))  # noqa: B023
        alone_s = bench.seconds(lambda: backend.paged_attention(q, alone, compact, dim**-0.5, None))  # noqa: B023
        yield Row(f"paged decode, {at}", strided_s * 1e6, "us", "the layer alone", alone_s * 1e6)


def sanitizer_rows(bench: BenchDevice) -> Iterator[Row]:
    """Yields the seconds of every kernel at toy shapes under compute-sanitizer's memcheck. Raises RuntimeError with its
    report if it finds an invalid access; a rehearsal runs the kernels without it.
    """
    tool = shutil.which("compute-sanitizer")
    if tool is None and not bench.is_rehearsal:
        print("skipped: compute-sanitizer is not installed", file=sys.stderr)
        return
    checked = [tool, "--tool", "memcheck", "--error-exitcode", "9"] if tool and not bench.is_rehearsal else []
    command = [*checked, sys.executable, "-m", "benchmarks.gpu.toy_kernels", *bench.pick([], ["--rehearse"])]
    started_s = time.monotonic()
    options: dict[str, Any] = {"timeout": _SANITIZER_S, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, check=False, text=True, env=dict(os.environ), **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    how = "compute-sanitizer memcheck" if checked else "no sanitizer"
    yield Row(f"every kernel at toy shapes, {how}", time.monotonic() - started_s, "s")
