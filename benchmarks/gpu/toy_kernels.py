"""Runs every kernel once at toy shapes, for `compute-sanitizer python -m benchmarks.gpu.toy_kernels`."""

from __future__ import annotations

import argparse

from benchmarks.gpu.bench_device import BenchDevice, RehearsalDevice, ToyDevice
from benchmarks.gpu.kernels import decode_rows, memory_rows, prefill_rows, quantized_rows, sampling_rows
from engine.kernels.backends import select_backend, select_ops


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.toy_kernels", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="run them in Triton's interpreter")
    bench: BenchDevice = RehearsalDevice() if parser.parse_args().rehearse else ToyDevice()
    backend = select_backend("triton", bench.device)
    for rows in (
        decode_rows(bench, backend, 1.0),
        prefill_rows(bench, backend, 1.0),
        memory_rows(bench, backend, select_ops(backend), 1.0),
        sampling_rows(bench),
        quantized_rows(bench),
    ):
        for row in rows:
            print(row.metric, flush=True)
    bench.cuda.synchronize()


if __name__ == "__main__":
    main()
