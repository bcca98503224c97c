"""Benchmarks kernels, steps and transfers on a CUDA device, and tunes the attention kernels.

`python -m benchmarks.gpu` (`make gpu-check`) and `python -m benchmarks.gpu.tune` run them; both rehearse without a GPU.
They need neither network nor Ray, and change no setting of the device.
"""
