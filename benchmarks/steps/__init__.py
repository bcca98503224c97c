"""Benchmarks what a worker's step costs besides the model, with a null engine in place of the real one.

`python -m benchmarks.steps` measures decode, colocated and prefill steps in CPU time. `null_engine` also serves to test
the loop of `benchmarks.engine`. No model is loaded.
"""
