"""Heads: small models over a target's hidden states that predict the tokens after its next one.

Others take `load_head` and `HeadRunner`, which computes a head over KV pages of its own, and `HeadConfig` for its size.
The room knows a head's tensors and layers; it knows no sequences, no sampling and no policy.
"""
