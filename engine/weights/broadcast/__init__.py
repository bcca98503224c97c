"""Receives weights that a trainer broadcasts, and keeps them in memory as a safetensors file.

The engine takes `receive_weights`, and prepares an update from the folder of its result. `engine.weights.checkpoint`
describes that file; the trainer's side is `penstock.client.broadcast`.
"""
