"""Triton kernels for attention over pages: decodes, prompt chunks and latents, long contexts split among programs.

`engine.kernels.triton.backend` calls `paged_decode`, `paged_prefill` and `paged_latent`; `benchmarks.gpu.tune` uses
their `candidates` and `tuning`. `attend` is the loop that they share, `join_splits` the pass that joins split contexts.
The room must not know how batches are scheduled; it sees page tables and lengths.
"""
