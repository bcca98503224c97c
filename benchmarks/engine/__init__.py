"""Benchmarks one engine in one process: steps, prompts, start, weights, quantization, grammars and cache tiers.

`python -m benchmarks.engine` compares it with the bare-torch floor, eager torch, transformers and vLLM; the modules
`adapters`, `quality`, `quantized_cpu`, `structured`, `tiers`, `weights` and the room
`speculation` are run by themselves. No router, no RPC and no Ray.
"""
